"""The feed in PostgreSQL: one function per statement. No function begins a transaction."""

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
    """Whether this call added it."""
    version: int | None = None
    """The author's version, if this call changed the index."""


LISTS: Final = {
    "following": (SQL.following, SQL.count_following),
    "followers": (SQL.followers, SQL.count_followers),
    MuteOrBlock.MUTE.value: (SQL.muted_blocked, SQL.count_muted_blocked),
    MuteOrBlock.BLOCK.value: (SQL.muted_blocked, SQL.count_muted_blocked),
}
"""The queries of each list of people: its rows and their number."""


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
    stored = [Stored(**dict(row)) for row in rows]
    return stored, _changes_of_posts((post, post.score) for post in stored)


async def publish(runner: Runner, ids: Sequence[str]) -> list[Change]:
    """Make due posts visible. Return the changes of the index."""
    return [_change_of(row, ChangeKind.POSTS) for row in await runner.all(SQL.publish, ids=ids)]


async def delete_posts(runner: Runner, ids: Sequence[str]) -> tuple[list[Stored], list[Change]]:
    """Delete posts. Return each as it was, and the changes of the index."""
    deleted = [Stored(**dict(row)) for row in await runner.all(SQL.delete_posts, ids=ids)]
    return deleted, _changes_of_posts((post, -1) for post in deleted)


async def find_posts(runner: Runner, ids: Sequence[str]) -> list[Stored]:
    """Existing posts by id, in any order."""
    return [Stored(**dict(row)) for row in await runner.all(SQL.find_posts, ids=ids)]


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
    return [Stored(**dict(row)) for row in rows]


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
) -> tuple[int, list[Change]]:
    """Follow authors. Return the number of new follows (-1: limit exceeded) and the change."""
    rows = await runner.all(
        SQL.follow, viewer=viewer, authors=authors, ats=ats, follows_max=follows_max
    )
    return _changed(rows)


async def unfollow(runner: Runner, viewer: int, authors: Sequence[int]) -> tuple[int, list[Change]]:
    """Unfollow authors. Return the number of removed follows and the change."""
    return _changed(await runner.all(SQL.unfollow, viewer=viewer, authors=authors))


async def unfollow_all(runner: Runner, viewer: int) -> tuple[int, list[Change]]:
    """Unfollow everyone. Return the number of removed follows and the change."""
    return _changed(await runner.all(SQL.unfollow_all, viewer=viewer))


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
    return _changed(rows)


async def people(
    runner: Runner, listing: str, entity: int, *, before: tuple[datetime, int], rows_max: int
) -> tuple[list[tuple[datetime, int]], int]:
    """Since when, and who: rows of one of LISTS, latest first, and their total number."""
    rows_query, count_query = LISTS[listing]
    given: dict[str, Any] = {"entity": entity}
    if rows_query is SQL.muted_blocked:
        given["kind"] = listing
    rows = await runner.all(
        rows_query, **given, before_at=before[0], before_id=before[1], rows_max=rows_max
    )
    total = await runner.value(count_query, **given)
    return [(row["since_at"], row["id"]) for row in rows], int(total)


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
    return [_change_of(row, ChangeKind(row["kind"]), row["id"]) for row in rows]


async def unswept_of(runner: Runner, kind: ChangeKind, entities: Sequence[int]) -> list[Change]:
    """Unswept changes of viewers or authors, in order."""
    rows = await runner.all(SQL.unswept_of, kind=int(kind), entities=entities)
    return [_change_of(row, kind, row["id"]) for row in rows]


async def unswept_of_posts(runner: Runner, ids: Sequence[str]) -> list[Change]:
    """Unswept changes of posts, in order."""
    rows = await runner.all(SQL.unswept_of_posts, ids=ids)
    return [_change_of(row, ChangeKind.POSTS, row["id"]) for row in rows]


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
    return [_change_of(row, ChangeKind(row["kind"]), row["id"]) for row in rows]


async def epoch(runner: Runner, *, is_new: bool = False) -> int:
    """The lowest version of new changes. A new one begins if PostgreSQL lost it, or `is_new`."""
    return int(await runner.value(SQL.epoch, is_new=is_new))


async def find_epoch(runner: Runner) -> int:
    """The epoch; -1: none has begun since PostgreSQL's last crash or failover."""
    return int(await runner.value(SQL.find_epoch))


async def versions_of(runner: Runner, kind: ChangeKind, entities: Sequence[int]) -> dict[int, int]:
    """Versions of viewers or authors; those without one are missing."""
    rows = await runner.all(SQL.versions_of, kind=int(kind), entities=entities)
    return {row["entity"]: row["version"] for row in rows}


async def raise_version(runner: Runner, kind: ChangeKind, entity: int, *, version: int) -> None:
    """Raise the version of an entity to `version`, unless it is higher."""
    await runner.run(SQL.raise_version, kind=int(kind), entity=entity, version=version)


async def oldest_unswept_s(runner: Runner) -> float:
    """Age of the oldest unswept change; 0: none."""
    return float(await runner.value(SQL.oldest_unswept) or 0.0)


async def overdue_posts(
    runner: Runner, *, late_s: float, rows_max: int
) -> tuple[int, datetime | None]:
    """Posts that should have been published `late_s` ago, and since when the first waits."""
    row: Any = await runner.one(SQL.overdue_posts, late_s=late_s, rows_max=rows_max)
    return row["posts"], row["since_at"]


async def recent_entities(
    runner: Runner, kind: ChangeKind, *, looked_at: int, rows_max: int
) -> list[int]:
    """Viewers or authors among the newest changes, latest first."""
    rows = await runner.all(
        SQL.recent_entities, kind=int(kind), looked_at=looked_at, rows_max=rows_max
    )
    return [row["entity"] for row in rows]


async def ids_like(runner: Runner, part: str, last: str, *, rows_max: int) -> dict[int, str]:
    """Text ids from `part` to `last`, by their numbers."""
    rows = await runner.all(SQL.ids_like, part=part, last=last, rows_max=rows_max)
    return {row["id"]: row["name"] for row in rows}


async def kinds_of(runner: Runner, entities: Sequence[int]) -> list[tuple[int, ChangeKind]]:
    """Each entity that is a viewer or an author; one that is both appears twice."""
    rows = await runner.all(SQL.kinds_of, entities=entities)
    return [(row["entity"], ChangeKind(row["kind"])) for row in rows]


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
    return [_change_of(row, kind) for row in rows]


async def now_ms(runner: Runner) -> int:
    """Milliseconds since 1970 by the database's clock."""
    return int(await runner.value(SQL.now_ms))


def _changes_of_posts(posts: Iterable[tuple[Stored, int]]) -> list[Change]:
    """One change per author, of the posts with a version and their new scores."""
    items: dict[tuple[int, int], list[str]] = {}
    scores: dict[tuple[int, int], list[int]] = {}
    for post, score in posts:
        if post.version is not None:
            key = (post.author, post.version)
            items.setdefault(key, []).append(entry_of(post.id, post.kind))
            scores.setdefault(key, []).append(score)
    return [
        Change(ChangeKind.POSTS, author, version, items[author, version], scores[author, version])
        for author, version in items
    ]


def _changed(rows: Sequence[Row]) -> tuple[int, list[Change]]:
    """The number in each row, and the changes of the rows that have one."""
    changes = [_change_of(row, ChangeKind.FOLLOWS) for row in rows if row["version"] is not None]
    return rows[0]["changed"], changes


def _change_of(row: Row, kind: ChangeKind, outbox_id: int = 0) -> Change:
    return Change(kind, row["entity"], row["version"], row["items"], row["scores"], outbox_id)
