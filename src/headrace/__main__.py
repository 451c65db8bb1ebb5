"""`python -m headrace` and the `headrace` command: connects the command line to the app."""

from __future__ import annotations

import gc
import os
import sys

# `python -m` puts the current folder first, where a file such as queue.py would hide a module that
# Headrace imports. `load_app` adds the folder for the application.
_folder = os.getcwd()  # noqa: PTH109 - pathlib imports such modules
if __name__ == "__main__" and not sys.flags.safe_path and sys.path[:1] == [_folder]:
    del sys.path[0]

from collections.abc import Sequence  # noqa: E402 - after the folder is removed

# Imported objects are permanent, so collecting garbage during imports only wastes CPU.
gc.disable()
# structlog imports rich if it can, for tracebacks that are not used: 0.05 s of CPU and 5 MiB in
# each process. `cli.screen` imports it where it is needed.
_hides_rich = sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]

from headrace.app import PACKAGES, Headrace  # noqa: E402 - after gc.disable()
from headrace.cli.main import run  # noqa: E402

if _hides_rich:
    del sys.modules["rich"]
gc.freeze()
gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return run(given, make_app=Headrace, packages=PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
