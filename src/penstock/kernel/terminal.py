"""What a room's commands may ask of the terminal they run in.

A room's `cli.py` parses, calls one verb of its service and renders; it knows neither how engines are
opened nor whether the user asked for `--json`. The `cli` floor implements this, click hands it on with
`@click.pass_obj`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

Service = TypeVar("Service")
Answer = TypeVar("Answer")


class Terminal(Protocol):
    """One run of a command."""

    @property
    def is_json(self) -> bool:
        """Whether the user asked for `--json`."""
        ...

    def run(self, kind: type[Service], verb: Callable[[Service], Awaitable[Answer]]) -> Answer:
        """Open the engines, give the room's service of type `kind` to `verb`, close them again."""
        ...

    def show(self, value: Any, text: str) -> None:
        """Print `value` as one JSON document under `--json`, else `text`."""
        ...

    def progress(self, text: str) -> None:
        """Replace the progress line on standard error; nothing under `--json` or without a terminal."""
        ...
