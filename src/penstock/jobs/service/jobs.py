"""The verbs of jobs: enqueue alone, in bulk, in groups and in a caller's transaction; look, steer, sweep.

Every enqueue is one round trip whatever it carries. With `tx` it is part of the caller's transaction and is
seen by workers when that commits, or never.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from penstock.engines.postgres import ConstraintViolated, Postgres, Tx
from penstock.jobs import store
from penstock.jobs.errors import (
    BatchTooLarge,
    JobNotEnded,
    JobNotWaiting,
    JobUnknown,
    KeyTaken,
    LaneUnknown,
    LeaseLost,
    LimiterFixed,
    QueueUnknown,
)
from penstock.jobs.hints import Hints
from penstock.jobs.intake import (
    Rows,
    is_storable,
    prepare_groups,
    prepare_jobs,
    require_job_id,
    require_lane,
)
from penstock.jobs.model import (
    JOB_ID_LAST,
    JOBS_PER_CALL_MAX,
    Job,
    JobsConfig,
    JobState,
    Lane,
    NewGroup,
    NewJob,
    QueueStatus,
    Sweep,
    Why,
    jobs_enqueued,
)
from penstock.jobs.reasons import why_waits
from penstock.jobs.tasks import Registry
from penstock.kernel.limits import PAGE_ROWS_MAX
from penstock.kernel.trace import current_traceparent, next_hop

ROWS_PER_STATEMENT: Final = 5_000
LEASES_PER_SWEEP: Final = 100
JOBS_PER_SWEEP: Final = 5_000


class Jobs:
    """The queue as its users see it. Cheap to make; opens nothing by itself."""

    def __init__(self, postgres: Postgres, config: JobsConfig, registry: Registry) -> None:
        self.registry = registry
        self.config = config
        self._postgres = postgres
        self._hints = Hints(postgres)
        self._queues: dict[str, store.queues.QueueRow] = {}

    async def close(self) -> None:
        """Let hints that are on their way go out."""
        await self._hints.close()

    async def enqueue(self, job: NewJob, *, tx: Tx | None = None) -> int:
        """Enqueue one job; return its id, or the id of the unfinished job that has its unique key.

        Raises: InvalidJob, PayloadTooLarge, QueueUnknown.
        """
        return (await self.enqueue_many([job], tx=tx))[0]

    async def enqueue_many(self, jobs: Sequence[NewJob], *, tx: Tx | None = None) -> list[int]:
        """Enqueue up to 10,000 jobs in one round trip, all or none; return their ids in order.

        Raises: InvalidJob, PayloadTooLarge, BatchTooLarge, QueueUnknown.
        """
        rows = prepare_jobs(jobs)
        return await self._insert(rows, tx=tx) if rows.queues else []

    async def enqueue_groups(
        self, groups: Sequence[NewGroup], *, tx: Tx | None = None
    ) -> list[int]:
        """Enqueue groups, all or none; return their ids in order.

        Two round trips, and one more for each further 5,000 members.
        Raises: InvalidJob, PayloadTooLarge, BatchTooLarge, QueueUnknown.
        """
        if len(groups) > JOBS_PER_CALL_MAX:
            raise BatchTooLarge(
                f"{len(groups)} groups in one call: send at most {JOBS_PER_CALL_MAX} at a time"
            )
        callbacks, members = prepare_groups(groups)
        callback_queues = await self._queue_ids(callbacks.queues)
        await self._queue_ids(members.queues)
        traceparent = next_hop(current_traceparent.get())
        pending = [len(group.members) for group in groups]
        async with self._within(tx) as inner:
            ids = await store.backlog.add_groups(
                inner, pending, callbacks, queue_ids=callback_queues, traceparent=traceparent
            )
            of_member = [
                group_id for group_id, count in zip(ids, pending, strict=True) for _ in range(count)
            ]
            for start, chunk in _chunks(members):
                group_ids = of_member[start : start + len(chunk)]
                await self._insert(chunk, tx=inner, group_ids=group_ids)
        return ids

    async def set_lane(
        self,
        limiter: str,
        lane: str,
        *,
        starts_max: int | None,
        window_s: float | None,
        concurrency: int | None,
        paused: bool = False,
        weight: int = 1,
        tx: Tx | None = None,
    ) -> None:
        """Set a lane's limits, live: at most `starts_max` starts in any `window_s`, `concurrency` at once.

        None means no limit. With `tx` the lane stands still until that ends: commit soon.
        Raises: InvalidJob.
        """
        require_lane(
            limiter,
            lane,
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            weight=weight,
        )
        await store.lanes.set_lane(
            tx or self._postgres,
            limiter,
            lane,
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            is_paused=paused,
            weight=weight,
        )

    async def get_lane(self, limiter: str, lane: str) -> Lane:
        """A lane's limits and what it is doing. Raises: LaneUnknown."""
        found = None
        if is_storable(limiter) and is_storable(lane):
            found = await store.lanes.find_lane(self._postgres, limiter, lane)
        if found is None:
            raise LaneUnknown(limiter, lane)
        return found

    async def job(self, job_id: int) -> Job:
        """The job in any state; `gone` where it ended and was not kept. Raises: JobUnknown."""
        require_job_id(job_id)
        found = await store.lookup.find_job(self._postgres, job_id)
        if found is not None:
            return found
        if job_id > await store.lookup.newest_job_id(self._postgres):
            raise JobUnknown(job_id)
        # A job on the move between its places can be missed by a look at one after the other.
        return await store.lookup.find_job(self._postgres, job_id) or Job(
            id=job_id, state=JobState.GONE
        )

    async def why(self, job_id: int) -> Why:
        """Why the job is where it is. Raises: JobUnknown."""
        job = await self.job(job_id)
        facts = None
        if job.queue is not None and job.state is JobState.READY:
            facts = await store.lookup.why_waiting(self._postgres, job.queue, job.lane)
        return why_waits(job, facts)

    async def cancel(self, job_id: int) -> None:
        """Cancel a job that waits. Raises: JobUnknown, JobNotWaiting."""
        require_job_id(job_id)
        if not await store.steering.cancel_job(self._postgres, job_id):
            job = await self.job(job_id)
            raise JobNotWaiting(
                f"job {job_id} is {job.state.value}: only a job that is scheduled or ready can be"
                " cancelled"
            )

    async def retry(self, job_id: int) -> None:
        """Give a failed, cancelled or quarantined job another life with all its retries.

        Raises: JobUnknown, JobNotEnded, KeyTaken.
        """
        require_job_id(job_id)
        try:
            is_retried = await store.steering.retry_ended(self._postgres, job_id)
        except ConstraintViolated as error:
            raise KeyTaken(
                f"job {job_id}: another unfinished job has its unique key: let that one end first"
            ) from error
        if not is_retried:
            job = await self.job(job_id)
            raise JobNotEnded(
                f"job {job_id} is {job.state.value}: only a failed, cancelled or quarantined job"
                " that is kept can be retried"
            )

    async def ended(
        self,
        *,
        queue: str | None = None,
        state: str | None = None,
        before: int | None = None,
        jobs_max: int = 100,
    ) -> list[Job]:
        """Kept jobs that ended failed, cancelled or quarantined, newest id first, below `before`."""
        bounded = max(1, min(jobs_max, PAGE_ROWS_MAX))
        if queue is not None and not is_storable(queue):
            return []
        if before is not None:
            before = max(0, min(before, JOB_ID_LAST))
        return await store.lookup.ended_jobs(
            self._postgres, queue=queue, state=state, before=before, jobs_max=bounded
        )

    async def queues(self) -> list[QueueStatus]:
        """Every queue with its backlog, by name."""
        return await store.queues.queue_statuses(self._postgres)

    async def queue(self, name: str) -> QueueStatus:
        """One queue with its backlog. Raises: QueueUnknown."""
        found = await store.queues.queue_statuses(self._postgres, name) if is_storable(name) else []
        if not found:
            raise QueueUnknown(name)
        return found[0]

    async def pause_queue(self, name: str) -> None:
        """Hand out no more of the queue's jobs; those in hand go on. Raises: QueueUnknown."""
        await self._set_paused(name, is_paused=True)

    async def resume_queue(self, name: str) -> None:
        """Hand out the queue's jobs again. Raises: QueueUnknown."""
        await self._set_paused(name, is_paused=False)

    async def sweep(self) -> Sweep:
        """One bounded step of tidying: return leases of dead hosts, move due lane jobs, forget.

        Any number of processes may sweep at once; each lease is its own short transaction.
        """
        leases = await store.leases.expired_leases(self._postgres, leases_max=LEASES_PER_SWEEP)
        returned = [
            await store.leases.return_lease(self._postgres, lease_id, self.config.losses_max)
            for lease_id in leases
        ]
        moved = await store.backlog.move_due(self._postgres, jobs_max=JOBS_PER_SWEEP)
        dropped = await store.lookup.drop_failed(
            self._postgres, kept_s=self.config.failed_kept_s, jobs_max=JOBS_PER_SWEEP
        )
        hosts = await store.hosts.drop_hosts(self._postgres)
        leases_returned = sum(count > 0 for count in returned)
        return Sweep(
            leases_returned=leases_returned,
            jobs_returned=sum(returned),
            lane_jobs_moved=moved,
            failed_dropped=dropped,
            hosts_dropped=hosts,
            more=JOBS_PER_SWEEP in (moved, dropped) or leases_returned == LEASES_PER_SWEEP,
        )

    async def lock_lease(self, tx: Tx, lease_id: int) -> None:
        """Tie what `tx` writes to the lease: it commits only while the jobs are still ours.

        The lease cannot be returned or settled until `tx` ends: do it last, commit soon.
        Raises: LeaseLost.
        """
        if not await store.leases.is_lease_held(tx, lease_id):
            raise LeaseLost(lease_id)

    async def declare_queues(self) -> dict[str, store.queues.QueueRow]:
        """Store the queues of the registry's tasks; return the rows of all known queues by name.

        Raises: LimiterFixed where a task moves a queue with lanes to another limiter.
        """
        tasks = {task.queue: task.limiter for task in self.registry}
        await store.queues.declare_queues(self._postgres, list(tasks), list(tasks.values()))
        rows = {row.name: row for row in await store.queues.find_queues(self._postgres)}
        for name, limiter in tasks.items():
            row = rows[name]
            if row.limiter != limiter:
                if not await store.queues.change_limiter(self._postgres, row.id, limiter):
                    raise LimiterFixed(
                        f"queue {name!r} has jobs in lanes of limiter {row.limiter!r}: keep that"
                        f" limiter, or declare a new queue with limiter {limiter!r}"
                    )
                rows[name] = store.queues.QueueRow(row.id, name, limiter)
        self._queues = rows
        return rows

    async def _insert(
        self, rows: Rows, *, tx: Tx | None, group_ids: list[int] | None = None
    ) -> list[int]:
        queue_ids = await self._queue_ids(rows.queues)
        # Inside a transaction PostgreSQL itself sends one hint a queue, and only if it commits.
        is_hinted = tx is not None or self._hints.is_due(set(queue_ids))
        ids = await store.backlog.enqueue(
            tx or self._postgres,
            rows,
            queue_ids,
            group_ids=group_ids,
            traceparent=next_hop(current_traceparent.get()),
            is_hinted=is_hinted,
        )
        jobs_enqueued.inc(len(ids))
        return ids

    async def _queue_ids(self, names: Sequence[str]) -> list[int]:
        """Ids of queues by name, stored or declared. Raises: QueueUnknown."""
        if not self._queues.keys() >= set(names):
            # Committed on its own connection: a queue must not vanish with a caller's rollback.
            known = await self.declare_queues()
            for name in names:
                if name not in known:
                    raise QueueUnknown(str(name))
        return [self._queues[name].id for name in names]

    async def _set_paused(self, name: str, *, is_paused: bool) -> None:
        if not is_storable(name):
            raise QueueUnknown(name)
        if not await store.queues.set_paused(self._postgres, name, is_paused=is_paused):
            if self.registry.get(name) is None:
                raise QueueUnknown(name)
            await self.declare_queues()
            await store.queues.set_paused(self._postgres, name, is_paused=is_paused)

    @asynccontextmanager
    async def _within(self, tx: Tx | None) -> AsyncIterator[Tx]:
        if tx is not None:
            yield tx
        else:
            async with self._postgres.transaction() as own:
                yield own


def _chunks(rows: Rows) -> Iterator[tuple[int, Rows]]:
    """`rows` in pieces that one statement may carry, each with the index of its first row."""
    for start in range(0, len(rows), ROWS_PER_STATEMENT):
        cut = slice(start, start + ROWS_PER_STATEMENT)
        yield (
            start,
            Rows(
                queues=rows.queues[cut],
                priorities=rows.priorities[cut],
                run_ats=rows.run_ats[cut],
                delays_s=rows.delays_s[cut],
                lanes=rows.lanes[cut],
                keys=rows.keys[cut],
                payloads=rows.payloads[cut],
            ),
        )
