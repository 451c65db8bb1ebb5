"""What a room's commands may ask of the terminal they run in.

A room's `cli.py` parses, calls one verb of its service and renders; it knows neither how engines are
opened nor whether the user asked for `--json`. The `cli` floor implements this, click hands it on with
`@click.pass_obj`. How a table looks and how a moment is written is the same in every room.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeVar

Service = TypeVar("Service")
Answer = TypeVar("Answer")
_BLANK: Final = frozenset(
    "\N{COMBINING GRAPHEME JOINER}\N{HANGUL CHOSEONG FILLER}\N{HANGUL JUNGSEONG FILLER}"
    "\N{HANGUL FILLER}\N{HALFWIDTH HANGUL FILLER}\N{BRAILLE PATTERN BLANK}"
)
"""Letters and signs that look like nothing."""


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


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under a head, in aligned columns."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(line.rstrip() for line in lines)


def is_visible(character: str) -> bool:
    """Whether a character shows itself, and only itself: no control, nothing that turns what is around it, no odd space."""
    return character.isprintable() and character not in _BLANK


def visible(text: str) -> str:
    """`text` with what nobody would see as its number: `\\u202e`."""
    return "".join(c if is_visible(c) else _number(c) for c in text)


def _number(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def parse_moment(text: str) -> datetime:
    """`2026-11-21`, `2026-11-21T10:00`, `2026-11-21T10:00:00+01:00`; without an offset it is UTC. Raises: ValueError."""
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
