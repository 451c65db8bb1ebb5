"""Ids and cursors: their external form, and the internal numbers and positions.

Positive numbers are used as they are. A text id gets a permanent negative number, so a process may
cache any of them without checking again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.model import FeedId, Position
from headrace.kernel.signing import CursorInvalid, Key, read_cursor, sign_cursor

CACHED_MAX: Final = 200_000
FEED: Final = "feed"
"""The list name of a viewer's pages, in their cursors."""


class IdMap:
    """Map text ids to numbers and back, with a cache."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    async def find(self, entity: FeedId) -> int | None:
        """The number of an id; None: a text id without one. Raises: PostgresDown."""
        if isinstance(entity, int):
            return entity
        number = self._numbers.get(entity)
        if number is None:
            found = await store.find_ids(self._postgres, [entity])
            self._cache(found)
            number = found.get(entity)
        return number

    async def find_or_create(self, entities: Sequence[FeedId]) -> list[int]:
        """The number of each id, in order; missing ones are created. Raises: PostgresDown."""
        named = {entity for entity in entities if isinstance(entity, str)}
        found = {name: self._numbers[name] for name in named if name in self._numbers}
        missing = sorted(named - found.keys())
        if missing:
            created = await store.create_ids(self._postgres, missing)
            self._cache(created)
            found |= created
        return [e if isinstance(e, int) else found[e] for e in entities]

    async def external_ids(self, numbers: Iterable[int]) -> dict[int, FeedId]:
        """The external id of each number; a number whose name PostgreSQL lost is its own.

        Raises: PostgresDown.
        """
        required = set(numbers)
        found = {n: self._names[n] for n in required if n in self._names}
        missing = [n for n in required if n < 0 and n not in found]
        if missing:
            read = await store.names_of(self._postgres, missing)
            self._cache({name: number for number, name in read.items()})
            found |= read
        return {n: found.get(n, n) for n in required}

    def _cache(self, found: dict[str, int]) -> None:
        if len(self._numbers) + len(found) > CACHED_MAX:
            self._numbers.clear()
            self._names.clear()
        self._numbers.update(found)
        self._names.update({number: name for name, number in found.items()})


class Cursors:
    """Sign and read cursors, each valid for one list. The key is created on first use."""

    def __init__(self, make_key: Callable[[], Key]) -> None:
        self._make_key = make_key
        self._key: Key | None = None

    def sign(self, listing: str, entity: int, position: Any) -> str:
        """The cursor of a position in a list of an entity."""
        return sign_cursor(self._signing_key(), listing, {"of": entity}, position)

    def read(self, listing: str, entity: int, text: str | None, kind: Any = Position) -> Any:
        """The position of a cursor as a `kind`; None without one. Raises: CursorInvalid."""
        if text is None:
            return None
        if not isinstance(text, str):
            raise CursorInvalid(str(text))
        position = read_cursor(self._signing_key(), listing, {"of": entity}, text)
        try:
            return msgspec.convert(position, kind)
        except msgspec.ValidationError as error:
            raise CursorInvalid(text) from error

    def _signing_key(self) -> Key:
        if self._key is None:
            self._key = self._make_key()
        return self._key


def require_no_cursor(*given: str | None) -> None:
    """Reject cursors of an unknown id, which never received one. Raises: CursorInvalid."""
    for cursor in given:
        if cursor is not None:
            raise CursorInvalid(cursor)
