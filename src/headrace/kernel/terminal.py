"""The interface between a room's commands and the terminal.

A room's commands parse arguments, call one method of its service and render the result. The `cli`
package implements `Terminal`: it opens engines and handles `--json`. Tables and times look the same
in every room.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

import click
import msgspec

from headrace.kernel.config import parse_as
from headrace.kernel.errors import InvalidInput

Service = TypeVar("Service")
Answer = TypeVar("Answer")
_BLANK: Final = frozenset(
    "\N{COMBINING GRAPHEME JOINER}\N{HANGUL CHOSEONG FILLER}\N{HANGUL JUNGSEONG FILLER}"
    "\N{HANGUL FILLER}\N{HALFWIDTH HANGUL FILLER}\N{BRAILLE PATTERN BLANK}"
)
"""Invisible characters that `str.isprintable` accepts."""


class Terminal(Protocol):
    """One run of a command."""

    @property
    def is_json(self) -> bool:
        """Whether the user passed `--json`."""
        ...

    def run(
        self,
        kind: type[Service],
        verb: Callable[[Service], Awaitable[Answer]],
        *,
        application: str | None = None,
    ) -> Answer:
        """Open the engines, call `verb` with the service of type `kind`, close the engines.

        `application` is MODULE:APP, whose declarations the service then has.
        """
        ...

    def show(self, value: Any, text: str) -> None:
        """Print `value` as one JSON document with `--json`, otherwise `text`.

        `value` is an object, for a list that of `listing`. A `Table` or `Lines` has columns and
        colors on a terminal.
        """
        ...

    def note(self, text: str) -> None:
        """Print a remark on standard error if that is a terminal, and not with `--json`."""
        ...

    def progress(self, text: str, done: float = 0, total: float | None = None) -> None:
        """Replace the progress on standard error: a bar on a terminal, else a line at times."""
        ...


class CommandGroup(click.Group):
    """A group whose commands receive the `Terminal` as their first argument."""

    def command(  # type: ignore[override]
        self, *args: Any, **options: Any
    ) -> Callable[[Callable[..., Any]], click.Command]:
        """Add the decorated function as a command."""
        add: Callable[[Any], click.Command] = super().command(*args, **options)
        return lambda function: add(click.pass_obj(function))


class Parsed(click.ParamType[Any]):
    """A type of options and arguments: the value that `parse` returns for a text.

    A text that `parse` refuses by a ValueError, with what it expects, raises `refusal`.
    """

    def __init__(
        self,
        parse: Callable[[str], Any],
        refusal: type[InvalidInput] = InvalidInput,
        *,
        name: str = "text",
    ) -> None:
        self._parse = parse
        self._refusal = refusal
        self.name = name

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,  # noqa: ARG002 - click's signature
    ) -> Any:
        """Parse a text. A default that is no text is a value already."""
        if not isinstance(value, str) or param is None:
            return value
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        return parse_as(self._parse, name, value, self._refusal)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises: ValueError."""
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested less deeply") from error
    except ValueError as error:
        raise ValueError(f"JSON with its quotes ({error})") from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Report a fault of the system while the block writes `file`. Raises: InvalidInput."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            f"cannot write {file}: {error.strerror or error}: choose another path"
        ) from error


class Cell(str):
    """A value of a table: its text for scripts, and another one for people."""

    __slots__ = ("human",)
    human: str

    def __new__(cls, text: object, human: str) -> Self:
        """Make a cell that prints `text`, and `human` on a terminal."""
        made = super().__new__(cls, text)
        made.human = human
        return made


def size_cell(size_bytes: int) -> Cell:
    """A number of bytes; with a unit for people."""
    return Cell(size_bytes, size_text(size_bytes))


def size_text(size_bytes: float) -> str:
    """A size for people: `512 B`, `1.5 KiB`, `20 GiB`."""
    amount, units = float(size_bytes), ["PiB", "TiB", "GiB", "MiB", "KiB", "B"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop()
    is_short = units[-1] == "B" or amount >= 100
    return f"{amount:.0f} {units[-1]}" if is_short else f"{amount:.1f} {units[-1]}"


def age_cell(age_s: float) -> Cell:
    """A duration in seconds; with another unit for people."""
    return Cell(f"{age_s:.0f} s", duration_text(age_s))


def duration_text(duration_s: float) -> str:
    """A duration for people: `40 s`, `12 min`, `3.5 h`, `9 d`."""
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    if duration_s < 7200:
        return f"{duration_s / 60:.0f} min"
    return f"{duration_s / 3600:.1f} h" if duration_s < 172_800 else f"{duration_s / 86_400:.0f} d"


class Table(str):
    """A table as aligned text, a line per row, with its cells for the form on a terminal."""

    __slots__ = ("head", "rows")
    head: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __new__(cls, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Self:
        """Make a table of rows below a head."""
        cells = tuple(tuple(row) for row in rows)
        made = super().__new__(cls, _aligned(head, cells))
        made.head, made.rows = tuple(head), cells
        return made


class Lines(str):
    """Texts and tables below each other."""

    __slots__ = ("parts",)
    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Self:
        """Make the text of all `parts`, each on lines of its own."""
        made = super().__new__(cls, "\n".join(parts))
        made.parts = parts
        return made


def _aligned(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    texts = [
        [" ".join(filter(None, str(cell).splitlines())) for cell in row] for row in (head, *rows)
    ]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(line.rstrip() for line in lines)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Rows in aligned columns below a head."""
    return Table(head, rows)


def paged(text: str, cursor: object, hint: str = "more: --cursor") -> str:
    """`text`, and how to read the next page if there is one, as words of a shell."""
    if cursor is None:
        return text
    value = shlex.quote(str(cursor))
    # A value that begins with - would be read as an option.
    return Lines(text, f"{hint}={value}" if value.startswith("-") else f"{hint} {value}")


def listing(items: Any, **more: Any) -> dict[str, Any]:
    """The document of a list: `items`, and `next_cursor` if the list has pages."""
    return {"items": list(items), **more}


def cursor_after(items: Sequence[Any], limit: int, field: str) -> Any:
    """The `field` of the last item of a full page, where the next page begins; else None."""
    return getattr(items[-1], field) if items and len(items) >= limit else None


def pluralize(value: int, one: str, many: str = "") -> str:
    """`1 job is`, `12,345 jobs are`; `many` is by default `one` with an s."""
    return f"1 {one}" if value == 1 else f"{value:,} {many or one + 's'}"


def is_visible(character: str) -> bool:
    """Whether a character is visible and does not change its neighbors."""
    return character.isprintable() and character not in _BLANK


def visible(text: str) -> str:
    """`text` with invisible characters escaped, such as `\\u202e`."""
    return "".join(c if is_visible(c) else _number(c) for c in text)


def _number(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
