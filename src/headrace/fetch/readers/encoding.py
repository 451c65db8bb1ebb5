"""The encoding of a table that has no byte order mark: UTF-8, or windows-1251 as Excel writes Russian.

Neither a CSV nor its transport names its encoding. Bytes that are valid UTF-8 are UTF-8. Others are windows-1251
only where they read as Russian in it: a wrong guess would corrupt names without any error.
"""

# ruff: noqa: RUF001 - Cyrillic is meant
from __future__ import annotations

import re
from typing import Final

UTF_8: Final = "utf-8"
CYRILLIC: Final = "windows-1251"
_WORD: Final = re.compile("[А-Яа-яЁёІіЇїЄєҐґЎў]{3,}")
_RUSSIAN: Final = re.compile("[А-Яа-яЁё]")
_LETTER: Final = re.compile("[^\x00-\x7f]")
_SIGN: Final = re.compile("[№«»“”„–—…₽°±×\xa0\xad©®™•’‘·]")
_COMMON: Final = frozenset("оеаинтср")
WORDS_SHARE_MIN: Final = 0.7
"""Share of the letters that are in Cyrillic words: letters of a Latin text stand alone between others."""
RUSSIAN_SHARE_MIN: Final = 0.85
"""Share of the letters that are Russian: about 0.92 in Ukrainian, 0.5 in CP866 read as windows-1251."""
COMMON_SHARE_MIN: Final = 0.4
"""Share of the eight most common letters: about 0.55 in Russian, 0.3 in KOI8-R read as windows-1251."""
LETTERS_COUNTED_MIN: Final = 60
"""Of fewer letters the share means nothing."""


def find_encoding(start: bytes) -> str:
    """The encoding of a text that begins with `start`."""
    try:
        start.decode(UTF_8)
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" or not _is_cyrillic(start):
            return UTF_8
        return CYRILLIC
    return UTF_8


def _is_cyrillic(start: bytes) -> bool:
    if start.lstrip().startswith((b"<", b"{", b"[")):
        return False
    text = _SIGN.sub("", start.decode(CYRILLIC, errors="replace"))
    letters = len(_LETTER.findall(text))
    words = "".join(_WORD.findall(text)).lower()
    russian = len(_RUSSIAN.findall(text))
    if len(words) < letters * WORDS_SHARE_MIN or russian < letters * RUSSIAN_SHARE_MIN:
        return False
    common = sum(letter in _COMMON for letter in words)
    return len(words) < LETTERS_COUNTED_MIN or common >= len(words) * COMMON_SHARE_MIN
