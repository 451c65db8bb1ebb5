"""`python -m penstock` and the `penstock` command: the one place that joins the commands and the app."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.app import PACKAGES, Penstock
from penstock.cli.main import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return run(given, make_app=Penstock, packages=PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
