"""The verbs of jobs: enqueue alone, in bulk, in groups and in a caller's transaction; look, steer, sweep.

Every enqueue is one round trip whatever it carries. With `tx`, a connection of any common driver (see
`headrace.engines.caller_transaction`), it is part of the caller's transaction and is seen by workers when that
commits, or never.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Postgres, Runner
from headrace.jobs import store
from headrace.jobs.errors import (
    BatchTooLarge,
    GroupClosed,
    InvalidJob,
    LeaseLost,
)
from headrace.jobs.fitting import require_fit
from headrace.jobs.fleet.facts import QueueMinute
from headrace.jobs.hints import Hints
from headrace.jobs.intake import (
    Rows,
    prepare_groups,
    prepare_jobs,
)
from headrace.jobs.model import (
    JOBS_PER_CALL_MAX,
    BulkDone,
    Job,
    JobFilter,
    JobPage,
    JobsConfig,
    Lane,
    NewGroup,
    NewJob,
    QueueSettings,
    QueueStatus,
    Sweep,
    Why,
    jobs_enqueued,
)
from headrace.jobs.service.crons import Crons
from headrace.jobs.service.fleet import Fleet
from headrace.jobs.service.groups import Group, open_group
from headrace.jobs.service.lanes import Lanes
from headrace.jobs.service.minutes import queue_minutes
from headrace.jobs.service.queues import Queues
from headrace.jobs.service.results import wait_result
from headrace.jobs.service.steering import Steering
from headrace.jobs.service.sweeping import Sweeping
from headrace.jobs.service.takes import Takes
from headrace.jobs.tasks import Registry
from headrace.kernel.logs import child_traceparent, current_traceparent

ROWS_PER_STATEMENT: Final = 5_000


class Jobs:
    """The queue as its users see it. Cheap to make; opens nothing by itself."""

    def __init__(self, postgres: Postgres, config: JobsConfig, registry: Registry) -> None:
        self.registry = registry
        self.config = config
        self._postgres = postgres
        self._hints = Hints(postgres)
        self._queues = Queues(postgres, registry)

    async def close(self) -> None:
        """Let hints that are on their way go out."""
        await self._hints.close()

    async def enqueue(self, job: NewJob, *, tx: Transaction | None = None) -> int:
        """Enqueue one job; return its id, or the id of the unfinished job that has its unique key.

        Raises: InvalidJob, PayloadTooLarge, QueueUnknown.
        """
        return (await self.enqueue_many([job], tx=tx))[0]

    async def enqueue_many(
        self,
        jobs: Sequence[NewJob],
        *,
        tx: Transaction | None = None,
        group: Group | None = None,
    ) -> list[int]:
        """Enqueue up to 10,000 jobs in one round trip, all or none; return their ids in order.

        With `group`, an open one, they are its members.
        Raises: InvalidJob, PayloadTooLarge, BatchTooLarge, QueueUnknown, GroupClosed.
        """
        rows = prepare_jobs(jobs)
        require_fit(rows, self.registry)
        lent = _borrowed(tx)
        if not rows.queues:
            return []
        if group is None:
            return await self._insert(rows, tx=lent)
        if not isinstance(group, Group):
            raise InvalidJob(
                f"group: expected what `async with jobs.group(...)` gives, got a {type(group).__name__}"
            )
        group.require_open()
        return await self._insert(rows, tx=lent, group_ids=[group.id] * len(rows), is_counted=True)

    async def enqueue_groups(
        self, groups: Sequence[NewGroup], *, tx: Transaction | None = None
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
        require_fit(callbacks, self.registry, has_group=True)
        require_fit(members, self.registry)
        lent = _borrowed(tx)
        callback_queues = await self._queues.ids(callbacks)
        await self._queues.ids(members)
        traceparent = child_traceparent(current_traceparent.get())
        pending = [len(group.members) for group in groups]
        is_keyed = any(key is not None for key in members.keys)
        async with self._within(lent) as inner:
            # With keys it is known only afterwards who is a member: those groups are open until then.
            ids = await store.backlog.add_groups(
                inner,
                [1] * len(groups) if is_keyed else pending,
                callbacks,
                queue_ids=callback_queues,
                traceparent=traceparent,
            )
            of_member = [
                group_id for group_id, count in zip(ids, pending, strict=True) for _ in range(count)
            ]
            for start, chunk in _chunks(members):
                group_ids = of_member[start : start + len(chunk)]
                await self._insert(chunk, tx=inner, group_ids=group_ids, is_counted=is_keyed)
            if is_keyed:
                await store.groups.seal_groups(inner, ids)
        return ids

    @asynccontextmanager
    async def group(
        self, *, on_done: NewJob, tx: Transaction | None = None
    ) -> AsyncIterator[Group]:
        """`async with jobs.group(on_done=...) as group:` enqueue members with `group=group`, then the callback.

        `on_done` is enqueued exactly once, when the block has ended and every member is final. A block that
        raises leaves no callback; members that were enqueued run on alone.
        Raises: InvalidJob, PayloadTooLarge, QueueUnknown.
        """
        callback, _ = prepare_groups([NewGroup(members=[], on_done=on_done)])
        require_fit(callback, self.registry, has_group=True)
        queue_ids = await self._queues.ids(callback)
        runner = _borrowed(tx) or self._postgres
        traceparent = child_traceparent(current_traceparent.get())
        async with open_group(runner, callback, queue_ids, traceparent) as group:
            yield group

    async def result(
        self, job_id: int, *, timeout_s: float | None = None, keeps_result: bool = True
    ) -> Any:
        """What the job's handler returned, waiting for it up to `timeout_s`.

        Raises: JobFailed, ResultGone, NoResultKept, ResultLate (a TimeoutError), JobUnknown.
        """
        return await wait_result(
            self._postgres, self.job, job_id, timeout_s=timeout_s, keeps_result=keeps_result
        )

    async def set_lane(
        self,
        limiter: str,
        lane: str,
        *,
        starts_max: int | None,
        window_s: float | None,
        concurrency: int | None,
        paused: bool | None = False,
        weight: int | None = 1,
        tx: Transaction | None = None,
    ) -> None:
        """Set a lane's limits, live: at most `starts_max` starts in any `window_s`, `concurrency` at once.

        None means no limit; as `paused` or `weight`: as it is. With `tx` the lane stands still until that ends: commit soon.
        Raises: InvalidJob.
        """
        await self.lanes.set(
            limiter,
            lane,
            starts_max=starts_max,
            window_s=window_s,
            concurrency=concurrency,
            paused=paused,
            weight=weight,
            tx=tx,
        )

    async def get_lane(self, limiter: str, lane: str) -> Lane:
        """A lane's limits and what it is doing. Raises: LaneUnknown."""
        return await self.lanes.get(limiter, lane)

    async def job(self, job_id: int) -> Job:
        """The job in any state; `gone` where it ended and was not kept. Raises: JobUnknown."""
        return await self._steering.job(job_id)

    async def why(self, job_id: int) -> Why:
        """Why the job is where it is. Raises: JobUnknown."""
        return await self._steering.why(job_id)

    async def find(
        self,
        *,
        queue: str | None = None,
        state: str | None = None,
        lane: str | None = None,
        q: str | None = None,
        before: int | None = None,
        jobs_max: int = 100,
    ) -> JobPage:
        """A page of up to `jobs_max` jobs, 1,000 at most, in whatever state, newest id first, those below `before`.

        `q` is looked for in the errors of those that ended. A page may be short where the search was cut off.
        Raises: InvalidFilter, QueueUnknown.
        """
        wanted = JobFilter(queue=queue, state=state, lane=lane, q=q)
        return await self._steering.find(wanted, before=before, jobs_max=jobs_max)

    async def cancel(self, job_id: int, *, tx: Transaction | None = None) -> None:
        """Cancel a job that waits, in the caller's transaction if `tx` is given.

        Until that ends the job can be neither claimed nor changed: commit soon.
        Raises: JobUnknown, JobNotWaiting.
        """
        await self._steering.cancel(job_id, tx=_borrowed(tx))

    async def retry(self, job_id: int, *, tx: Transaction | None = None) -> None:
        """Give a failed, cancelled or quarantined job another life with all its retries.

        Raises: JobUnknown, JobNotEnded, KeyTaken.
        """
        await self._steering.retry(job_id, tx=_borrowed(tx))

    async def delete(self, job_id: int, *, tx: Transaction | None = None) -> None:
        """Remove a job for good that waits or ended; its group counts a waiting one as cancelled.

        Raises: JobUnknown, JobNotWaiting where it is leased or gone.
        """
        await self._steering.delete(job_id, tx=_borrowed(tx))

    async def bulk(
        self, action: str, wanted: JobFilter, *, dry_run: bool = False, before: int | None = None
    ) -> BulkDone:
        """`retry`, `cancel` or `delete` jobs that fit, newest first, for some seconds; `dry_run` counts only.

        Where there is `more`, call again with `before` = its `next_before`. Jobs that the action cannot change,
        such as leased ones, do not fit; each transaction changes up to 1,000.
        Raises: InvalidFilter, QueueUnknown.
        """
        return await self._steering.bulk(action, wanted, dry_run=dry_run, before=before)

    async def queues(self) -> list[QueueStatus]:
        """Every queue with its backlog, by name; each count is exact up to 10,000."""
        return await self._queues.statuses()

    async def queue(self, name: str) -> QueueStatus:
        """One queue with its backlog, by name or alias; counts are exact up to 100,000. Raises: QueueUnknown."""
        return await self._queues.status(name)

    async def queue_settings(self, name: str) -> QueueSettings:
        """What holds for a queue, by name or alias. Raises: QueueUnknown."""
        return await self._queues.settings(name)

    async def set_queue(self, name: str, *, create: bool = False, **changes: Any) -> QueueSettings:
        """Set what a person wants of a queue, whatever its code declares; return what holds then.

        `paused`, and `importance`, `slots_min`, `slots_max`, `retries`: None is what the code declares.
        `create`: make a queue without code where none has the name.
        Raises: QueueUnknown, InvalidSetting.
        """
        if create:
            await self._queues.create(name)
        return await self._queues.change(name, changes)

    async def pause_queue(self, name: str) -> None:
        """Hand out no more of the queue's jobs; those in hand go on. Raises: QueueUnknown."""
        await self._queues.change(name, {"paused": True})

    async def resume_queue(self, name: str) -> None:
        """Hand out the queue's jobs again. Raises: QueueUnknown."""
        await self._queues.change(name, {"paused": False})

    async def sweep(self) -> Sweep:
        """One bounded step of tidying: return leases of dead hosts, move due lane jobs, forget.

        Any number of processes may sweep at once; each lease is its own short transaction.
        """
        return await self._sweeping.run_once()

    @cached_property
    def lanes(self) -> Lanes:
        """Limiters and their lanes."""
        return Lanes(self._postgres)

    @cached_property
    def takes(self) -> Takes:
        """Jobs for other languages and for people."""
        return Takes(self._postgres, self.config)

    @cached_property
    def _steering(self) -> Steering:
        return Steering(self._postgres)

    @cached_property
    def _sweeping(self) -> Sweeping:
        return Sweeping(self._postgres, self.config, self.lanes)

    @cached_property
    def crons(self) -> Crons:
        """The verbs of crons."""
        return Crons(self._postgres, self)

    @cached_property
    def fleet(self) -> Fleet:
        """The verbs of the fleet."""
        return Fleet(self._postgres, self.config)

    async def minutes(
        self, queue: str, *, from_at: datetime | None = None, to_at: datetime | None = None
    ) -> list[QueueMinute]:
        """What a queue did by minute, oldest first: in the last hour, or a span of up to two days.

        Minutes without work are left out. Raises: QueueUnknown, InvalidSpan.
        """
        return await queue_minutes(self._postgres, queue, from_at=from_at, to_at=to_at)

    async def lock_lease(self, tx: Transaction, lease_id: int) -> None:
        """Tie what `tx` writes to the lease: it commits only while the jobs are still ours.

        The lease cannot be returned or settled until `tx` ends: do it last, commit soon.
        Raises: LeaseLost.
        """
        if not await store.leases.is_lease_held(runner_for(tx), lease_id):
            raise LeaseLost(lease_id)

    async def lock_leases(self, tx: Transaction, lease_ids: Iterable[int]) -> set[int]:
        """`lock_lease` of several; the ids of those that are ours. Write nothing of the others."""
        return await store.leases.held_leases(runner_for(tx), lease_ids)

    async def declare_queues(self) -> dict[str, store.queues.QueueRow]:
        """Store the queues of the registry; return the rows of all known queues, by name and alias.

        Raises: LimiterFixed where a task moves a queue with lanes to another limiter.
        """
        return await self._queues.declare()

    async def _insert(
        self,
        rows: Rows,
        *,
        tx: Runner | None,
        group_ids: list[int] | None = None,
        is_counted: bool = False,
    ) -> list[int]:
        """Enqueue `rows`, as members of groups if given, which count them only now if `is_counted`."""
        queue_ids = await self._queues.ids(rows)
        runner = tx or self._postgres
        traceparent = child_traceparent(current_traceparent.get())
        # Inside a transaction PostgreSQL itself sends one hint a queue, and only if it commits.
        is_hinted = tx is not None or self._hints.is_due(set(queue_ids))
        ids: list[int] | None
        if group_ids is not None and is_counted:
            ids = await store.groups.add_members(
                runner, rows, queue_ids, group_ids, traceparent=traceparent, is_hinted=is_hinted
            )
            if ids is None:
                raise GroupClosed(group_ids[0])
        else:
            ids = await store.backlog.enqueue(
                runner,
                rows,
                queue_ids,
                group_ids=group_ids,
                traceparent=traceparent,
                is_hinted=is_hinted,
            )
        if not is_hinted:
            self._hints.tell_later(set(queue_ids))
        jobs_enqueued.inc(len(ids))
        return ids

    @asynccontextmanager
    async def _within(self, tx: Runner | None) -> AsyncIterator[Runner]:
        if tx is not None:
            yield tx
        else:
            async with self._postgres.transaction() as own:
                yield own


def _borrowed(tx: Transaction | None) -> Runner | None:
    """The caller's transaction as a runner, if one was given. Raises: ConnectionUnknown."""
    return None if tx is None else runner_for(tx)


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
                versions=rows.versions[cut],
            ),
        )
