"""Start a program that ends when its starter ends, however that happens.

    python -m examples.bazaar.leash PARENT_PID PROGRAM [ARGUMENT...]

The kernel sends SIGTERM to the program when the demo exits, also after `kill -9` of the demo,
so that nothing stays behind. The parent's id is given and compared, since it may have died before
the request.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Ask for the signal, check that the parent still lives, become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the demo ended before this program began")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
