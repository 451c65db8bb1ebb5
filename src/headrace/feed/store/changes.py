"""Changes of the index: what has to be made in it, and what it is to be as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engines.postgres import Row, Runner
from headrace.feed.model import Change, Kind
from headrace.feed.store.sql import SQL


async def unswept(runner: Runner, *, older_s: float, rows_max: int) -> list[Change]:
    """The oldest changes that were made so long ago and not swept yet."""
    rows = await runner.all(SQL.unswept, older_s=older_s, rows_max=rows_max)
    return [_change(row) for row in rows]


async def mark_swept(runner: Runner, ids: Sequence[int]) -> None:
    """These are in the index."""
    await runner.run(SQL.mark_swept, ids=ids)


async def unsweep(runner: Runner, *, swept: int, late_s: float) -> int:
    """Sweep all again that was made after a change, or so long before it; how many."""
    return await runner.run(SQL.unsweep, swept=swept, late_s=late_s)


async def drop_swept(runner: Runner, *, older_s: float, rows_max: int) -> int:
    """Forget swept changes; how many."""
    return int(await runner.value(SQL.drop_swept, older_s=older_s, rows_max=rows_max))


async def forgotten(runner: Runner) -> int:
    """The last change that was forgotten."""
    return int(await runner.value(SQL.forgotten) or 0)


async def changes_after(runner: Runner, kind: Kind, entity: int, *, version: int) -> list[Change]:
    """The changes after a version that are still kept, in order."""
    rows = await runner.all(SQL.changes_after, kind=int(kind), entity=entity, version=version)
    return [_change(row) for row in rows]


async def oldest_unswept_s(runner: Runner) -> float:
    """The age of the oldest change that was not swept; 0 where there is none."""
    return float(await runner.value(SQL.oldest_unswept) or 0.0)


async def entities_after(runner: Runner, kind: Kind, *, after: int, rows_max: int) -> list[int]:
    """Viewers or authors in order, after one of them."""
    rows = await runner.all(SQL.entities_after, kind=int(kind), after=after, rows_max=rows_max)
    return [row["entity"] for row in rows]


async def sample_entities(runner: Runner, kind: Kind, *, rows_max: int) -> list[int]:
    """Some viewers or authors."""
    rows = await runner.all(SQL.sample_entities, kind=int(kind), rows_max=rows_max)
    return [row["entity"] for row in rows]


async def count_entities(runner: Runner) -> int:
    """How many viewers and authors there are."""
    return int(await runner.value(SQL.count_entities))


async def has_entities(runner: Runner, *, rows: int) -> bool:
    """Whether there are more than so many."""
    return bool(await runner.value(SQL.has_entities, rows=rows))


async def whole(runner: Runner, kind: Kind, entities: Sequence[int], *, floor: int) -> list[Change]:
    """What the index is to have of each, with the version that this is, as of one moment."""
    if kind is Kind.POSTS:
        rows = await runner.all(SQL.whole_posts, entities=entities, floor=floor)
    else:
        rows = await runner.all(SQL.whole_follows, entities=entities)
    return [
        Change(kind, row["entity"], row["version"], row["items"], row["scores"]) for row in rows
    ]


async def now_ms(runner: Runner) -> int:
    """Milliseconds since 1970, by the clock that decides."""
    return int(await runner.value(SQL.now_ms))


def _change(row: Row) -> Change:
    """One without items says that none is left."""
    return Change(
        Kind(row["kind"]),
        row["entity"],
        row["version"],
        row["items"],
        row["scores"],
        row["id"],
        is_whole=not row["items"],
    )
