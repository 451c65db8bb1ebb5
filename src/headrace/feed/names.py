"""Names of viewers and authors and the numbers that stand for them in tables and index.

Numbers of callers are positive and stand for themselves; a name gets a negative one, for good, so a process remembers as
many as it likes without asking whether they still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.model import FeedId

KEPT_MAX: Final = 200_000


class Names:
    """Both directions, with what this process has met."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    async def find(self, entity: FeedId) -> int | None:
        """Its number; None: a name that was never written. Raises: PostgresDown."""
        if isinstance(entity, int):
            return entity
        number = self._numbers.get(entity)
        if number is None:
            found = await store.follows.find_names(self._postgres, [entity])
            self._keep(found)
            number = found.get(entity)
        return number

    async def make(self, entities: Sequence[FeedId]) -> list[int]:
        """The number of each, in order; new names get one. Raises: PostgresDown."""
        named = {entity for entity in entities if isinstance(entity, str)}
        found = {name: self._numbers[name] for name in named if name in self._numbers}
        missing = sorted(named - found.keys())
        if missing:
            made = await store.follows.make_names(self._postgres, missing)
            self._keep(made)
            found |= made
        return [e if isinstance(e, int) else found[e] for e in entities]

    async def told(self, numbers: Iterable[int]) -> dict[int, FeedId]:
        """Each number as its owner names it. Raises: PostgresDown."""
        wanted = set(numbers)
        found = {n: self._names[n] for n in wanted if n in self._names}
        missing = [n for n in wanted if n < 0 and n not in found]
        if missing:
            read = await store.follows.names_of(self._postgres, missing)
            self._keep({name: number for number, name in read.items()})
            found |= read
        return {n: n if n > 0 else found[n] for n in wanted}

    def _keep(self, found: dict[str, int]) -> None:
        if len(self._numbers) + len(found) > KEPT_MAX:
            self._numbers.clear()
            self._names.clear()
        self._numbers.update(found)
        self._names.update({number: name for name, number in found.items()})
