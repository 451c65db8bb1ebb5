"""The fields of files whose column names are the seller's choice, by the table of `synonyms.toml`.

Photos come under many names, also numbered, and a text of photos may hold several links. A name that the table
does not know is kept in small letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from headrace.fetch.readers.row import Value
from headrace.fetch.synonyms import field_of

KNOWN: Final = frozenset({"name", "price", "category", "url"})
_SINGLE: Final = KNOWN | {"id"}
_BETWEEN_PHOTOS: Final = re.compile(r"\s*[|\n\r]\s*|[,;\s]+(?=[A-Za-z][A-Za-z0-9+.-]*://)")

_UNUSUAL: Final = re.compile(r"[ ,;]")
"""What may be more than a link; without it the general rule, which costs ten times as much, is not asked."""


def known_names(names: Sequence[str]) -> list[str]:
    """Each of `names` as the field that it means; of several with one meaning, the first in the table.

    The others, and names that are not known, stay as they are. Names of photos stay, too.
    """
    found = [field_of(name) for name in names]
    best: dict[str, int] = {}
    for known in found:
        if known is not None:
            best[known[0]] = min(known[1], best.get(known[0], known[1]))
    return [
        known[0] if known and known[0] != "photos" and known[1] == best[known[0]] else name
        for name, known in zip(names, found, strict=True)
    ]


def is_photos(name: str) -> bool:
    """Whether a field of that name holds links of photos."""
    found = field_of(name)
    return found is not None and found[0] == "photos"


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
