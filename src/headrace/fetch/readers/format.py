"""What a format is: a name, how its files are told by their first bytes, and what reads them.

A new format is one file that ends with its `Format` and one line in `recognise.FORMATS`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.fetch.mappings import Mapping
from headrace.fetch.readers.row import RawRow, not_a_catalogue


@dataclass(frozen=True, slots=True)
class Root:
    """The outermost element of an XML file."""

    name: str
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a file as text; `root` where they are XML. `mapping` names its fields.

    `lines_skipped` are the empty lines above the text. A sheet has no text.
    """

    text: str
    encoding: str
    root: Root | None = None
    mapping: Mapping | None = None
    lines_skipped: int = 0
    is_sheet: bool = False


def require_letters(head: Head) -> None:
    """Return where the first line of a file that no format takes could be read. Raises: NotACatalogue.

    Without this a table in another encoding, whose header is not understood for that, would be told that
    its header names no id.
    """
    if "\N{REPLACEMENT CHARACTER}" in head.text.splitlines()[0]:
        name = head.encoding.removesuffix("-sig").upper()
        raise not_a_catalogue("not_text", 1, encoding=name)


@dataclass(frozen=True, slots=True)
class Format:
    """A catalogue format; `title` is what people call it.

    `takes_mapping` where the format says nothing about the names of fields, so that a mapping may;
    the others mean one thing only and are not looked for once a mapping is given.
    """

    name: str
    title: str
    recognises: Callable[[Head], bool]
    read: Callable[[io.BufferedReader, Head], Iterator[RawRow]]
    takes_mapping: bool = False
