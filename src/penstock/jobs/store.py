"""The truth of jobs in PostgreSQL: one method a named query, rows in, model out.

Takes whatever runs a query, the pool or a caller's transaction; begins no transaction itself. The moves that
must hold together are functions of the database (see `sql/migrations`), so each is one round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from penstock.engines.postgres import Row, Runner, Tx
from penstock.engines.sql import load_queries
from penstock.jobs.handling import Outcome, bounded_text
from penstock.jobs.intake import Rows
from penstock.jobs.model import (
    ERROR_CHARACTERS_MAX,
    TRACEBACK_CHARACTERS_MAX,
    Job,
    JobsConfig,
    JobState,
    Lane,
    QueueStatus,
)

SQL: Final = load_queries("penstock.jobs")
PRIORITIES: Final = tuple(range(10))


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue as it is stored."""

    id: int
    name: str
    limiter: str


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


async def declare_queues(runner: Runner, names: list[str], limiters: list[str]) -> None:
    """Store queues that are not yet stored; existing ones stay as they are."""
    await runner.run(SQL.declare_queues, names=names, limiters=limiters)


async def find_queues(runner: Runner, names: list[str] | None = None) -> list[QueueRow]:
    """The stored ones of `names`, or every queue."""
    rows = await runner.all(SQL.find_queues, names=names)
    return [QueueRow(row["id"], row["name"], row["limiter"]) for row in rows]


async def change_limiter(runner: Runner, queue_id: int, limiter: str) -> bool:
    """Whether the queue could be given `limiter`: not once jobs of it were in lanes."""
    return await runner.value(SQL.change_limiter, queue=queue_id, limiter=limiter) is not None


async def enqueue(
    runner: Runner,
    rows: Rows,
    queue_ids: list[int],
    *,
    group_ids: list[int] | None,
    traceparent: str,
    is_hinted: bool,
) -> list[int]:
    """Insert `rows` in one round trip; return their ids in order."""
    ids = await runner.value(
        SQL.enqueue,
        queues=queue_ids,
        priorities=rows.priorities,
        run_ats=rows.run_ats,
        delays_s=rows.delays_s,
        lanes=rows.lanes,
        keys=rows.keys,
        groups=group_ids,
        payloads=rows.payloads,
        traceparent=traceparent,
        is_hinted=is_hinted,
    )
    return list(ids)


async def add_groups(
    tx: Tx, pending: list[int], callbacks: Rows, *, queue_ids: list[int], traceparent: str
) -> list[int]:
    """Insert groups with `pending` members each; return their ids in order."""
    ids = await tx.value(
        SQL.add_groups,
        pending=pending,
        queues=queue_ids,
        priorities=callbacks.priorities,
        run_ats=callbacks.run_ats,
        delays_s=callbacks.delays_s,
        lanes=callbacks.lanes,
        keys=callbacks.keys,
        payloads=callbacks.payloads,
        traceparent=traceparent,
    )
    return list(ids)


async def hint_queue(runner: Runner, queue_id: int) -> None:
    """Wake workers that listen."""
    await runner.run(SQL.hint_queue, queue=str(queue_id))


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


async def add_host(runner: Runner, name: str, queue_ids: list[int], lease_s: float) -> int:
    """Register a host; return its id."""
    host_id = await runner.value(SQL.add_host, name=name, queues=queue_ids, lease_s=lease_s)
    return int(host_id)


async def renew_host(runner: Runner, host_id: int, lease_s: float) -> bool:
    """Whether the host still was there to be renewed."""
    return await runner.value(SQL.renew_host, host=host_id, lease_s=lease_s) is not None


async def remove_host(runner: Runner, host_id: int) -> None:
    """Take the host away."""
    await runner.run(SQL.remove_host, host=host_id)


async def leases_of_host(runner: Runner, host_id: int) -> set[int]:
    """Ids of the leases that the host has."""
    return {row["id"] for row in await runner.all(SQL.leases_of_host, host=host_id)}


async def expired_leases(runner: Runner, *, leases_max: int) -> list[int]:
    """Leases of hosts that expired or are gone."""
    return [row["id"] for row in await runner.all(SQL.expired_leases, leases_max=leases_max)]


async def return_lease(runner: Runner, lease_id: int, losses_max: int) -> int:
    """Return a dead host's lease; how many jobs went back (or into quarantine)."""
    return int(await runner.value(SQL.return_lease, lease=lease_id, losses_max=losses_max))


async def drop_hosts(runner: Runner) -> int:
    """Remove expired hosts without leases."""
    return await runner.run(SQL.drop_hosts)


async def move_due(runner: Runner, *, jobs_max: int) -> int:
    """Move due jobs of lanes into their lanes; how many."""
    return int(await runner.value(SQL.move_due, jobs_max=jobs_max))


async def drop_failed(runner: Runner, *, kept_s: float, jobs_max: int) -> int:
    """Forget ended jobs that were kept long enough; how many."""
    return await runner.run(SQL.drop_failed, kept_s=kept_s, jobs_max=jobs_max)


async def find_job(runner: Runner, job_id: int) -> Job | None:
    """The job wherever it is, if it still is."""
    row = await runner.one(SQL.find_job, job=job_id)
    row = row or await runner.one(SQL.find_leased_job, job=job_id)
    return _job(row) if row is not None else None


async def newest_job_id(runner: Runner) -> int:
    """The greatest id given so far."""
    return int(await runner.value(SQL.newest_job))


async def why_waiting(runner: Runner, queue: str, lane: str | None) -> Row | None:
    """Fields that bear on a waiting job; None where the queue is gone."""
    return await runner.one(SQL.why_waiting, queue=queue, lane=lane)


async def cancel_job(runner: Runner, job_id: int) -> bool:
    """Whether the job was waiting and is cancelled now."""
    return bool(await runner.value(SQL.cancel_job, job=job_id))


async def retry_ended(runner: Runner, job_id: int) -> bool:
    """Whether the job was among the ended and is ready now. Raises: ConstraintViolated."""
    return bool(await runner.value(SQL.retry_ended, job=job_id))


async def ended_jobs(
    runner: Runner, *, queue: str | None, state: str | None, before: int | None, jobs_max: int
) -> list[Job]:
    """Ended jobs, newest id first."""
    rows = await runner.all(
        SQL.ended_jobs, queue=queue, state=state, before=before, jobs_max=jobs_max
    )
    return [_job(row) for row in rows]


async def queue_statuses(runner: Runner, queue: str | None = None) -> list[QueueStatus]:
    """Every queue with its backlog, or the one of that name."""
    rows = await runner.all(SQL.queue_statuses, queue=queue)
    return [
        QueueStatus(
            queue=row["name"],
            limiter=row["limiter"],
            paused=row["paused"],
            ready=row["ready"],
            scheduled=row["scheduled"],
            leased=row["leased"],
            failed=row["failed"],
            oldest_ready_age_s=row["oldest_ready_age_s"],
        )
        for row in rows
    ]


async def set_paused(runner: Runner, queue: str, *, is_paused: bool) -> bool:
    """Whether there is such a queue."""
    return await runner.one(SQL.set_paused, queue=queue, is_paused=is_paused) is not None


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


def _job(row: Row) -> Job:
    return Job(
        id=row["id"],
        state=JobState(row["state"]),
        queue=row["queue"],
        priority=row["priority"],
        run_at=row["run_at"],
        attempt=row["attempt"],
        losses=row["losses"],
        lane=row["lane"],
        unique=row["unique_key"],
        group_id=row["group_id"],
        host=row["host"],
        lease_id=row["lease_id"],
        ended_at=row["ended_at"],
        error=row["error"],
        traceback=row["traceback"],
        payload=msgspec.json.decode(row["payload"]),
    )
