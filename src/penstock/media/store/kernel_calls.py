"""Two system calls that Python has no name for: membarrier and fallocate with a mode.

membarrier makes every processor that runs a registered process pass a full memory barrier. So a worker pays nothing for its
turn counter: the one filler pays for all, some microseconds a fill. Where the call is refused (some seccomp
filters do) `barrier` says so, and the filler waits longer than any store buffer keeps a store.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_GLOBAL_EXPEDITED: Final = 2
_REGISTER_GLOBAL_EXPEDITED: Final = 4
_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def register_for_barriers() -> bool:
    """Let `barrier` of any process reach this one; whether the kernel agrees. Lost at fork and exec."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def barrier() -> bool:
    """Every registered process has passed a full memory barrier since the call; False: not possible here."""
    return _membarrier(_GLOBAL_EXPEDITED)


def punch_hole(descriptor: int, offset: int, length_bytes: int) -> None:
    """Take the bytes out of the file, and their pages out of the page cache. Raises: OSError.

    Pages that a socket still sends stay as they are: the socket has the only reference then, and the next write
    gets new pages.
    """
    if _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, length_bytes) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _membarrier(command: int) -> bool:
    if _MEMBARRIER is None:
        return False
    zero = ctypes.c_uint(0)
    return bool(_libc.syscall(ctypes.c_long(_MEMBARRIER), ctypes.c_int(command), zero, 0) == 0)
