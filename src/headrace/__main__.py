"""`python -m headrace` and the `headrace` command: connects the command line to the app."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

# Imported objects are permanent, so collecting garbage during imports only wastes CPU.
gc.disable()

from headrace.app import PACKAGES, Headrace  # noqa: E402 - after gc.disable()
from headrace.cli.main import run  # noqa: E402

gc.freeze()
gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return run(given, make_app=Headrace, packages=PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
