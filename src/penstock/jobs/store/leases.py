"""Claims and settlements: each is one function of the database, so one round trip and all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from penstock.engines.postgres import Row, Runner, Tx
from penstock.jobs.handling import Outcome, bounded_text
from penstock.jobs.model import ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX, JobsConfig
from penstock.jobs.store.sql import SQL

PRIORITIES: Final = tuple(range(10))


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim brought: a lease with its jobs as columns, or none (`lease_id` None)."""

    lease_id: int | None
    ids: Sequence[int]
    run_ats: Sequence[datetime]
    priorities: Sequence[int]
    attempts: Sequence[int]
    lanes: Sequence[str | None]
    traceparents: Sequence[str | None]
    payloads: Sequence[bytes]
    claimed_at: datetime
    moved: int = 0
    """Due jobs met on the way that went to their lanes."""
    slack_s: float | None = None
    """Lane jobs must start within this from the moment the claim was sent."""
    wait_s: float | None = None
    """After an empty claim of lanes: when to look again; None: at the next enqueue."""


async def claim_ready(
    runner: Runner,
    host_id: int,
    queue_id: int,
    *,
    jobs_max: int,
    priorities: Sequence[int],
    marks: Sequence[tuple[datetime, int]],
) -> Claim:
    """Lease due jobs past the scan `marks`, one (run_at, id) a priority."""
    row: Any = await runner.one(
        SQL.claim_ready,
        host=host_id,
        queue=queue_id,
        jobs_max=jobs_max,
        priorities=list(priorities),
        marks_at=[mark[0] for mark in marks],
        marks_id=[mark[1] for mark in marks],
    )
    return _claim(row, moved=row["moved"])


async def claim_lanes(
    runner: Runner, host_id: int, queue_id: int, *, jobs_max: int, config: JobsConfig
) -> Claim:
    """Lease jobs of lanes within their limits."""
    row: Any = await runner.one(
        SQL.claim_lanes,
        host=host_id,
        queue=queue_id,
        jobs_max=jobs_max,
        lanes_max=config.lanes_per_claim,
        quantum=config.lane_quantum,
    )
    return _claim(row, slack_s=row["slack_s"], wait_s=row["wait_s"])


def _claim(row: Row, **rest: Any) -> Claim:
    return Claim(
        lease_id=row["lease_id"],
        ids=row["ids"] or (),
        run_ats=row["run_ats"] or (),
        priorities=row["priorities"] or (),
        attempts=row["attempts"] or (),
        lanes=row["lanes"] or (),
        traceparents=row["traceparents"] or (),
        payloads=row["payloads"] or (),
        claimed_at=row["claimed_at"],
        **rest,
    )


async def settle(runner: Runner, lease_id: int, outcomes: dict[int, Outcome] | Outcome) -> bool:
    """Settle jobs of a lease, or with one Outcome all that are left; False: the lease is gone."""
    if isinstance(outcomes, Outcome):
        ids, each = None, [outcomes]
    else:
        ids, each = list(outcomes), list(outcomes.values())
    return bool(
        await runner.value(
            SQL.settle,
            lease=lease_id,
            ids=ids,
            outcomes=[outcome.word for outcome in each],
            delays_s=[outcome.after_s for outcome in each],
            errors=[bounded_text(outcome.error, ERROR_CHARACTERS_MAX) for outcome in each],
            tracebacks=[
                bounded_text(outcome.traceback, TRACEBACK_CHARACTERS_MAX) for outcome in each
            ],
        )
    )


async def is_lease_held(tx: Tx, lease_id: int) -> bool:
    """Hold the lease row until the transaction ends, if it is there."""
    return await tx.value(SQL.lock_lease, lease=lease_id) is not None


async def leases_of_host(runner: Runner, host_id: int) -> set[int]:
    """Ids of the leases that the host has."""
    return {row["id"] for row in await runner.all(SQL.leases_of_host, host=host_id)}


async def expired_leases(runner: Runner, *, leases_max: int) -> list[int]:
    """Leases of hosts that expired or are gone."""
    return [row["id"] for row in await runner.all(SQL.expired_leases, leases_max=leases_max)]


async def return_lease(runner: Runner, lease_id: int, losses_max: int) -> int:
    """Return a dead host's lease; how many jobs went back (or into quarantine)."""
    return int(await runner.value(SQL.return_lease, lease=lease_id, losses_max=losses_max))
