"""Names, follows, mutes, blocks, markers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from headrace.engines.postgres import Row, Runner
from headrace.feed.model import Bar, Change, Kind, Place
from headrace.feed.store.sql import SQL


async def ensure_shards(runner: Runner, shards: int) -> int:
    """Set the number of shards where there is none; how many there are."""
    return int(await runner.value(SQL.ensure_shards, shards=shards))


async def make_names(runner: Runner, names: Sequence[str]) -> dict[str, int]:
    """The number of each name; new ones get one."""
    return {row["name"]: row["id"] for row in await runner.all(SQL.make_names, names=names)}


async def find_names(runner: Runner, names: Sequence[str]) -> dict[str, int]:
    """The numbers of names, without those that have none."""
    return {row["name"]: row["id"] for row in await runner.all(SQL.find_names, names=names)}


async def names_of(runner: Runner, ids: Sequence[int]) -> dict[int, str]:
    """The names that have these numbers."""
    return {row["id"]: row["name"] for row in await runner.all(SQL.names_of, ids=ids)}


async def follow(
    runner: Runner,
    viewer: int,
    authors: Sequence[int],
    *,
    ats: Sequence[datetime | None],
    follows_max: int,
) -> tuple[int, Change | None]:
    """How many are new (-1: that would be too many, nothing was done), and the change of the index."""
    row = await runner.one(
        SQL.follow, viewer=viewer, authors=authors, ats=ats, follows_max=follows_max
    )
    assert row is not None
    return row["changed"], _change(row)


async def unfollow(
    runner: Runner, viewer: int, authors: Sequence[int] | None
) -> tuple[int, Change | None]:
    """How many were followed (None: end all follows), and the change of the index."""
    if authors is None:
        return await _unfollow_all(runner, viewer)
    row = await runner.one(SQL.unfollow, viewer=viewer, authors=authors)
    assert row is not None
    return row["changed"], _change(row)


async def _unfollow_all(runner: Runner, viewer: int) -> tuple[int, Change | None]:
    """The same for all follows: none is left at that version, so none has to be named."""
    row = await runner.one(SQL.unfollow_all, viewer=viewer)
    assert row is not None
    if row["version"] is None:
        return row["changed"], None
    return row["changed"], Change(Kind.FOLLOWS, viewer, row["version"], [], [], is_whole=True)


async def bar(
    runner: Runner, viewer: int, authors: Sequence[int], kind: Bar, *, is_set: bool, bars_max: int
) -> tuple[int, list[Change]]:
    """How many mutes or blocks are new (or ended; -1: that would be too many, nothing was done), and the changes of the index."""
    rows = await runner.all(
        SQL.bar, viewer=viewer, authors=authors, kind=kind.value, is_set=is_set, bars_max=bars_max
    )
    changes = [change for row in rows if (change := _change(row)) is not None]
    return rows[0]["changed"], changes


async def bars(
    runner: Runner, viewer: int, kind: Bar, *, before: tuple[datetime, int], rows_max: int
) -> list[tuple[int, datetime]]:
    """Whom a viewer mutes or blocks, latest first."""
    rows = await runner.all(
        SQL.bars,
        viewer=viewer,
        kind=kind.value,
        before_at=before[0],
        before_id=before[1],
        rows_max=rows_max,
    )
    return [(row["id"], row["since_at"]) for row in rows]


async def count_bars(runner: Runner, viewer: int, kind: Bar) -> int:
    """How many a viewer mutes or blocks."""
    return int(await runner.value(SQL.count_bars, viewer=viewer, kind=kind.value))


async def following(
    runner: Runner, viewer: int, *, before: tuple[datetime, int], rows_max: int
) -> list[tuple[int, datetime]]:
    """Whom a viewer follows, latest first."""
    rows = await runner.all(
        SQL.following, entity=viewer, before_at=before[0], before_id=before[1], rows_max=rows_max
    )
    return [(row["id"], row["since_at"]) for row in rows]


async def followers(
    runner: Runner, author: int, *, before: tuple[datetime, int], rows_max: int
) -> list[tuple[int, datetime]]:
    """Who follows an author, latest first."""
    rows = await runner.all(
        SQL.followers, entity=author, before_at=before[0], before_id=before[1], rows_max=rows_max
    )
    return [(row["id"], row["since_at"]) for row in rows]


async def count_following(runner: Runner, viewer: int) -> int:
    """How many a viewer follows."""
    return int(await runner.value(SQL.count_following, entity=viewer))


async def count_followers(runner: Runner, author: int) -> int:
    """How many follow an author."""
    return int(await runner.value(SQL.count_followers, entity=author))


async def marker(runner: Runner, viewer: int) -> tuple[Place, datetime] | None:
    """Up to where a viewer has read, and since when that is known."""
    row = await runner.one(SQL.marker, viewer=viewer)
    return None if row is None else (Place(row["score"], row["id"]), row["set_at"])


async def set_marker(runner: Runner, viewer: int, place: Place) -> bool:
    """Note up to where a viewer has read; whether that is further than before."""
    return bool(await runner.run(SQL.set_marker, viewer=viewer, score=place.score, id=place.id))


def _change(row: Row) -> Change | None:
    if row["version"] is None:
        return None
    return Change(Kind.FOLLOWS, row["entity"], row["version"], row["items"], row["scores"])
