"""What the words of sellers' files mean: the tables of `synonyms.toml`, ready to look words up in."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Final

_WORDS_KEPT: Final = 10_000
_WORD_CHARACTERS_MAX: Final = 100
_TABLES: Final[dict[str, dict[str, list[str]]]] = tomllib.loads(
    files("headrace.fetch").joinpath("synonyms.toml").read_text(encoding="utf-8")
)
_REMARK: Final = re.compile(r"[\s*:]*(?:\([^()]*\)|\[[^\[\]]*\]|,.*)?[\s*:]*$", re.DOTALL)
_NUMBER: Final = re.compile(r"[ _-]?№?[0-9]*(?:\.(?:url|src|href|link))?$")


def _plain(word: str) -> str:
    return " ".join(word.lower().replace("ё", "е").split())  # noqa: RUF001


def _by_word(table: Mapping[str, list[str]]) -> dict[str, str]:
    return {_plain(word): meaning for meaning, words in table.items() for word in words}


_FIELDS: Final = _by_word(_TABLES["columns"])
_RANKS: Final = {word: rank for rank, word in enumerate(_FIELDS)}
_CURRENCIES: Final = _by_word(_TABLES["currencies"])
ID_WORDS: Final = tuple(_TABLES["columns"]["id"])


def field_of(name: str) -> tuple[str, int] | None:
    """The field that a heading means, and its rank among the headings of that field; None: not known."""
    return _field_of(name) if len(name) <= _WORD_CHARACTERS_MAX else None


@lru_cache(_WORDS_KEPT)
def _field_of(name: str) -> tuple[str, int] | None:
    plain = _plain(name)
    for word in (plain, _plain(_REMARK.sub("", plain))):
        if word in _FIELDS:
            return _FIELDS[word], _RANKS[word]
        unnumbered = _NUMBER.sub("", word).rstrip()
        if _FIELDS.get(unnumbered) == "photos":
            return "photos", _RANKS[unnumbered]
    return None


def currency_of(word: str) -> str | None:
    """The code of a currency that is written as `word`; None: not known."""
    return _CURRENCIES.get(_plain(word).rstrip(". "))
