"""Claims and settlements: each is one function of the database, so one round trip and all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headrace.engines.postgres import Row, Runner
from headrace.jobs.messages import Work
from headrace.jobs.model import (
    ERROR_CHARACTERS_MAX,
    PRIORITY_LAST,
    TRACEBACK_CHARACTERS_MAX,
    JobsConfig,
)
from headrace.jobs.outcomes import Outcome, bounded_text
from headrace.jobs.store.sql import SQL

PRIORITIES: Final = tuple(range(PRIORITY_LAST + 1))


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease that a claim brought, with its jobs as columns."""

    lease_id: int
    is_plain: bool
    """Nothing hangs on its jobs: no lane, key, group, and nothing is kept of them."""
    ids: Sequence[int]
    run_ats: Sequence[datetime]
    priorities: Sequence[int]
    attempts: Sequence[int]
    losses: Sequence[int]
    lanes: Sequence[str | None]
    traceparents: Sequence[str | None]
    versions: Sequence[int]
    payloads: Sequence[bytes]

    def as_work(self, queue: str, retries: int, start_before_s: float | None) -> Work:
        """What a slot is given of it."""
        return Work(
            queue=queue,
            lease_id=self.lease_id,
            ids=self.ids,
            payloads=self.payloads,
            attempts=self.attempts,
            losses=self.losses,
            lanes=self.lanes,
            traceparents=self.traceparents,
            versions=self.versions,
            retries=retries,
            start_before_s=start_before_s,
        )


@dataclass(frozen=True, slots=True)
class Claims:
    """What a claim brought: leases, the most urgent first, or none; and how the acks it carried fared."""

    leases: list[Claim]
    claimed_at: datetime
    retries: int
    """Of the queue, as declared or as a person set it."""
    moved: int = 0
    """Due jobs met on the way that went to their lanes."""
    limiter: str | None = None
    slack_s: float | None = None
    """Jobs of lanes must start within this from the moment the claim was sent."""
    wait_s: float | None = None
    """After an empty claim of lanes: when to look again; None: at the next enqueue."""
    lost: Sequence[int] = ()
    busy: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Fared:
    """Which leases of a settlement were gone, and which somebody's transaction holds."""

    lost: Sequence[int] = ()
    busy: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """Which queues have work that is due, and when the next of what is known will be."""

    ready: frozenset[int]
    """Queues with due jobs that are in no lane."""
    laned: frozenset[int]
    """Queues with lanes that may give a job now."""
    next_s: float | None
    """Seconds until the next becomes due; None: nothing is known to."""

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
    """Ack the leases `done`, then lease due jobs past the scan `marks`, one (run_at, id) a priority."""
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
    return _claims(rows, moved=rows[0]["moved"])


async def claim_lanes(
    runner: Runner,
    host_id: int,
    queue_id: int,
    *,
    leases_max: int,
    batch: int,
    config: JobsConfig,
    done: Iterable[int] = (),
) -> Claims:
    """Ack the leases `done`, then lease jobs of lanes within their limits."""
    rows: list[Any] = await runner.all(
        SQL.claim_lanes,
        host=host_id,
        queue=queue_id,
        leases_max=leases_max,
        batch=batch,
        lanes_max=min(config.lanes_per_claim, leases_max * batch),
        # Small claims take small turns, so that lanes alternate; shares are the same either way.
        quantum=min(config.lane_quantum, leases_max * batch),
        done=list(done),
    )
    first = rows[0]
    has_leases = first["lease_id"] is not None
    return _claims(
        rows,
        limiter=first["limiter"],
        wait_s=first["wait_s"],
        slack_s=first["slack_s"] if has_leases else None,
    )


def _claims(rows: list[Row], **rest: Any) -> Claims:
    first = rows[0]
    leases = [
        Claim(
            lease_id=row["lease_id"],
            is_plain=row["is_plain"],
            ids=row["ids"],
            run_ats=row["run_ats"],
            priorities=row["priorities"],
            attempts=row["attempts"],
            losses=row["losses"],
            lanes=row["lanes"],
            traceparents=row["traceparents"],
            versions=row["versions"],
            payloads=row["payloads"],
        )
        for row in rows
        if row["lease_id"] is not None
    ]
    if len(leases) > 1:
        leases.sort(key=lambda lease: (lease.priorities[0], lease.run_ats[0], lease.ids[0]))
    return Claims(
        leases=leases,
        claimed_at=first["claimed_at"],
        retries=first["retries"] or 0,
        lost=first["lost"] or (),
        busy=first["busy"] or (),
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
) -> Fared:
    """Settle `jobs`, by lease and id, and of the leases `whole` all that is left, by one `word`.

    One statement. Settling a job again changes nothing.
    """
    said = [(lease, job, one) for lease, some in (jobs or {}).items() for job, one in some.items()]
    row: Any = await runner.one(
        SQL.settle,
        whole=list(whole),
        word=word,
        leases=[lease for lease, _, _ in said],
        ids=[job for _, job, _ in said],
        words=[one.kind for _, _, one in said],
        delays_s=[one.after_s for _, _, one in said],
        errors=[bounded_text(one.error, ERROR_CHARACTERS_MAX) for _, _, one in said],
        tracebacks=[bounded_text(one.traceback, TRACEBACK_CHARACTERS_MAX) for _, _, one in said],
        results=[one.result for _, _, one in said],
        queues=[one.queue for _, _, one in said],
        losses_max=losses_max,
        progressed=list(progressed),
    )
    return Fared() if row is None else Fared(row["lost"] or (), row["busy"] or ())


async def is_lease_held(tx: Runner, lease_id: int) -> bool:
    """Hold the lease row until the transaction ends, if it is there."""
    return await tx.value(SQL.lock_lease, lease=lease_id) is not None


async def held_leases(tx: Runner, lease_ids: Iterable[int]) -> set[int]:
    """Hold those of the lease rows that are there until the transaction ends; their ids."""
    return {row["id"] for row in await tx.all(SQL.lock_leases, leases=sorted(set(lease_ids)))}


async def leases_of_host(runner: Runner, host_id: int) -> set[int]:
    """Ids of the leases that the host has."""
    return {row["id"] for row in await runner.all(SQL.leases_of_host, host=host_id)}


async def expired_leases(runner: Runner, *, leases_max: int) -> list[int]:
    """Leases of hosts that expired or are gone, but for those that a transaction holds."""
    return [row["id"] for row in await runner.all(SQL.expired_leases, leases_max=leases_max)]


async def end_stuck_claims(runner: Runner, *, lease_s: float) -> int:
    """End claims that nobody has read for `lease_s`; how many. Their jobs wait again at once.

    An answer over a socket's buffer (200 KiB) is sent before its transaction commits, and no time limit of the
    server's ends a statement that waits for its client.
    """
    return int(await runner.value(SQL.end_stuck_claims, lease_s=lease_s))


async def return_lease(runner: Runner, lease_id: int, losses_max: int) -> int:
    """Return a dead host's lease; how many jobs went back (or into quarantine)."""
    return int(await runner.value(SQL.return_lease, lease=lease_id, losses_max=losses_max))


@dataclass(frozen=True, slots=True)
class TakenJobs:
    """What is left of a taker's lease."""

    host_id: int
    attempts: Mapping[int, int]
    """Failed runs so far, by job."""
    retries: int


async def taken_jobs(runner: Runner, lease_id: int) -> TakenJobs | None:
    """The jobs of a taker's lease, settled ones too; None: it is gone, or no taker's."""
    row = await runner.one(SQL.taken_jobs, lease=lease_id)
    if row is None:
        return None
    attempts = dict(zip(row["ids"], row["attempts"], strict=True))
    return TakenJobs(row["host"], attempts, row["retries"])


async def work_ahead(runner: Runner, queue_ids: Iterable[int]) -> WorkAhead:
    """Which of the queues have work now, and when the next will be due. Index probes alone."""
    row: Any = await runner.one(SQL.work_ahead, queues=list(queue_ids))
    return WorkAhead(frozenset(row["ready"] or ()), frozenset(row["laned"] or ()), row["wait_s"])
