"""Item ids: any text of 1 to 200 characters that a person can see and a computer can compare.

Sellers number their goods as they like: `A/1`, `A 1`, `№5`. One rule decides for catalogues, for items
sent by themselves and for every lookup, so an id that was accepted once is found by the same text:

- white space around the id is removed, and the rest is normalized to Unicode form NFC, since the same
  letters arrive composed from one program and decomposed from another;
- control characters, line and paragraph separators and lone surrogates are refused;
- invisible characters (zero-width spaces, byte order marks, soft hyphens, marks of direction) are refused:
  two ids that look alike must not be two items. U+200C and U+200D are accepted, words and emoji need them.

Upper and lower case differ. `.` and `..` are ids like any other: no address has an id as part of its path.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

ITEM_ID_CHARACTERS_MAX: Final = 200
_PLAIN: Final = re.compile(r"[!-~](?:[ -~]{0,198}[!-~])?")
"""ASCII that needs no normalization: nearly every id."""
_REFUSED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS: Final = "\u200c\u200d"


def find_item_id(text: str) -> str | None:
    """The id as it is stored, or None where `text` is no valid id."""
    if _PLAIN.fullmatch(text):
        return text
    if len(text) > 2 * ITEM_ID_CHARACTERS_MAX:
        return None
    found = unicodedata.normalize("NFC", text.strip())
    if not 1 <= len(found) <= ITEM_ID_CHARACTERS_MAX:
        return None
    is_fit = all(c in _JOINERS or unicodedata.category(c) not in _REFUSED for c in found)
    return found if is_fit else None
