"""What operators look for: posts and changes that are late, viewers and authors by name.

Every read is bounded, because the console repeats it every few seconds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.errors import InvalidFeedId
from headrace.feed.id_map import IdMap
from headrace.feed.model import ChangeKind, FeedId, require_feed_id

LATE_S: Final = 60.0
"""Scheduled posts and changes are late after this."""
COUNTED_MAX: Final = 1_000
CHANGES_LOOKED_AT: Final = 2_000
_FIRST: Final = -(2**63)
_LAST: Final = "\U0010ffff"
"""Sorts after every character of an id."""


class FeedBacklog(msgspec.Struct, frozen=True, kw_only=True):
    """What the feed should have done already."""

    overdue: int
    """Scheduled posts that are not visible a minute after their time, counted up to 1,000."""
    overdue_since_at: datetime | None
    unswept_s: float
    """Age of the oldest change that no sweep has confirmed in the index."""


class FeedName(msgspec.Struct, frozen=True, kw_only=True):
    """A viewer or an author."""

    id: FeedId
    is_author: bool


class Lookup:
    """Late posts and changes, and viewers and authors by name: `feed.lookup`."""

    def __init__(self, postgres: Postgres, ids: IdMap) -> None:
        self._postgres = postgres
        self._ids = ids

    async def backlog(self) -> FeedBacklog:
        """Posts and changes that are late. Raises: PostgresDown."""
        overdue, since_at = await store.overdue_posts(
            self._postgres, late_s=LATE_S, rows_max=COUNTED_MAX
        )
        unswept_s = await store.oldest_unswept_s(self._postgres)
        return FeedBacklog(overdue=overdue, overdue_since_at=since_at, unswept_s=unswept_s)

    async def find(self, part: str, *, rows_max: int = 5) -> list[FeedName]:
        """Viewers and authors whose text id begins with `part`, or with this number."""
        try:
            entity = require_feed_id("viewer", part)
        except InvalidFeedId:
            return []
        if isinstance(entity, int):
            names: dict[int, FeedId] = {entity: entity}
        else:
            found = await store.ids_like(self._postgres, part, part + _LAST, rows_max=rows_max)
            names = dict(found)
        kinds = await store.kinds_of(self._postgres, list(names)) if names else []
        return [
            FeedName(id=names[number], is_author=kind is ChangeKind.POSTS) for number, kind in kinds
        ][:rows_max]

    async def recent(self, *, authors: bool = False, rows_max: int = 12) -> list[FeedId]:
        """Viewers whose follows changed last, or authors who posted last; then any others."""
        kind = ChangeKind.POSTS if authors else ChangeKind.FOLLOWS
        numbers = await store.recent_entities(
            self._postgres, kind, looked_at=CHANGES_LOOKED_AT, rows_max=rows_max
        )
        if len(numbers) < rows_max:
            numbers += await store.entities_after(
                self._postgres, kind, after=_FIRST, rows_max=rows_max
            )
        shown = list(dict.fromkeys(numbers))[:rows_max]
        names = await self._ids.external_ids(shown)
        return [names[number] for number in shown]
