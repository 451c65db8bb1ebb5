"""An incremental XML parser over expat: rows from a file of any size, one row in memory.

The caller chooses which elements are rows and receives each as a list of elements in file order.

Hostile input is bounded. expat stops entity bombs but accepts any nesting, so depth, text size and
elements of a row have limits here. A DOCTYPE that only names the format, as in old YML files, is
accepted and never loaded; a DOCTYPE with declarations is refused.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias
from xml.parsers import expat

from headrace.fetch.errors import CatalogueBroken
from headrace.fetch.model import FIELD_BYTES_MAX, FIELDS_BYTES_MAX, ROWS_MAX
from headrace.fetch.readers.rows import Fault, RawRow, Root, Truncated, broken, not_a_catalogue

DEPTH_MAX: Final = 64
ELEMENTS_OF_ROW_MAX: Final = 10_000
BLOCK_BYTES: Final = 64 * 1024
TOKEN_BYTES_MAX: Final = 2**20
"""Maximum size of one tag or comment, which expat buffers until its end."""
_AT_END: Final = frozenset(
    expat.errors.codes[text]
    for text in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
)
IsRow: TypeAlias = Callable[[list[str]], bool]
OnOutside: TypeAlias = Callable[[str, dict[str, str], str], None]


class Element(NamedTuple):
    """An element of a row; its path is relative to the row and empty for the row itself."""

    path: str
    attributes: dict[str, str]
    text: str


@dataclass(slots=True)
class XmlRow:
    """The elements of a row in the order of their end tags; the row itself is the last."""

    number: int
    line: int
    elements: list[Element] = field(default_factory=list)
    fault: Fault | None = None

    def raw(self) -> RawRow:
        """The row without its fields."""
        return RawRow(self.number, self.line, fault=self.fault)

    def cells(self) -> dict[str, list[str]]:
        """The texts by path in lower case, and the attributes by `path.@name`."""
        found: dict[str, list[str]] = {}
        for element in self.elements:
            path = element.path.lower()
            if element.text and path:
                found.setdefault(path, []).append(element.text)
            for name, value in element.attributes.items():
                if value.strip():
                    key = f"{path}.@{name.lower()}" if path else f"@{name.lower()}"
                    found.setdefault(key, []).append(value.strip())
        return found


def read_xml(
    stream: io.BufferedReader,
    is_row: IsRow,
    *,
    on_outside: OnOutside | None = None,
    encoding: str | None = None,
) -> Iterator[XmlRow]:
    """The elements for which `is_row` accepts the path, in order.

    `on_outside` is called for each element that ends outside of rows. `encoding` overrides the
    declared one. Raises: CatalogueBroken, Truncated, CatalogueTooLarge.
    """
    document = _Document(is_row, on_outside, encoding)
    with stream:
        while block := stream.read(BLOCK_BYTES):
            document.feed(block)
            yield from document.take()
        document.finish()
        yield from document.take()


def find_root(head: bytes) -> Root | None:
    """The root element of a file that begins with `head`; None if `head` ends before it.

    Raises: NotACatalogue, CatalogueBroken.
    """
    found: list[Root] = []
    parser = expat.ParserCreate()
    parser.StartElementHandler = lambda name, attributes: found.append(Root(name, attributes))
    parser.StartDoctypeDeclHandler = _refuse_declarations
    try:
        parser.Parse(head, False)
    except (expat.ExpatError, ValueError, LookupError) as error:
        if not found:
            raise not_a_catalogue("is_unreadable_xml", detail=str(error)) from None
    return found[0] if found else None


def _refuse_declarations(
    _name: str, _system_id: str | None, _public_id: str | None, has_internal_subset: int
) -> None:
    if has_internal_subset:
        raise broken("dtd_forbidden")


def _refuse_entity(name: str, _is_parameter: int) -> None:
    # If the file has a DOCTYPE, expat drops unknown entities silently.
    raise broken("entity_unknown", entity=name[:40])


@dataclass(slots=True)
class _Open:
    """An element whose end tag was not read yet."""

    name: str
    attributes: dict[str, str]
    pieces: list[str] = field(default_factory=list)
    characters: int = 0


class _Document:
    """The expat handlers of one document; collects the rows that are complete."""

    def __init__(self, is_row: IsRow, on_outside: OnOutside | None, encoding: str | None) -> None:
        self._parser = parser = expat.ParserCreate(encoding)
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.StartDoctypeDeclHandler = _refuse_declarations
        parser.SkippedEntityHandler = _refuse_entity
        self._is_row = is_row
        self._on_outside = on_outside
        self._path: list[str] = []
        self._open: list[_Open] = []
        self._row: XmlRow | None = None
        self._row_depth = 0
        self._row_bytes = 0
        self._row_elements = 0
        self._finished: list[XmlRow] = []
        self._count = 0
        self._bytes_unmoved = 0
        self._bytes_parsed = 0

    def feed(self, block: bytes) -> None:
        """Parse one block."""
        self._bytes_unmoved += len(block)
        try:
            self._parser.Parse(block, False)
        except expat.ExpatError as error:
            detail = expat.ErrorString(error.code)
            around = self._around(block)
            raise broken("malformed_xml", error.lineno, detail=detail, snippet=around) from None
        except (ValueError, LookupError) as error:
            raise broken("unknown_encoding", detail=str(error)) from None
        self._bytes_parsed += len(block)
        if self._bytes_unmoved > TOKEN_BYTES_MAX:
            raise broken("tag_too_large", self._parser.CurrentLineNumber, bytes=TOKEN_BYTES_MAX)

    def _around(self, block: bytes) -> str:
        """The text around the position where the parser stopped."""
        at = max(0, self._parser.ErrorByteIndex - self._bytes_parsed)
        return block[max(0, at - 20) : at + 20].decode(errors="replace").strip()

    def finish(self) -> None:
        """End the document at the end of the file. Raises: Truncated, CatalogueBroken."""
        try:
            self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            if error.code in _AT_END:
                place = "/".join(self._path) or "the root"
                raise Truncated("truncated_xml", error.lineno, place=place) from None
            detail = expat.ErrorString(error.code)
            raise broken("malformed_xml", error.lineno, detail=detail, snippet="") from None

    def take(self) -> list[XmlRow]:
        """Return the rows completed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._bytes_unmoved = 0
        self._path.append(name)
        if len(self._path) > DEPTH_MAX:
            raise broken("too_deep", self._parser.CurrentLineNumber, most=DEPTH_MAX)
        if attributes and max(map(len, attributes.values())) > FIELD_BYTES_MAX:
            raise self._over_field(name)
        if self._row is None and self._open:
            # Outside of rows only elements without children matter: drop the text collected so far,
            # which may be a million line breaks.
            self._open[-1] = _Open(self._open[-1].name, {})
        self._open.append(_Open(name, attributes))
        if self._row is not None:
            self._row_elements += 1
            self._count_bytes(sum(map(len, attributes.values())) if attributes else 0)
        elif self._is_row(self._path):
            self._begin_row(self._parser.CurrentLineNumber)

    def _begin_row(self, line: int) -> None:
        self._count += 1
        if self._count > ROWS_MAX:
            raise broken("too_many_rows", line, most=ROWS_MAX)
        self._row = XmlRow(self._count, line)
        self._row_depth = len(self._path)
        self._row_bytes = self._row_elements = 0

    def _text(self, data: str) -> None:
        self._bytes_unmoved = 0
        if not self._open:
            return
        element = self._open[-1]
        element.characters += len(data)
        if element.characters > FIELD_BYTES_MAX:
            raise self._over_field(element.name)
        if self._row is not None:
            self._count_bytes(len(data))
            if self._row.fault is not None:
                return
        element.pieces.append(data)

    def _over_field(self, name: str) -> CatalogueBroken:
        line = self._parser.CurrentLineNumber
        return broken("field_too_large", line, element=name[:40], bytes=FIELD_BYTES_MAX)

    def _count_bytes(self, more: int) -> None:
        """Mark a row over its limits as faulty; its further content is dropped."""
        self._row_bytes += more
        is_over = self._row_bytes > FIELDS_BYTES_MAX or self._row_elements > ELEMENTS_OF_ROW_MAX
        if is_over and self._row is not None and self._row.fault is None:
            self._row.fault = Fault("row", "row_too_large", {"most": FIELDS_BYTES_MAX})

    def _end(self, _name: str) -> None:
        self._bytes_unmoved = 0
        element = self._open.pop()
        text = "".join(element.pieces).strip()
        depth = len(self._path)
        row = self._row
        if row is None:
            if self._on_outside is not None:
                self._on_outside(self._path[-1], element.attributes, text)
        else:
            if row.fault is None or depth == self._row_depth:
                path = ".".join(self._path[self._row_depth :])
                row.elements.append(Element(path, element.attributes, text))
            if depth == self._row_depth:
                self._finished.append(row)
                self._row = None
        self._path.pop()
