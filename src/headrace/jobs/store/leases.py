"""Leases and the hosts that hold them: claims and settlements, each one round trip.

A consumer remembers its position in a queue: see `claim_cursor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from headrace.engines.postgres import Row, Runner, from_row
from headrace.jobs.headers import own_retries
from headrace.jobs.messages import Outcome, Work
from headrace.jobs.model import ERROR_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX, JobsConfig
from headrace.jobs.outcomes import bounded_text
from headrace.jobs.sql import SQL
from headrace.jobs.store.claim_cursor import FIRST_AT, LaneCursor


async def add_host(
    runner: Runner,
    name: str,
    queue_ids: Sequence[int],
    lease_s: float,
    *,
    kind: str = "work",
    tags: Sequence[str] = (),
    cores: int = 1,
) -> int:
    """Register a host; return its id. `kind`: `agent`, `work` or `taker`."""
    host_id = await runner.value(
        SQL.add_host,
        name=name,
        queues=list(queue_ids),
        lease_s=lease_s,
        kind=kind,
        tags=list(tags),
        cores=cores,
    )
    return int(host_id)


async def expire_host(runner: Runner, host_id: int) -> None:
    """Expire the host now."""
    await runner.run(SQL.expire_host, host=host_id)


async def end_hosts(runner: Runner) -> None:
    """End the leases of all agents and workers: none of them uses a database just restored."""
    await runner.run(SQL.end_hosts)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed lease with its jobs as columns."""

    lease_id: int
    is_plain: bool
    """Its jobs have no lane, key or group, and nothing of them is kept."""
    ids: Sequence[int]
    run_ats: Sequence[datetime]
    priorities: Sequence[int]
    attempts: Sequence[int]
    losses: Sequence[int]
    lanes: Sequence[str | None]
    headers: Sequence[str | None]
    versions: Sequence[int]
    payloads: Sequence[bytes]

    def as_work(self, queue: str, retries: int, start_before_s: float | None) -> Work:
        """The lease as a message for a slot."""
        return Work(
            queue=queue,
            lease_id=self.lease_id,
            ids=self.ids,
            payloads=self.payloads,
            attempts=self.attempts,
            losses=self.losses,
            lanes=self.lanes,
            headers=self.headers,
            versions=self.versions,
            retries=retries,
            start_before_s=start_before_s,
        )


@dataclass(frozen=True, slots=True)
class Claims:
    """The result of a claim: leases, most urgent first, and the result of the acks it carried."""

    leases: list[Claim]
    claimed_at: datetime
    retries: int
    """Retries of the queue in force."""
    moved: int = 0
    """Due jobs that the scan moved to their lanes."""
    limiter: str | None = None
    slack_s: float | None = None
    """Jobs of lanes must start within this time after the claim was sent."""
    wait_s: float | None = None
    """After an empty claim of lanes: seconds to wait; None: until the next enqueue."""
    is_counted: bool = False
    """Jobs of lanes with a concurrency limit: settling them gives their lanes room."""
    is_full: bool = False
    """As many lanes were ready as a claim may visit."""
    last_event: int = 0
    first_ready: datetime | None = None
    scan_s: float = 0.0
    """How long the server searched; without the commit, which may wait for a standby."""
    lost: Sequence[int] = ()
    busy: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SettleResult:
    """Leases that no longer exist, and leases that another transaction holds."""

    lost: Sequence[int] = ()
    busy: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """Queues with due work, and when the next job becomes due."""

    ready: frozenset[int]
    """Queues with due jobs without a lane."""
    laned: frozenset[int]
    """Queues with lanes that may have jobs to start."""
    next_s: float | None
    """Seconds until the next job becomes due; None: no known job will."""
    polled_at: datetime
    last_event: int
    """The newest journal row that had a number."""
    took_s: float
    """How long the search took."""

    @property
    def queue_ids(self) -> frozenset[int]:
        """All queues with work."""
        return self.ready | self.laned


async def claim_ready(
    runner: Runner,
    host_id: int,
    queue_id: int,
    *,
    leases_max: int,
    batch: int,
    priorities: Sequence[int],
    marks: Sequence[tuple[datetime, int]],
    done: Iterable[int] = (),
) -> Claims:
    """Ack the leases `done`, then lease due jobs after the scan `marks`, one per priority."""
    rows: list[Any] = await runner.all(
        SQL.claim_ready,
        host=host_id,
        queue=queue_id,
        leases_max=leases_max,
        batch=batch,
        priorities=list(priorities),
        marks_at=[mark[0] for mark in marks],
        marks_id=[mark[1] for mark in marks],
        done=list(done),
    )
    first = rows[0]
    facts = {name: first[name] or () for name in ("lost", "busy")}
    return _claims(rows, moved=first["moved"], scan_s=first["scan_s"], **facts)


async def claim_lanes(
    runner: Runner,
    host_id: int,
    queue_id: int,
    *,
    leases_max: int,
    batch: int,
    config: JobsConfig,
    cursor: LaneCursor,
) -> Claims:
    """Lease jobs of a queue's lanes within their limits."""
    rows: list[Any] = await runner.all(
        SQL.claim_lanes,
        host=host_id,
        queue=queue_id,
        leases_max=leases_max,
        batch=batch,
        lanes_max=min(config.lanes_per_claim, leases_max * batch),
        # Small claims use small shares, so that lanes alternate; the proportions stay.
        quantum=min(config.lane_quantum, leases_max * batch),
        is_folding=cursor.is_folding,
        event=cursor.event,
        ready_from=cursor.ready_from,
    )
    first = rows[0]
    has_leases = first["lease_id"] is not None
    facts = ("limiter", "wait_s", "is_counted", "is_full", "last_event", "first_ready", "scan_s")
    slack_s = first["slack_s"] if has_leases else None
    return _claims(rows, slack_s=slack_s, **{fact: first[fact] for fact in facts})


async def fold_lanes(
    runner: Runner, queue_id: int, *, event: int, events_max: int
) -> tuple[int, int]:
    """Add journal rows after `event` to the counts of lanes. Return how many, and the last."""
    row: Any = await runner.one(SQL.fold_lanes, queue=queue_id, event=event, events_max=events_max)
    return row["folded"], row["last_event"]


def _claims(rows: list[Row], **rest: Any) -> Claims:
    first = rows[0]
    leases = [from_row(Claim, row) for row in rows if row["lease_id"] is not None]
    if len(leases) > 1:
        leases.sort(key=lambda lease: (lease.priorities[0], lease.run_ats[0], lease.ids[0]))
    return Claims(
        leases=leases,
        claimed_at=first["claimed_at"],
        retries=first["retries"] or 0,
        **rest,
    )


async def settle(
    runner: Runner,
    *,
    jobs: Mapping[int, Mapping[int, Outcome]] | None = None,
    whole: Iterable[int] = (),
    word: str = "done",
    losses_max: int,
    progressed: Iterable[int] = (),
) -> SettleResult:
    """Record `jobs`, by lease and id, and `word` for every job left of the leases `whole`.

    One statement. Settling a job again has no effect.
    """
    settled = [
        (lease, job, outcome)
        for lease, outcomes in (jobs or {}).items()
        for job, outcome in outcomes.items()
    ]
    row: Any = await runner.one(
        SQL.settle,
        whole=list(whole),
        outcome=word,
        leases=[lease for lease, _, _ in settled],
        ids=[job for _, job, _ in settled],
        outcomes=[outcome.kind for _, _, outcome in settled],
        delays_s=[outcome.after_s for _, _, outcome in settled],
        errors=[bounded_text(outcome.error, ERROR_CHARACTERS_MAX) for _, _, outcome in settled],
        tracebacks=[
            bounded_text(outcome.traceback, TRACEBACK_CHARACTERS_MAX) for _, _, outcome in settled
        ],
        results=[outcome.result for _, _, outcome in settled],
        queues=[outcome.queue for _, _, outcome in settled],
        losses_max=losses_max,
        progressed=list(progressed),
    )
    return SettleResult() if row is None else SettleResult(row["lost"] or (), row["busy"] or ())


async def lock_leases(
    runner: Runner, lease_ids: Iterable[int], idle_s_max: float | None
) -> set[int]:
    """Lock leases until the transaction ends; return the ids of those that exist.

    The server ends the transaction after `idle_s_max` without a statement; None: it does not. Hosts
    renew their leases more often, so a suspended host loses these locks before its leases, and the
    next sweep returns them.
    """
    rows = await runner.all(
        SQL.lock_leases,
        leases=sorted(set(lease_ids)),
        milliseconds=None if idle_s_max is None else str(int(idle_s_max * 1000)),
    )
    return {row["id"] for row in rows}


@dataclass(frozen=True, slots=True)
class TakenJobs:
    """The jobs of a taker's lease."""

    host_id: int
    attempts: Mapping[int, int]
    """Failed runs so far, by job."""
    retries: int
    own_retries: Mapping[int, int]
    """Of jobs that differ from their queue."""
    decisions: Mapping[str, str | None]
    """The target queue or None by decision that the queue declares."""
    settled: frozenset[int]
    """Jobs whose outcome is recorded."""
    acked: frozenset[int]
    """Hashes of the recorded outcomes."""


async def taken_jobs(runner: Runner, lease_id: int) -> TakenJobs | None:
    """Lock a taker's lease; return its jobs, settled ones included. None: the lease has ended."""
    row = await runner.one(SQL.taken_jobs, lease=lease_id)
    if row is None:
        return None
    ids = row["ids"]
    attempts = dict(zip(ids, row["attempts"], strict=True))
    return TakenJobs(
        row["host"],
        attempts,
        row["retries"],
        own_retries(ids, row["headers"]),
        msgspec.json.decode(row["decisions"]),
        frozenset(row["settled"]),
        frozenset(row["acked"]),
    )


async def work_ahead(
    runner: Runner,
    queue_ids: Iterable[int],
    *,
    from_at: datetime = FIRST_AT,
    event: int = 0,
) -> WorkAhead:
    """Queues with work now, and when the next job is due. Index probes only.

    It searches jobs and lanes that became due since `from_at`, and journal rows after `event`.
    """
    row: Any = await runner.one(
        SQL.work_ahead, queues=list(queue_ids), from_at=from_at, event=event
    )
    return WorkAhead(
        ready=frozenset(row["ready"] or ()),
        laned=frozenset(row["laned"] or ()),
        next_s=row["wait_s"],
        polled_at=row["polled_at"],
        last_event=row["last_event"],
        took_s=row["took_s"],
    )
