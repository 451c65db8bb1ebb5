"""Lanes and their limiters."""

from __future__ import annotations

from headrace.engines.postgres import Row, Runner
from headrace.jobs.model import Lane, Limiter
from headrace.jobs.store.sql import SQL


async def set_lane(
    runner: Runner,
    limiter: str,
    lane: str,
    *,
    starts_max: int | None,
    window_s: float | None,
    concurrency: int | None,
    is_paused: bool | None,
    weight: int | None,
    is_own: bool = True,
) -> None:
    """Set a lane's limits; holds its row until the transaction ends. Not `is_own`: its limiter's. None: as it is."""
    await runner.run(
        SQL.set_lane,
        limiter=limiter,
        lane=lane,
        is_own=is_own,
        starts_max=starts_max,
        window_s=window_s,
        concurrency=concurrency,
        is_paused=is_paused,
        weight=weight,
    )


async def pause_lane(runner: Runner, limiter: str, lane: str, *, is_paused: bool) -> None:
    """Pause or resume a lane; its limits and its weight stay."""
    await runner.run(SQL.pause_lane, limiter=limiter, lane=lane, is_paused=is_paused)


async def find_lane(runner: Runner, limiter: str, lane: str) -> Lane | None:
    """The lane, if it was set or used."""
    rows = await runner.all(SQL.find_lanes, limiter=limiter, lane=lane, after="", lanes_max=1)
    return _lane(rows[0]) if rows else None


async def list_lanes(runner: Runner, limiter: str, *, after: str, lanes_max: int) -> list[Lane]:
    """Lanes of the limiter by name, those after `after`."""
    rows = await runner.all(
        SQL.find_lanes, limiter=limiter, lane=None, after=after, lanes_max=lanes_max
    )
    return [_lane(row) for row in rows]


def _lane(row: Row) -> Lane:
    return Lane(
        limiter=row["limiter"],
        lane=row["name"],
        starts_max=row["starts_max"],
        window_s=row["window_s"],
        concurrency=row["concurrency"],
        paused=row["paused"],
        weight=row["weight"],
        waiting=int(row["waiting"]),
        inflight=row["inflight"],
        starts_live=row["starts_live"],
        next_at=row["next_at"],
        follows_limiter=not row["is_own"],
    )


async def spend(
    runner: Runner, limiter: str, lane: str, *, starts: int, wait_max_s: float
) -> float | None:
    """Take further starts; seconds until they may begin, None: refused, nothing was spent."""
    wait_s: float | None = await runner.value(
        SQL.spend, limiter=limiter, lane=lane, starts=starts, wait_max_s=wait_max_s
    )
    return wait_s


async def spend_of_queue(
    runner: Runner, queue_id: int, lane: str, *, starts: int, wait_max_s: float
) -> float | None:
    """The same for a lane of the queue's limiter."""
    wait_s: float | None = await runner.value(
        SQL.spend_of_queue, queue=queue_id, lane=lane, starts=starts, wait_max_s=wait_max_s
    )
    return wait_s


async def set_limiter(
    runner: Runner,
    limiter: str,
    *,
    starts_max: int | None,
    window_s: float | None,
    slack_s: float,
    concurrency: int | None,
    is_set: bool,
) -> bool:
    """Write a limiter's limits; whether its lanes are still to follow (`spread_limiter`)."""
    return bool(
        await runner.value(
            SQL.set_limiter,
            limiter=limiter,
            starts_max=starts_max,
            window_s=window_s,
            slack_s=slack_s,
            concurrency=concurrency,
            is_set=is_set,
        )
    )


async def reset_limiter(runner: Runner, limiter: str) -> bool:
    """Whether a person's limits were taken back; its lanes are still to follow (`spread_limiter`)."""
    return await runner.one(SQL.reset_limiter, limiter=limiter) is not None


async def spread_limiter(runner: Runner, limiter: str, *, after: str, lanes_max: int) -> str | None:
    """Let some lanes after `after` follow their limiter; the last of them, None: all do."""
    last: str | None = await runner.value(
        SQL.spread_limiter, limiter=limiter, after=after, lanes_max=lanes_max
    )
    return last


async def unspread_limiters(runner: Runner) -> list[str]:
    """Limiters whose lanes do not all follow yet."""
    return [row["name"] for row in await runner.all(SQL.unspread_limiters)]


async def find_limiters(runner: Runner, limiter: str | None = None) -> list[Limiter]:
    """Every limiter by name, or the one of that name."""
    rows = await runner.all(SQL.find_limiters, limiter=limiter)
    return [
        Limiter(
            limiter=row["name"],
            starts_max=row["starts_max"],
            window_s=row["window_s"],
            slack_s=row["slack_s"],
            concurrency=row["concurrency"],
            is_set=row["is_set"],
            queues=row["queues"],
        )
        for row in rows
    ]


async def remove_idle_lanes(
    runner: Runner, after: tuple[str, str], *, lanes_max: int, idle_s: float
) -> tuple[tuple[str, str] | None, int]:
    """Remove idle ones of the next lanes after (limiter, name); where it came to, and how many went."""
    row = await runner.one(
        SQL.remove_idle_lanes,
        limiter=after[0],
        lane=after[1],
        lanes_max=lanes_max,
        idle_s=idle_s,
    )
    assert row is not None, "the function returns one row always"
    last = None if row["last_name"] is None else (row["last_limiter"], row["last_name"])
    return last, row["removed"]
