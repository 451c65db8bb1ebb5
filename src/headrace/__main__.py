"""`python -m headrace` and the `headrace` command: the one place that joins the commands and the app."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

# What imports make stays: looked through again and again meanwhile it is a seventh of their CPU (0.21 s instead of 0.18:
# `time.process_time()`, least of eight, 2 cores, 2026-11-22).
gc.disable()

from headrace.app import PACKAGES, Headrace  # noqa: E402 - after the line above on purpose
from headrace.cli.main import run  # noqa: E402

gc.freeze()
gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return run(given, make_app=Headrace, packages=PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
