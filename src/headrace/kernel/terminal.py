"""The interface between a room's commands and the terminal.

A room's commands parse arguments, call one method of its service and render the result. The `cli`
package implements `Terminal`: it opens engines and handles `--json`. Tables and times look the same
in every room.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

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

    def run(self, kind: type[Service], verb: Callable[[Service], Awaitable[Answer]]) -> Answer:
        """Open the engines, call `verb` with the service of type `kind`, close the engines."""
        ...

    def show(self, value: Any, text: str) -> None:
        """Print `value` as one JSON document with `--json`, otherwise `text`."""
        ...

    def progress(self, text: str) -> None:
        """Replace the progress line on standard error, unless `--json` or no terminal is used."""
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
        raise InvalidInput(f"cannot write {file}: {error.strerror or error}") from error


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows in aligned columns below a head."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(line.rstrip() for line in lines)


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
