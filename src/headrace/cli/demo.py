"""`headrace demo`: the demo site, from a checkout or from the wheel.

The demo is an application like a user's (`examples/bazaar`), not a part of Headrace. A checkout has
it beside `src`; the build backend puts a copy into the wheel, so that `uvx` and `pipx run` start it
without a checkout. It runs in its own interpreter, as `python -m examples.bazaar.demo`.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

import headrace
from headrace.kernel.errors import NotFound, needing

MODULE: Final = "examples.bazaar.demo"
LIBRARIES: Final = (
    "litestar",
    "jinja2",
    "pycurl",
    "PIL",
    "httptools",
    "uvicorn",
)
"""Libraries of the extra `demo`; without those of `embedded`, whose error names other engines."""


class DemoMissing(NotFound):
    """The files of the demo are not installed here."""

    code = "cli.demo_missing"


def demo_folder() -> Path:
    """The folder that has `examples/bazaar`. Raises: DemoMissing."""
    package = Path(headrace.__file__).resolve().parent
    for folder in (package / "demo", package.parents[1]):
        if (folder / "examples" / "bazaar" / "demo.py").is_file():
            return folder
    raise DemoMissing(
        f"{package / 'demo'} does not exist: install Headrace from its wheel, or run `make demo` in"
        " a checkout"
    )


@click.command(
    "demo",
    short_help="Run a small classifieds site until Ctrl-C.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def demo(options: tuple[str, ...]) -> None:
    """Run a small classifieds site with simulated users, in the folder demo-data.

    It starts PostgreSQL, Valkey and all roles, and prints their addresses. Ctrl-C stops it and
    keeps the folder. `headrace demo --help` lists its options, such as --seconds and --folder.
    """
    folder = demo_folder()
    if not all(find_spec(library) for library in LIBRARIES):
        raise needing("headrace demo", "demo")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", MODULE, *options], environment)  # noqa: S606


COMMANDS: Final[list[Any]] = [demo]
