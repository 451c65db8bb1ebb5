"""Avito's XML for uploads: `Ads/Ad`.

Taken: Id, Title, Price, Category, the attribute `url` of every `Images/Image` in order (or the links in
ImageUrls); every other child under its own name in small letters, nested ones under their path.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from headrace.fetch.mappings import Mapping
from headrace.fetch.readers.format import Format, Head
from headrace.fetch.readers.mapped import Names
from headrace.fetch.readers.row import RawRow
from headrace.fetch.readers.xml_rows import read_xml

_NAMES: Final = Names(
    Mapping(
        id="Id",
        name="Title",
        price="Price",
        category="Category",
        photos=["Images/Image/@url", "ImageUrls"],
    )
)


def read_ads(stream: io.BufferedReader, _head: Head) -> Iterator[RawRow]:
    """Every ad, in order. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
    for row in read_xml(stream, lambda path: path == ["Ads", "Ad"]):
        ad = row.raw()
        ad.values, ad.photos = _NAMES.apply(row.cells())
        yield ad


FORMAT: Final = Format(
    name="avito",
    title="Avito XML",
    recognises=lambda head: head.root is not None and head.root.name == "Ads",
    read=read_ads,
)
