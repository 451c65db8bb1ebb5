"""Ids and cursors: their external form, and the internal numbers and positions.

Positive numbers are used as they are. A text id gets a permanent negative number, so a process may
cache any of them without checking again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.model import FeedId, Position
from headrace.feed.ranking import RankedPlace, place_of
from headrace.kernel.signing import CursorInvalid, Key, read_cursor, sign_cursor

CACHED_MAX: Final = 200_000
FEED: Final = "feed"
"""The list name of a viewer's pages, in their cursors."""
LATEST: Final = (datetime(9999, 1, 1, tzinfo=UTC), 2**63 - 1)


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
        """The external id of each number. Raises: PostgresDown."""
        required = set(numbers)
        found = {n: self._names[n] for n in required if n in self._names}
        missing = [n for n in required if n < 0 and n not in found]
        if missing:
            read = await store.names_of(self._postgres, missing)
            self._cache({name: number for number, name in read.items()})
            found |= read
        return {n: n if n > 0 else found[n] for n in required}

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

    def sign(self, listing: str, entity: int, position: Position) -> str:
        """The cursor of a position in an entity's list of posts."""
        return sign_cursor(self._signing_key(), listing, {"of": entity}, position)

    def read(self, listing: str, entity: int, text: str | None) -> Position | None:
        """The position of a cursor. Raises: CursorInvalid."""
        if text is None:
            return None
        return Position(*self._read(listing, {"of": entity}, text, (int, str)))

    def sign_ranked(self, ranking: str, entity: int, place: RankedPlace) -> str:
        """The cursor of a place in a ranking of an entity's feed."""
        filters = {"of": entity, "rank": ranking}
        return sign_cursor(self._signing_key(), FEED, filters, place.to_position())

    def read_ranked(self, ranking: str, entity: int, text: str | None) -> RankedPlace:
        """The place of a cursor in a ranking. Raises: CursorInvalid."""
        if text is None:
            return RankedPlace(None)
        filters = {"of": entity, "rank": ranking}
        return place_of(*self._read(FEED, filters, text, (int, str, str)))

    def sign_person(self, listing: str, entity: int, row: tuple[int, datetime]) -> str:
        """The cursor of a row in an entity's list of people."""
        position = [row[1].isoformat(), row[0]]
        return sign_cursor(self._signing_key(), listing, {"of": entity}, position)

    def read_person(self, listing: str, entity: int, text: str | None) -> tuple[datetime, int]:
        """The row of a cursor in a list of people. Raises: CursorInvalid."""
        if text is None:
            return LATEST
        moment, number = self._read(listing, {"of": entity}, text, (str, int))
        return datetime.fromisoformat(moment), number

    def _read(
        self, listing: str, filters: Mapping[str, Any], text: object, types: tuple[type, ...]
    ) -> Any:
        if not isinstance(text, str):
            raise CursorInvalid(str(text))
        position = read_cursor(self._signing_key(), listing, filters, text)
        if (
            not isinstance(position, list)
            or len(position) != len(types)
            or not all(isinstance(p, t) for p, t in zip(position, types, strict=True))
        ):
            raise CursorInvalid(text)
        return position

    def _signing_key(self) -> Key:
        if self._key is None:
            self._key = self._make_key()
        return self._key


def require_no_cursor(*given: str | None) -> None:
    """Reject cursors of an unknown id, which never received one. Raises: CursorInvalid."""
    for cursor in given:
        if cursor is not None:
            raise CursorInvalid(cursor)
