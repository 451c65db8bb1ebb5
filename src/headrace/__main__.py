"""`python -m headrace` and the `headrace` command: connects the command line to the app."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

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
