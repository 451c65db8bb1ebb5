"""Places in lists as callers hold them: opaque texts, signed, of one list each."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from headrace.feed.model import Place
from headrace.kernel.signing import CursorInvalid, Key, read_cursor, sign_cursor

FEED: Final = "feed"
"""The name of the list that a viewer's pages are."""
FAR: Final = datetime(9999, 1, 1, tzinfo=UTC)
LATEST: Final = (FAR, 2**63 - 1)


def require_no_cursor(*given: str | None) -> None:
    """Nobody whose name was never met was given one. Raises: CursorInvalid."""
    if any(cursor is not None for cursor in given):
        raise CursorInvalid


class Places:
    """Signs and reads them; the key is asked for on first use."""

    def __init__(self, make_key: Callable[[], Key]) -> None:
        self._make_key = make_key
        self._key: Key | None = None

    def sign(self, listing: str, entity: int, place: Place) -> str:
        """The text of a place in a list of an entity."""
        return sign_cursor(self._signing_key(), listing, {"of": entity}, place)

    def read(self, listing: str, entity: int, text: str | None) -> Place | None:
        """The place that a text is. Raises: CursorInvalid."""
        if text is None:
            return None
        return Place(*self._read(listing, entity, text, (int, str)))

    def sign_line(self, listing: str, entity: int, line: tuple[int, datetime]) -> str:
        """The text of a line of a list of people."""
        position = [line[1].isoformat(), line[0]]
        return sign_cursor(self._signing_key(), listing, {"of": entity}, position)

    def read_line(self, listing: str, entity: int, text: str | None) -> tuple[datetime, int]:
        """The line before which to go on. Raises: CursorInvalid."""
        if text is None:
            return LATEST
        moment, number = self._read(listing, entity, text, (str, int))
        return datetime.fromisoformat(moment), number

    def _read(self, listing: str, entity: int, text: object, kinds: tuple[type, type]) -> Any:
        if not isinstance(text, str):
            raise CursorInvalid
        position = read_cursor(self._signing_key(), listing, {"of": entity}, text)
        if (
            not isinstance(position, list)
            or len(position) != len(kinds)
            or not all(isinstance(p, k) for p, k in zip(position, kinds, strict=True))
        ):
            raise CursorInvalid
        return position

    def _signing_key(self) -> Key:
        if self._key is None:
            self._key = self._make_key()
        return self._key
