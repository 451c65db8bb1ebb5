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
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Final

from headrace.fetch.errors import InvalidMapping
from headrace.fetch.mappings import Mapping, Names, Value, plain_path
from headrace.fetch.readers.rows import Format, Head, RawRow
from headrace.fetch.readers.xml_stream import Element, IsRow, XmlRow, read_xml

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
