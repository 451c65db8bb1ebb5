"""XML catalogues: Yandex YML, Avito, Google product data, and any other XML by a mapping.

**YML** (`yml_catalog/shop/offers/offer`): the attributes `id` and `available`; `name`, or
`typePrefix`, `vendor` and `model`; `price`, `url`, `categoryId` with its name from `categories`,
every `picture`, and every `param` as `param:<name>`. Other simple children keep their names; the
first of each counts.

**Avito** (`Ads/Ad`): `Id`, `Title`, `Price`, `Category`, and the photos from `Images/Image/@url` or
`ImageUrls`. Other children keep their names in lower case, nested ones their paths.

**Google** (RSS 2.0 `rss/channel/item`, Atom `feed/entry`): names of Google's namespace come before
those of RSS and Atom, so that Google's `id` wins over the URI that Atom calls `id`. The category is
`product_type`, else `google_product_category`. Other names are kept, nested ones as paths.

**Mapped XML**: `rows` of the mapping is the path of the row elements from the root, whose name may
be omitted. A field is the path of an element below the row; `@name` is an attribute.

The parser is incremental, over expat, with one row in memory. The caller chooses which elements are
rows and receives each as a list of elements in file order.

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

from headrace.fetch.errors import CatalogueBroken, InvalidMapping
from headrace.fetch.mappings import Mapping, Names, Value, plain_path
from headrace.fetch.model import FIELD_BYTES_MAX, FIELDS_BYTES_MAX, ROWS_MAX
from headrace.fetch.readers.rows import (
    Fault,
    Format,
    Head,
    RawRow,
    Root,
    Truncated,
    broken,
    not_a_catalogue,
)

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


CATEGORIES_MAX: Final = 200_000
PARAM_CHARACTERS_MAX: Final = 100
_YML_NAMES: Final = {"categoryId": "category"}


def read_offers(stream: io.BufferedReader, _head: Head) -> Iterator[RawRow]:
    """The offers of a YML file. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
    categories: dict[str, str] = {}

    def note_category(name: str, attributes: dict[str, str], text: str) -> None:
        if name == "category" and len(categories) < CATEGORIES_MAX:
            categories[attributes.get("id", "")] = text

    for row in read_xml(stream, _is_offer, on_outside=note_category):
        yield _offer(row, categories)


def _is_offer(path: list[str]) -> bool:
    return path[-1] == "offer" and path[-2:-1] == ["offers"]


def _offer(row: XmlRow, categories: dict[str, str]) -> RawRow:
    offer = row.raw()
    values: dict[str, Value] = dict(row.elements[-1].attributes)
    for element in row.elements[:-1]:
        if "." in element.path or not element.text:
            continue
        if element.path == "picture":
            offer.photos.append(element.text)
        elif element.path == "param":
            name = element.attributes.get("name", "")[:PARAM_CHARACTERS_MAX]
            values.setdefault(f"param:{name}", element.text)
        else:
            values.setdefault(_YML_NAMES.get(element.path, element.path), element.text)
    if "name" not in values:
        parts = [str(values[k]) for k in ("typePrefix", "vendor", "model") if k in values]
        if parts:
            values["name"] = " ".join(parts)
    category = categories.get(str(values.get("category", "")))
    if category:
        values["category_name"] = category
    offer.values = values
    return offer


YML: Final = Format(
    name="yml",
    title="Yandex YML",
    recognizes=lambda head: head.root is not None and head.root.name == "yml_catalog",
    read=read_offers,
)


_AVITO_NAMES: Final = Names(
    Mapping(
        id="Id",
        name="Title",
        price="Price",
        category="Category",
        photos=["Images/Image/@url", "ImageUrls"],
    )
)


def read_ads(stream: io.BufferedReader, _head: Head) -> Iterator[RawRow]:
    """The ads of an Avito file. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
    for row in read_xml(stream, lambda path: path == ["Ads", "Ad"]):
        ad = row.raw()
        ad.values, ad.photos = _AVITO_NAMES.apply(row.cells())
        yield ad


AVITO: Final = Format(
    name="avito",
    title="Avito XML",
    recognizes=lambda head: head.root is not None and head.root.name == "Ads",
    read=read_ads,
)


NAME_SPACE: Final = "http://base.google.com/ns/1.0"
_GOOGLE_NAMES: Final = Names(
    Mapping(
        id="id",
        name="title",
        price="price",
        category=["product_type", "google_product_category"],
        url="link",
        photos=["image_link", "additional_image_link"],
    )
)


def _reader_of(is_row: IsRow) -> Callable[[io.BufferedReader, Head], Iterator[RawRow]]:
    """A reader of Google product data whose rows are the elements that `is_row` accepts."""

    def read_products(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
        prefix = _prefix_of(head)
        for row in read_xml(stream, is_row):
            product = row.raw()
            product.values, product.photos = _GOOGLE_NAMES.apply(_cells(row, prefix))
            yield product

    return read_products


def _prefix_of(head: Head) -> str:
    """The prefix bound to Google's namespace; `g:` if the root binds none."""
    bound = head.root.attributes if head.root else {}
    for name, value in bound.items():
        if value == NAME_SPACE and name.startswith("xmlns:"):
            return name.removeprefix("xmlns:") + ":"
    return "g:"


def _cells(row: XmlRow, prefix: str) -> dict[str, list[str]]:
    """The texts of a product by name; names of Google's namespace win."""
    own: dict[str, list[str]] = {}
    around: dict[str, list[str]] = {}
    for element in row.elements[:-1]:
        text = element.text or _target_of(element)
        if text:
            cells = own if element.path.startswith(prefix) else around
            names = [name.removeprefix(prefix) for name in element.path.split(".")]
            cells.setdefault(".".join(names).lower(), []).append(text)
    return {**around, **own}


def _target_of(element: Element) -> str:
    """The address of the product page in an Atom `link` element; empty for other elements."""
    is_page = element.path == "link" and element.attributes.get("rel", "alternate") == "alternate"
    return element.attributes.get("href", "").strip() if is_page else ""


RSS: Final = Format(
    name="google_rss",
    title="Google product RSS",
    recognizes=lambda head: head.root is not None and head.root.name == "rss",
    read=_reader_of(lambda path: path == ["rss", "channel", "item"]),
)
ATOM: Final = Format(
    name="google_atom",
    title="Google product Atom",
    recognizes=lambda head: head.root is not None and head.root.name == "feed",
    read=_reader_of(lambda path: path == ["feed", "entry"]),
)


def read_elements(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
    """The rows of an XML file that a mapping describes.

    Raises: InvalidMapping at once; CatalogueBroken, Truncated, CatalogueTooLarge while read.
    """
    mapping = head.mapping
    if mapping is None or not mapping.rows:
        raise InvalidMapping(
            "the mapping of an XML file needs `rows`: set it to the path of the row elements, such"
            " as 'shop.products.product'"
        )
    return _read_elements(
        stream, plain_path(mapping.rows).split("."), Names(mapping), mapping.encoding
    )


def _read_elements(
    stream: io.BufferedReader, rows: list[str], names: Names, encoding: str | None
) -> Iterator[RawRow]:
    def is_row(path: list[str]) -> bool:
        if len(path) - len(rows) not in (0, 1):
            return False
        return [name.lower() for name in path[-len(rows) :]] == rows

    for row in read_xml(stream, is_row, encoding=encoding):
        found = row.raw()
        found.values, found.photos = names.apply(row.cells())
        yield found


XML: Final = Format(
    name="xml",
    title="XML with a mapping",
    recognizes=lambda head: head.root is not None and head.mapping is not None,
    read=read_elements,
    takes_mapping=True,
)
