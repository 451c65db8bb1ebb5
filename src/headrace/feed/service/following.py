"""Follows, mutes and blocks, and their lists."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.errors import TooManyBars, TooManyFollows
from headrace.feed.model import (
    BARS_MAX,
    Bar,
    FeedId,
    People,
    Person,
    require_feed_id,
    require_feed_ids,
    require_limit,
)
from headrace.feed.names import Names
from headrace.feed.service.places import Places, require_no_cursor

PEOPLE_MAX: Final = 1_000
Read = Callable[..., Awaitable[list[tuple[int, datetime]]]]
Count = Callable[..., Awaitable[int]]


class Following:
    """Works on who sees whom."""

    def __init__(
        self,
        postgres: Postgres,
        names: Names,
        applier: Applier,
        *,
        places: Places,
        follows_max: int,
    ) -> None:
        self._postgres = postgres
        self._names = names
        self._applier = applier
        self._places = places
        self._follows_max = follows_max

    async def follow(
        self,
        viewer: object,
        authors: Iterable[object],
        ats: Sequence[datetime | None] | None = None,
    ) -> int:
        """Follow authors; how many are new."""
        who, whom = require_feed_id("viewer", viewer), require_feed_ids("author", authors)
        if not whom:
            return 0
        number, *numbers = await self._names.make([who, *whom])
        changed, change = await store.follows.follow(
            self._postgres,
            number,
            numbers,
            ats=ats or [None] * len(numbers),
            follows_max=self._follows_max,
        )
        if changed < 0:
            raise TooManyFollows(who, self._follows_max)
        if change is not None:
            await self._applier.bring([change])
        return changed

    async def unfollow(self, viewer: object, authors: Iterable[object] | None) -> int:
        """Unfollow authors, or all; how many were followed."""
        number = await self._names.find(require_feed_id("viewer", viewer))
        numbers = None if authors is None else await self._known(authors)
        if number is None or numbers == []:
            return 0
        changed, change = await store.follows.unfollow(self._postgres, number, numbers)
        if change is not None:
            await self._applier.bring([change])
        return changed

    async def bar(
        self, viewer: object, authors: Iterable[object], kind: Bar, *, is_set: bool
    ) -> int:
        """Mute or block authors, or end it; how many changed."""
        who, whom = require_feed_id("viewer", viewer), require_feed_ids("author", authors)
        if is_set:
            number, *numbers = await self._names.make([who, *whom])
        else:
            found = await self._names.find(who)
            if found is None:
                return 0
            number, numbers = found, await self._known(whom)
        if not numbers:
            return 0
        changed, changes = await store.follows.bar(
            self._postgres, number, numbers, kind, is_set=is_set, bars_max=BARS_MAX
        )
        if changed < 0:
            raise TooManyBars(who, kind.value, BARS_MAX)
        await self._applier.bring(changes)
        return changed

    async def following(self, viewer: object, limit: int, cursor: str | None) -> People:
        """Whom a viewer follows."""
        listed = store.follows
        return await self._people(
            "following", viewer, limit, cursor, read=listed.following, count=listed.count_following
        )

    async def followers(self, author: object, limit: int, cursor: str | None) -> People:
        """Who follows an author."""
        listed = store.follows
        return await self._people(
            "followers", author, limit, cursor, read=listed.followers, count=listed.count_followers
        )

    async def barred(self, viewer: object, kind: Bar, limit: int, cursor: str | None) -> People:
        """Whom a viewer mutes or blocks."""

        async def read(runner: Postgres, number: int, **options: Any) -> list[tuple[int, datetime]]:
            return await store.follows.bars(runner, number, kind, **options)

        async def count(runner: Postgres, number: int) -> int:
            return await store.follows.count_bars(runner, number, kind)

        return await self._people(kind.value, viewer, limit, cursor, read=read, count=count)

    async def _known(self, authors: Iterable[object]) -> list[int]:
        found = [await self._names.find(author) for author in require_feed_ids("author", authors)]
        return [number for number in found if number is not None]

    async def _people(
        self,
        listing: str,
        entity: object,
        limit: int,
        cursor: str | None,
        *,
        read: Read,
        count: Count,
    ) -> People:
        wanted: FeedId = require_feed_id("id", entity)
        require_limit(limit, PEOPLE_MAX)
        number = await self._names.find(wanted)
        if number is None:
            require_no_cursor(cursor)
            return People(people=[], total=0)
        before = self._places.read_line(f"feed.{listing}", number, cursor)
        rows = await read(self._postgres, number, before=before, rows_max=limit)
        told = await self._names.told([row[0] for row in rows])
        is_full = len(rows) == limit
        return People(
            people=[Person(id=told[row[0]], since_at=row[1]) for row in rows],
            total=await count(self._postgres, number),
            next=self._places.sign_line(f"feed.{listing}", number, rows[-1]) if is_full else None,
        )
