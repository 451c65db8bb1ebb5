"""The lines of a text file, each of bounded length: a file need not have any line break.

Bytes that are no UTF-8 come through as surrogates, so that the fault is told with its own line; a strict
decoder would stop a whole buffer of lines before it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Final

from headrace.fetch.errors import CatalogueBroken
from headrace.fetch.readers.row import Truncated, broken

UTF8_BYTES_MAX: Final = 4
_ESCAPED: Final = re.compile("[\udc80-\udcff]")


def read_lines(
    stream: io.BufferedReader, encoding: str, *, characters_max: int
) -> Iterator[tuple[int, str, bool]]:
    """(number, line, whether its end is there) of each line.

    Raises: CatalogueBroken, Truncated, CatalogueTooLarge.
    """
    errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
    text = io.TextIOWrapper(stream, encoding=encoding, errors=errors, newline="")
    number = 0
    with text:
        while line := _next_line(text, encoding, number + 1, characters_max):
            number += 1
            is_ended = line.endswith(("\n", "\r"))
            if len(line) >= characters_max and not is_ended:
                raise broken("line_too_long", number, most=characters_max)
            if not line.isascii() and (escaped := _ESCAPED.search(line)):
                if not is_ended and len(line) - escaped.start() < UTF8_BYTES_MAX:
                    raise Truncated("truncated_letter", number)
                raise not_text(encoding, number)
            yield number, line, is_ended


def _next_line(text: io.TextIOWrapper, encoding: str, number: int, characters_max: int) -> str:
    try:
        return text.readline(characters_max)
    except UnicodeDecodeError as error:
        if "unexpected end" in error.reason or "truncated" in error.reason:
            raise Truncated("truncated_letter", number) from None
        raise not_text(encoding, number) from None


def not_text(encoding: str, line: int) -> CatalogueBroken:
    """The error of a file that is not of its encoding."""
    name = encoding.removesuffix("-sig").upper()
    return broken("invalid_encoding", line, encoding=name)
