"""The feed in PostgreSQL: one function per named query. No function begins a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headrace.engines.postgres import Row, Runner
from headrace.engines.sql import load_queries
from headrace.feed.model import (
    NEWEST,
    OLDEST,
    Change,
    ChangeKind,
    MuteOrBlock,
    Position,
    entry_of,
)

SQL: Final[Any] = load_queries("headrace.feed")


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored post."""

    id: str
    author: int
    score: int
    is_waiting: bool
    visible_at: datetime
    ref: str | None = None
    kind: str | None = None
    is_new: bool = False


async def ensure_shards(runner: Runner, shards: int) -> int:
    """Store the number of shards if there is none. Return the stored number."""
    return int(await runner.value(SQL.ensure_shards, shards=shards))


async def create_ids(runner: Runner, names: Sequence[str]) -> dict[str, int]:
    """Numbers of text ids, created where missing."""
    return {row["name"]: row["id"] for row in await runner.all(SQL.create_ids, names=names)}


async def find_ids(runner: Runner, names: Sequence[str]) -> dict[str, int]:
    """Numbers of the text ids that have one."""
    return {row["name"]: row["id"] for row in await runner.all(SQL.find_ids, names=names)}


async def names_of(runner: Runner, ids: Sequence[int]) -> dict[int, str]:
    """Text ids by their numbers."""
    return {row["id"]: row["name"] for row in await runner.all(SQL.names_of, ids=ids)}


async def post(
    runner: Runner,
    *,
    ids: Sequence[str],
    authors: Sequence[int],
    ats: Sequence[datetime | None],
    refs: Sequence[str | None],
    kinds: Sequence[str | None],
) -> tuple[list[Stored], list[Change]]:
    """Add posts. Return each of `ids` as stored, and the changes of the index."""
    rows = await runner.all(SQL.post, ids=ids, authors=authors, ats=ats, refs=refs, kinds=kinds)
    stored = [
        Stored(
            id=row["id"],
            author=row["author"],
            score=row["score"],
            is_waiting=row["state"] == 1,
            visible_at=row["visible_at"],
            kind=row["kind"],
            is_new=row["is_new"],
        )
        for row in rows
    ]
    visible = [(row, row["score"]) for row in rows if row["version"] is not None]
    return stored, _changes_of_posts(visible)


async def publish(runner: Runner, ids: Sequence[str]) -> list[Change]:
    """Make due posts visible. Return the changes of the index."""
    rows = await runner.all(SQL.publish, ids=ids)
    return [
        Change(ChangeKind.POSTS, row["entity"], row["version"], row["items"], row["scores"])
        for row in rows
    ]


async def delete_posts(
    runner: Runner, ids: Sequence[str]
) -> tuple[list[tuple[str, int, str | None]], list[Change]]:
    """Delete posts. Return id, author and ref of each, and the changes of the index."""
    rows = await runner.all(SQL.delete_posts, ids=ids)
    deleted = [(row["id"], row["author"], row["ref"]) for row in rows]
    return deleted, _changes_of_posts((row, -1) for row in rows if row["version"] is not None)


async def find_posts(runner: Runner, ids: Sequence[str]) -> list[Stored]:
    """Existing posts by id, in any order."""
    return [_stored(row) for row in await runner.all(SQL.find_posts, ids=ids)]


async def author_posts(
    runner: Runner,
    author: int,
    *,
    before: Position | None,
    kinds: Sequence[str] | None,
    rows_max: int,
) -> list[Stored]:
    """An author's visible posts, newest first."""
    score, post_id = before or NEWEST
    rows = await runner.all(
        SQL.author_posts, author=author, score=score, id=post_id, kinds=kinds, rows_max=rows_max
    )
    return [_stored(row) for row in rows]


async def page(
    runner: Runner,
    viewer: int,
    *,
    before: Position | None,
    after: Position | None,
    kinds: Sequence[str] | None,
    rows_max: int,
) -> list[tuple[int, str, int, str | None]]:
    """Score, id, author and kind of a viewer's newest posts between two positions.

    With `kinds` only posts of these kinds.
    """
    score, post_id = before or NEWEST
    end_score, end_id = after or OLDEST
    rows = await runner.all(
        SQL.page,
        viewer=viewer,
        score=score,
        id=post_id,
        end_score=end_score,
        end_id=end_id,
        kinds=kinds,
        rows_max=rows_max,
    )
    return [(row["score"], row["id"], row["author"], row["kind"]) for row in rows]


async def why_post(runner: Runner, viewer: int, post_id: str) -> Row | None:
    """A post with the follow, mute and blocks between author and viewer; None: no such post."""
    return await runner.one(SQL.why_post, viewer=viewer, id=post_id)


async def drop_posts(runner: Runner, author: int, *, score: int) -> int:
    """Delete an author's posts below a score. Return their number."""
    return await runner.run(SQL.drop_posts, author=author, score=score)


async def follow(
    runner: Runner,
    viewer: int,
    authors: Sequence[int],
    *,
    ats: Sequence[datetime | None],
    follows_max: int,
) -> tuple[int, Change | None]:
    """Follow authors. Return the number of new follows (-1: limit exceeded) and the change."""
    row = await runner.one(
        SQL.follow, viewer=viewer, authors=authors, ats=ats, follows_max=follows_max
    )
    assert row is not None
    return row["changed"], _change_of_follows(row)


async def unfollow(
    runner: Runner, viewer: int, authors: Sequence[int]
) -> tuple[int, Change | None]:
    """Unfollow authors. Return the number of removed follows and the change."""
    row = await runner.one(SQL.unfollow, viewer=viewer, authors=authors)
    assert row is not None
    return row["changed"], _change_of_follows(row)


async def unfollow_all(runner: Runner, viewer: int) -> tuple[int, Change | None]:
    """Unfollow everyone. The change is an empty snapshot."""
    row = await runner.one(SQL.unfollow_all, viewer=viewer)
    assert row is not None
    if row["version"] is None:
        return row["changed"], None
    change = Change(ChangeKind.FOLLOWS, viewer, row["version"], [], [], is_snapshot=True)
    return row["changed"], change


async def mute_block(
    runner: Runner,
    viewer: int,
    authors: Sequence[int],
    kind: MuteOrBlock,
    *,
    is_set: bool,
    rows_max: int,
) -> tuple[int, list[Change]]:
    """Set or end mutes or blocks. Return how many changed (-1: limit exceeded) and the changes."""
    rows = await runner.all(
        SQL.mute_block,
        viewer=viewer,
        authors=authors,
        kind=kind.value,
        is_set=is_set,
        rows_max=rows_max,
    )
    changes = [change for row in rows if (change := _change_of_follows(row)) is not None]
    return rows[0]["changed"], changes


async def muted_blocked(
    runner: Runner, viewer: int, kind: MuteOrBlock, *, before: tuple[datetime, int], rows_max: int
) -> list[tuple[int, datetime]]:
    """Muted or blocked authors, latest first."""
    rows = await runner.all(
        SQL.muted_blocked,
        viewer=viewer,
        kind=kind.value,
        before_at=before[0],
        before_id=before[1],
        rows_max=rows_max,
    )
    return [(row["id"], row["since_at"]) for row in rows]


async def count_muted_blocked(runner: Runner, viewer: int, kind: MuteOrBlock) -> int:
    """Number of muted or blocked authors."""
    return int(await runner.value(SQL.count_muted_blocked, viewer=viewer, kind=kind.value))


async def following(
    runner: Runner, viewer: int, *, before: tuple[datetime, int], rows_max: int
) -> list[tuple[int, datetime]]:
    """Followed authors, latest first."""
    rows = await runner.all(
        SQL.following, entity=viewer, before_at=before[0], before_id=before[1], rows_max=rows_max
    )
    return [(row["id"], row["since_at"]) for row in rows]


async def followers(
    runner: Runner, author: int, *, before: tuple[datetime, int], rows_max: int
) -> list[tuple[int, datetime]]:
    """Followers of an author, latest first."""
    rows = await runner.all(
        SQL.followers, entity=author, before_at=before[0], before_id=before[1], rows_max=rows_max
    )
    return [(row["id"], row["since_at"]) for row in rows]


async def count_following(runner: Runner, viewer: int) -> int:
    """Number of followed authors."""
    return int(await runner.value(SQL.count_following, entity=viewer))


async def count_followers(runner: Runner, author: int) -> int:
    """Number of followers of an author."""
    return int(await runner.value(SQL.count_followers, entity=author))


async def marker(runner: Runner, viewer: int) -> tuple[Position, datetime] | None:
    """The read marker of a viewer, and when it was set."""
    row = await runner.one(SQL.marker, viewer=viewer)
    return None if row is None else (Position(row["score"], row["id"]), row["set_at"])


async def set_marker(runner: Runner, viewer: int, position: Position) -> bool:
    """Move the read marker forward, never back. Return whether it moved."""
    return bool(
        await runner.run(SQL.set_marker, viewer=viewer, score=position.score, id=position.id)
    )


async def unswept(runner: Runner, *, older_s: float, rows_max: int) -> list[Change]:
    """The oldest unswept changes that are older than `older_s`."""
    rows = await runner.all(SQL.unswept, older_s=older_s, rows_max=rows_max)
    return [_change_of_outbox(row) for row in rows]


async def mark_swept(runner: Runner, ids: Sequence[int]) -> None:
    """Mark changes as present in the index."""
    await runner.run(SQL.mark_swept, ids=ids)


async def mark_unswept(runner: Runner, *, swept: int, late_s: float) -> int:
    """Mark changes after `swept`, or made up to `late_s` before it, as unswept. Return how many."""
    return await runner.run(SQL.mark_unswept, swept=swept, late_s=late_s)


async def purge_swept(runner: Runner, *, older_s: float, rows_max: int) -> int:
    """Delete old swept changes. Return how many."""
    return int(await runner.value(SQL.purge_swept, older_s=older_s, rows_max=rows_max))


async def last_purged(runner: Runner) -> int:
    """Id of the last purged change."""
    return int(await runner.value(SQL.last_purged) or 0)


async def changes_after(
    runner: Runner, kind: ChangeKind, entity: int, *, version: int
) -> list[Change]:
    """Stored changes of an entity after a version, in order."""
    rows = await runner.all(SQL.changes_after, kind=int(kind), entity=entity, version=version)
    return [_change_of_outbox(row) for row in rows]


async def oldest_unswept_s(runner: Runner) -> float:
    """Age of the oldest unswept change; 0: none."""
    return float(await runner.value(SQL.oldest_unswept) or 0.0)


async def entities_after(
    runner: Runner, kind: ChangeKind, *, after: int, rows_max: int
) -> list[int]:
    """Viewers or authors in order, after one of them."""
    rows = await runner.all(SQL.entities_after, kind=int(kind), after=after, rows_max=rows_max)
    return [row["entity"] for row in rows]


async def sample_entities(runner: Runner, kind: ChangeKind, *, rows_max: int) -> list[int]:
    """A random sample of viewers or authors."""
    rows = await runner.all(SQL.sample_entities, kind=int(kind), rows_max=rows_max)
    return [row["entity"] for row in rows]


async def count_entities(runner: Runner) -> int:
    """Number of viewers and authors."""
    return int(await runner.value(SQL.count_entities))


async def has_entities(runner: Runner, *, rows: int) -> bool:
    """Whether there are more than `rows` viewers and authors."""
    return bool(await runner.value(SQL.has_entities, rows=rows))


async def snapshots(
    runner: Runner, kind: ChangeKind, entities: Sequence[int], *, floor: int
) -> list[Change]:
    """All items of each entity and their version, as of one moment."""
    if kind is ChangeKind.POSTS:
        rows = await runner.all(SQL.snapshot_posts, entities=entities, floor=floor)
    else:
        rows = await runner.all(SQL.snapshot_follows, entities=entities)
    return [
        Change(kind, row["entity"], row["version"], row["items"], row["scores"]) for row in rows
    ]


async def now_ms(runner: Runner) -> int:
    """Milliseconds since 1970 by the database's clock."""
    return int(await runner.value(SQL.now_ms))


def _stored(row: Row) -> Stored:
    return Stored(
        id=row["id"],
        author=row["author"],
        score=row["score"],
        is_waiting=row["state"] == 1,
        visible_at=row["visible_at"],
        ref=row["ref"],
        kind=row["kind"],
    )


def _changes_of_posts(rows: Iterable[tuple[Row, int]]) -> list[Change]:
    """One change per author."""
    items: dict[tuple[int, int], list[str]] = {}
    scores: dict[tuple[int, int], list[int]] = {}
    for row, score in rows:
        key = (row["author"], row["version"])
        items.setdefault(key, []).append(entry_of(row["id"], row["kind"]))
        scores.setdefault(key, []).append(score)
    return [
        Change(ChangeKind.POSTS, author, version, items[author, version], scores[author, version])
        for author, version in items
    ]


def _change_of_follows(row: Row) -> Change | None:
    if row["version"] is None:
        return None
    return Change(ChangeKind.FOLLOWS, row["entity"], row["version"], row["items"], row["scores"])


def _change_of_outbox(row: Row) -> Change:
    """A change without items is an empty snapshot."""
    return Change(
        ChangeKind(row["kind"]),
        row["entity"],
        row["version"],
        row["items"],
        row["scores"],
        row["id"],
        is_snapshot=not row["items"],
    )
