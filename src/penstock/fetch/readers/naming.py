"""Which of the names that sellers use means what, for files that have names of their own choice.

A name is compared in small letters. `id` is also sku, offer_id and item_id, `name` also title, and so on;
photos come under many names, also numbered, and a text of photos may hold several links. Whatever is not
known is kept under its own name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from penstock.fetch.model import COLUMNS_MAX
from penstock.fetch.readers.row import Value

KNOWN: Final = frozenset({"name", "price", "category", "url"})
_SINGLE: Final = KNOWN | {"id"}
_ALIASES: Final = {
    "sku": "id",
    "offer_id": "id",
    "item_id": "id",
    "title": "name",
    "category_id": "category",
    "category_name": "category",
    "link": "url",
}
_PHOTOS: Final = re.compile(
    r"(photos?|images?|pictures?|photo_urls?|image_urls?|image_link|additional_image_links?)[ _-]?[0-9]*"
    r"(\.(url|src|href|link))?"
)
_BETWEEN_PHOTOS: Final = re.compile(r"\s*[|\n\r]\s*|[,;\s]+(?=[A-Za-z][A-Za-z0-9+.-]*://)")

_UNUSUAL: Final = re.compile(r"[ ,;]")
"""What may be more than a link; without it the general rule, which costs ten times as much, is not asked."""


def known_names(names: Sequence[str]) -> list[str]:
    """Each of `names` as what it means; where the meaning is named too, that one has it."""
    present = frozenset(names)
    return [n if _ALIASES.get(n, n) in present else _ALIASES.get(n, n) for n in names]


@lru_cache(COLUMNS_MAX)
def is_photos(name: str) -> bool:
    """Whether a field of that name holds links of photos."""
    return _PHOTOS.fullmatch(name) is not None


def split_photos(text: str) -> list[str]:
    """The links of one text, in order."""
    if text.isprintable() and not _UNUSUAL.search(text):
        return [link for link in text.split("|") if link]
    return [link for link in (part.strip() for part in _BETWEEN_PHOTOS.split(text.strip())) if link]


def one_or_all(texts: list[str]) -> Value:
    """A field's only text, or the list of its texts."""
    return texts[0] if len(texts) == 1 else texts


def named_by_habit(cells: dict[str, list[str]]) -> tuple[dict[str, Value], list[str]]:
    """Fields and photos of a row whose names were not mapped."""
    values: dict[str, Value] = {}
    photos: list[str] = []
    for name, texts in zip(known_names(list(cells)), cells.values(), strict=True):
        if is_photos(name):
            photos.extend(links_of(texts))
        else:
            values.setdefault(name, texts[0] if name in _SINGLE else one_or_all(texts))
    return values, photos


def links_of(texts: Iterable[str]) -> list[str]:
    """The links of several texts, in order."""
    return [link for text in texts for link in split_photos(text)]
