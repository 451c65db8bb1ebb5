"""Google's product data as RSS 2.0 (`rss/channel/item`) and Atom (`feed/entry`).

Taken are the names of Google's own name space, else those of RSS and Atom: id, title, link, price,
product_type (else google_product_category) as the category, image_link and then every
additional_image_link as photos. Any other is kept under its name, `shipping.price` and the like under
their path. Atom's own `id` is a URI, so that of Google counts where there are both.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Final

from headrace.fetch.mappings import Mapping
from headrace.fetch.readers.format import Format, Head
from headrace.fetch.readers.mapped import Names
from headrace.fetch.readers.row import RawRow
from headrace.fetch.readers.xml_rows import Element, IsRow, XmlRow, read_xml

NAME_SPACE: Final = "http://base.google.com/ns/1.0"
_NAMES: Final = Names(
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
    """The reader of a format whose rows are these elements."""

    def read_products(stream: io.BufferedReader, head: Head) -> Iterator[RawRow]:
        prefix = _prefix_of(head)
        for row in read_xml(stream, is_row):
            product = row.raw()
            product.values, product.photos = _NAMES.apply(_cells(row, prefix))
            yield product

    return read_products


def _prefix_of(head: Head) -> str:
    """What the file writes before Google's names: `g:`, unless it binds another."""
    bound = head.root.attributes if head.root else {}
    for name, value in bound.items():
        if value == NAME_SPACE and name.startswith("xmlns:"):
            return name.removeprefix("xmlns:") + ":"
    return "g:"


def _cells(row: XmlRow, prefix: str) -> dict[str, list[str]]:
    """Texts by name; Google's before those of the format around them."""
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
    """Where Atom's empty `link` to the product's own page leads."""
    is_page = element.path == "link" and element.attributes.get("rel", "alternate") == "alternate"
    return element.attributes.get("href", "").strip() if is_page else ""


RSS: Final = Format(
    name="google_rss",
    title="Google product RSS",
    recognises=lambda head: head.root is not None and head.root.name == "rss",
    read=_reader_of(lambda path: path == ["rss", "channel", "item"]),
)
ATOM: Final = Format(
    name="google_atom",
    title="Google product Atom",
    recognises=lambda head: head.root is not None and head.root.name == "feed",
    read=_reader_of(lambda path: path == ["feed", "entry"]),
)
