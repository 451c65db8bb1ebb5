"""Lanes of limiters."""

from __future__ import annotations

from penstock.engines.postgres import Runner
from penstock.jobs.model import Lane
from penstock.jobs.store.sql import SQL


async def set_lane(
    runner: Runner,
    limiter: str,
    lane: str,
    *,
    starts_max: int | None,
    window_s: float | None,
    concurrency: int | None,
    is_paused: bool,
    weight: int,
) -> None:
    """Set a lane's limits; holds its row until the transaction ends."""
    await runner.run(
        SQL.set_lane,
        limiter=limiter,
        lane=lane,
        starts_max=starts_max,
        window_s=window_s,
        concurrency=concurrency,
        is_paused=is_paused,
        weight=weight,
    )


async def find_lane(runner: Runner, limiter: str, lane: str) -> Lane | None:
    """The lane, if it was set or used."""
    row = await runner.one(SQL.find_lane, limiter=limiter, lane=lane)
    if row is None:
        return None
    return Lane(
        limiter=row["limiter"],
        lane=row["name"],
        starts_max=row["starts_max"],
        window_s=row["window_s"],
        concurrency=row["concurrency"],
        paused=row["paused"],
        weight=row["weight"],
        waiting=row["waiting"],
        inflight=row["inflight"],
        starts_live=row["starts_live"],
        next_at=row["next_at"],
    )
