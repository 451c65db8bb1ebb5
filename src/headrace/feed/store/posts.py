"""Posts: added, shown when their moment comes, removed, read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from headrace.engines.postgres import Row, Runner
from headrace.feed.model import NEWEST, OLDEST, Change, Kind, Place
from headrace.feed.store.sql import SQL


@dataclass(frozen=True, slots=True)
class Stored:
    """A post as it stands."""

    id: str
    author: int
    score: int
    is_waiting: bool
    visible_at: datetime
    ref: str | None = None
    is_new: bool = False


async def post(
    runner: Runner,
    *,
    ids: Sequence[str],
    authors: Sequence[int],
    ats: Sequence[datetime | None],
    refs: Sequence[str | None],
) -> tuple[list[Stored], list[Change]]:
    """Add posts: each of `ids` as it stands then, and the changes of the index."""
    rows = await runner.all(SQL.post, ids=ids, authors=authors, ats=ats, refs=refs)
    stored = [
        Stored(
            id=row["id"],
            author=row["author"],
            score=row["score"],
            is_waiting=row["state"] == 1,
            visible_at=row["visible_at"],
            is_new=row["is_new"],
        )
        for row in rows
    ]
    shown = [(row, row["score"]) for row in rows if row["version"] is not None]
    return stored, _changes(shown)


async def publish(runner: Runner, ids: Sequence[str]) -> list[Change]:
    """Show posts whose moment has come; the changes of the index."""
    rows = await runner.all(SQL.publish, ids=ids)
    return [
        Change(Kind.POSTS, row["entity"], row["version"], row["items"], row["scores"])
        for row in rows
    ]


async def delete_posts(
    runner: Runner, ids: Sequence[str]
) -> tuple[list[tuple[str, int, str | None]], list[Change]]:
    """Remove posts: id, author and ref of each that there was, and the changes of the index."""
    rows = await runner.all(SQL.delete_posts, ids=ids)
    gone = [(row["id"], row["author"], row["ref"]) for row in rows]
    return gone, _changes((row, -1) for row in rows if row["version"] is not None)


async def find_posts(runner: Runner, ids: Sequence[str]) -> list[Stored]:
    """Posts by id, in any order, without those that do not exist."""
    return [_stored(row) for row in await runner.all(SQL.find_posts, ids=ids)]


async def author_posts(
    runner: Runner, author: int, *, before: Place | None, rows_max: int
) -> list[Stored]:
    """An author's shown posts, newest first."""
    score, post_id = before or NEWEST
    rows = await runner.all(
        SQL.author_posts, author=author, score=score, id=post_id, rows_max=rows_max
    )
    return [_stored(row) for row in rows]


async def page(
    runner: Runner, viewer: int, *, before: Place | None, after: Place | None, rows_max: int
) -> list[tuple[int, str, int]]:
    """Score, id and author of a viewer's newest posts between two places."""
    score, post_id = before or NEWEST
    end_score, end_id = after or OLDEST
    rows = await runner.all(
        SQL.page,
        viewer=viewer,
        score=score,
        id=post_id,
        end_score=end_score,
        end_id=end_id,
        rows_max=rows_max,
    )
    return [(row["score"], row["id"], row["author"]) for row in rows]


async def why(runner: Runner, viewer: int, post_id: str) -> Row | None:
    """A post, and what stands between its author and a viewer; None: there is no such post."""
    return await runner.one(SQL.why_post, viewer=viewer, id=post_id)


async def drop_posts(runner: Runner, author: int, *, score: int) -> int:
    """Remove an author's posts from before a score; how many."""
    return await runner.run(SQL.drop_posts, author=author, score=score)


def _stored(row: Row) -> Stored:
    return Stored(
        id=row["id"],
        author=row["author"],
        score=row["score"],
        is_waiting=row["state"] == 1,
        visible_at=row["visible_at"],
        ref=row["ref"],
    )


def _changes(rows: Iterable[tuple[Row, int]]) -> list[Change]:
    """One change for each author."""
    items: dict[tuple[int, int], list[str]] = {}
    scores: dict[tuple[int, int], list[int]] = {}
    for row, score in rows:
        key = (row["author"], row["version"])
        items.setdefault(key, []).append(row["id"])
        scores.setdefault(key, []).append(score)
    return [
        Change(Kind.POSTS, author, version, items[author, version], scores[author, version])
        for author, version in items
    ]
