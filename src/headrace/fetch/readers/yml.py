"""Yandex YML: `yml_catalog/shop/offers/offer`.

Taken: offer's `id` and `available`; name (or typePrefix, vendor and model), price, categoryId (with the
name from `categories`), url, every `picture` in order, each `param` under `param:<name>`, and any other
simple child under its own name, of which the first counts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from headrace.fetch.readers.format import Format, Head
from headrace.fetch.readers.row import RawRow, Value
from headrace.fetch.readers.xml_rows import XmlRow, read_xml

CATEGORIES_MAX: Final = 200_000
PARAM_CHARACTERS_MAX: Final = 100
_NAMES: Final = {"categoryId": "category"}


def read_offers(stream: io.BufferedReader, _head: Head) -> Iterator[RawRow]:
    """Every offer, in order. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
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
            values.setdefault(_NAMES.get(element.path, element.path), element.text)
    if "name" not in values:
        parts = [str(values[k]) for k in ("typePrefix", "vendor", "model") if k in values]
        if parts:
            values["name"] = " ".join(parts)
    category = categories.get(str(values.get("category", "")))
    if category:
        values["category_name"] = category
    offer.values = values
    return offer


FORMAT: Final = Format(
    name="yml",
    title="Yandex YML",
    recognises=lambda head: head.root is not None and head.root.name == "yml_catalog",
    read=read_offers,
)
