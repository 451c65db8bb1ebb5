"""Follows, mutes and blocks, and their lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.errors import InvalidFollow, TooManyFollows
from headrace.feed.id_map import Cursors, IdMap, require_no_cursor
from headrace.feed.index import Index
from headrace.feed.model import (
    MUTES_BLOCKS_MAX,
    ChangeKind,
    FeedId,
    MuteOrBlock,
    People,
    Person,
    require_feed_id,
    require_feed_ids,
    require_limit,
    require_many,
    require_since,
)
from headrace.kernel.errors import mismatch

Follow = tuple[FeedId, FeedId] | tuple[FeedId, FeedId, datetime | None]
"""A viewer, an author, and the moment of the follow."""
Row = tuple[datetime, int]
"""The position of a person in a list: since when, and the number."""
LATEST: Final[Row] = (datetime(9999, 1, 1, tzinfo=UTC), 2**63 - 1)
FOLLOW: Final = "(viewer, author) or (viewer, author, since)"
IMPORT_STEP: Final = 1_000
PEOPLE_MAX: Final = 1_000


class Follows:
    """Change and list follows, mutes and blocks.

    Mute: the viewer does not see the author, followed or not, now or later. Block: neither sees the
    other. Both leave follows unchanged. Every change raises InvalidFeedId, TooManyAtOnce and
    PostgresDown.
    """

    def __init__(
        self,
        postgres: Postgres,
        ids: IdMap,
        index: Index,
        *,
        cursors: Cursors,
        follows_max: int,
    ) -> None:
        self._postgres = postgres
        self._ids = ids
        self._index = index
        self._cursors = cursors
        self._follows_max = follows_max

    async def follow(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Follow an author, or up to 10,000, all or none. Return how many are new.

        Raises: TooManyFollows.
        """
        await self._index.ready()
        return await self._follow(viewer, _each(authors))

    async def unfollow(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Unfollow authors. Return how many were followed."""
        await self._index.ready()
        number = await self._ids.find(require_feed_id("viewer", viewer))
        numbers = await self._existing(_each(authors))
        if number is None or not numbers:
            return 0
        changed, changes = await store.unfollow(self._postgres, number, numbers)
        await self._index.applier.apply_or_defer(changes)
        if changed < len(numbers):
            await self._apply_earlier([number])
        return changed

    async def unfollow_all(self, viewer: FeedId) -> int:
        """Unfollow everyone. Return how many were followed."""
        await self._index.ready()
        number = await self._ids.find(require_feed_id("viewer", viewer))
        if number is None:
            return 0
        changed, changes = await store.unfollow_all(self._postgres, number)
        await self._index.applier.apply_or_defer(changes)
        if not changed:
            await self._apply_earlier([number])
        return changed

    async def mute(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Hide authors from a viewer. Return how many mutes are new. Raises: TooManyFollows."""
        return await self.set_kind(viewer, authors, MuteOrBlock.MUTE, is_set=True)

    async def unmute(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """End mutes. Return how many existed."""
        return await self.set_kind(viewer, authors, MuteOrBlock.MUTE, is_set=False)

    async def block(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Hide viewer and authors from each other. Return how many blocks are new.

        Raises: TooManyFollows.
        """
        return await self.set_kind(viewer, authors, MuteOrBlock.BLOCK, is_set=True)

    async def unblock(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """End blocks. Return how many existed."""
        return await self.set_kind(viewer, authors, MuteOrBlock.BLOCK, is_set=False)

    async def set_kind(
        self, viewer: FeedId, authors: FeedId | Iterable[FeedId], kind: MuteOrBlock, *, is_set: bool
    ) -> int:
        """Set or end mutes or blocks. Return how many changed."""
        await self._index.ready()
        who, whom = require_feed_id("viewer", viewer), require_feed_ids("author", _each(authors))
        if is_set:
            number, *numbers = await self._ids.find_or_create([who, *whom])
        else:
            found = await self._ids.find(who)
            if found is None:
                return 0
            number, numbers = found, await self._existing(whom)
        if not numbers:
            return 0
        changed, changes = await store.mute_block(
            self._postgres, number, numbers, kind, is_set=is_set, rows_max=MUTES_BLOCKS_MAX
        )
        if changed < 0:
            raise TooManyFollows(who, f"{kind.value}s", MUTES_BLOCKS_MAX)
        await self._index.applier.apply_or_defer(changes)
        if changed < len(numbers):
            await self._apply_earlier([number, *numbers])
        return changed

    async def import_all(self, follows: Iterable[Follow]) -> int:
        """Add any number of follows. Return how many are new.

        Each is (viewer, author) or (viewer, author, since). Group them by viewer for fewer calls.
        Raises: as `follow`.
        """
        await self._index.ready()
        count, viewer, part = 0, None, dict[FeedId, datetime | None]()
        for follow in require_many("follow", follows, FOLLOW):
            try:
                who, whom, *since = follow
            except (TypeError, ValueError) as error:
                raise InvalidFollow(mismatch(FOLLOW, follow)) from error
            if part and (who != viewer or len(part) == IMPORT_STEP):
                count += await self._follow(viewer, list(part), list(part.values()))
                part = {}
            viewer = who
            part.setdefault(
                require_feed_id("author", whom), require_since(whom, since[0] if since else None)
            )
        if part:
            count += await self._follow(viewer, list(part), list(part.values()))
        return count

    async def following(
        self, viewer: FeedId, limit: int = 100, *, cursor: str | None = None
    ) -> People:
        """Followed authors, latest first, up to 1,000 per page, and their total number.

        Raises: InvalidFeedId, InvalidLimit, CursorInvalid, PostgresDown.
        """
        return await self._people("following", viewer, limit, cursor)

    async def followers(
        self, author: FeedId, limit: int = 100, *, cursor: str | None = None
    ) -> People:
        """Followers of an author, latest first, and their total number. Raises: as `following`."""
        return await self._people("followers", author, limit, cursor)

    async def muted(self, viewer: FeedId, limit: int = 100, *, cursor: str | None = None) -> People:
        """Muted authors, latest first. Raises: as `following`."""
        return await self.list_kind(viewer, MuteOrBlock.MUTE, limit, cursor=cursor)

    async def blocked(
        self, viewer: FeedId, limit: int = 100, *, cursor: str | None = None
    ) -> People:
        """Blocked authors, latest first. Raises: as `following`."""
        return await self.list_kind(viewer, MuteOrBlock.BLOCK, limit, cursor=cursor)

    async def list_kind(
        self, viewer: FeedId, kind: MuteOrBlock, limit: int = 100, *, cursor: str | None = None
    ) -> People:
        """Muted or blocked authors, latest first. Raises: as `following`."""
        return await self._people(kind.value, viewer, limit, cursor)

    async def _follow(
        self,
        viewer: object,
        authors: Iterable[object],
        ats: Sequence[datetime | None] | None = None,
    ) -> int:
        who, whom = require_feed_id("viewer", viewer), require_feed_ids("author", authors)
        if not whom:
            return 0
        number, *numbers = await self._ids.find_or_create([who, *whom])
        changed, changes = await store.follow(
            self._postgres,
            number,
            numbers,
            ats=ats or [None] * len(numbers),
            follows_max=self._follows_max,
        )
        if changed < 0:
            raise TooManyFollows(who, "follows (feed.follows_max)", self._follows_max)
        await self._index.applier.apply_or_defer(changes)
        if changed < len(numbers):
            await self._apply_earlier([number])
        return changed

    async def _apply_earlier(self, viewers: Sequence[int]) -> None:
        """Apply changes that earlier calls committed: this call may repeat one that failed."""
        changes = await store.unswept_of(self._postgres, ChangeKind.FOLLOWS, viewers)
        await self._index.applier.apply_or_defer(changes)

    async def _existing(self, authors: Iterable[object]) -> list[int]:
        found = [await self._ids.find(author) for author in require_feed_ids("author", authors)]
        return [number for number in found if number is not None]

    async def _people(self, listing: str, entity: object, limit: int, cursor: str | None) -> People:
        given: FeedId = require_feed_id("id", entity)
        require_limit(limit, PEOPLE_MAX)
        number = await self._ids.find(given)
        if number is None:
            require_no_cursor(cursor)
            return People(people=[], total=0)
        before = self._cursors.read(f"feed.{listing}", number, cursor, Row) or LATEST
        rows, total = await store.people(
            self._postgres, listing, number, before=before, rows_max=limit
        )
        ids = await self._ids.external_ids([who for _, who in rows])
        last = None
        if len(rows) == limit:
            last = self._cursors.sign(f"feed.{listing}", number, rows[-1])
        return People(
            people=[Person(id=ids[who], since_at=since_at) for since_at, who in rows],
            total=total,
            next=last,
        )


def _each(given: FeedId | Iterable[FeedId]) -> Iterable[FeedId]:
    return [given] if isinstance(given, int | str) else require_many("author", given)
