"""`Jobs`: enqueue alone, in bulk, in groups and in a caller's transaction; look at jobs, end them.

    async with app.group(on_done=report.job(day="today")) as group:
        for shop in shops:
            await walk.enqueue(shop, group=group)

Every enqueue is one round trip whatever it carries. `tx` is a connection of any common driver (see
`headrace.engines.caller_transaction`); workers see the jobs when its transaction commits, or never.

An open group counts one member more than it has, so members may end before the block does. The end
of the block removes that one, and the last member enqueues the callback in the same transaction. A
block that raises, or whose process dies, leaves no callback; its members run on alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Postgres, Row, Runner
from headrace.jobs import store
from headrace.jobs.columns import JobColumns
from headrace.jobs.errors import (
    BatchTooLarge,
    GroupClosed,
    InvalidJob,
    JobFailed,
    JobNotEnded,
    JobUnknown,
    KeyTaken,
    LeaseLost,
    NoResultKept,
    ResultGone,
    ResultLate,
)
from headrace.jobs.explain import explain_wait
from headrace.jobs.handle import Group
from headrace.jobs.model import (
    JOBS_PER_CALL_MAX,
    BulkDone,
    Job,
    JobFilter,
    JobPage,
    JobsConfig,
    JobState,
    NewGroup,
    NewJob,
    Sweep,
    Why,
)
from headrace.jobs.service.bulk import AHEAD_MAX, CHANGEABLE, BulkActions, not_waiting
from headrace.jobs.service.crons import Crons
from headrace.jobs.service.fleet import Fleet, Sweeper
from headrace.jobs.service.inserts import AgentStatements, Inserts
from headrace.jobs.service.lanes import Lanes
from headrace.jobs.service.queues import Queues
from headrace.jobs.service.takes import Takes
from headrace.jobs.service.workflows import Workflows
from headrace.jobs.sql import SQL
from headrace.jobs.steps import JobResult
from headrace.jobs.tasks import Registry
from headrace.jobs.tasks.options import WORKFLOW_PREFIX
from headrace.jobs.validation import (
    not_a_job,
    prepare_change,
    prepare_groups,
    prepare_jobs,
    require_job_id,
    require_page,
)
from headrace.kernel import spans
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

ROWS_PER_STATEMENT: Final = 5_000
RESULT_FIRST_WAIT_S: Final = 0.02
RESULT_WAIT_S_MAX: Final = 0.5
STATE_CHECK_EVERY_S: Final = 5.0
"""How often a wait for a result checks that the job still exists."""
_log: Final = logger(__name__)


class Jobs:
    """Enqueue, find, retry and cancel jobs; `app.jobs`."""

    def __init__(self, postgres: Postgres, config: JobsConfig, registry: Registry) -> None:
        self.registry = registry
        self.config = config
        self.lanes = Lanes(postgres, self._declare)
        self.queues = Queues(postgres, registry, self.lanes)
        self.takes = Takes(postgres, config)
        self.fleet = Fleet(postgres, config)
        self.crons = Crons(postgres, registry, self.queues, self)
        self._bulk = BulkActions(postgres)
        self._sweeper = Sweeper(postgres, config, self.lanes)
        self._postgres = postgres
        self._inserts = Inserts(postgres)
        self.workflows = Workflows(
            postgres,
            config,
            registry=registry,
            queues=self.queues,
            inserts=self._inserts,
            jobs=self,
        )

    def use_agent(self, agent: AgentStatements) -> None:
        """Run statements through the agent of this slot."""
        self._postgres.remote = self._inserts.agent = agent

    async def close(self) -> None:
        """Send the notifications that are still pending."""
        await self._inserts.close()

    async def enqueue(self, job: NewJob, *others: Any, tx: Transaction | None = None) -> int:
        """Enqueue one job; return its id, or the id of the unfinished job that has its unique key.

        Raises: InvalidJob, PayloadTooLarge, QueueUnknown.
        """
        if others:
            raise not_a_job(job)
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
        rows = prepare_jobs(jobs, self.registry)
        lent = _borrowed(tx)
        if not rows.queues:
            return []
        if group is None:
            return await self._inserts.insert(rows, await self.queues.ids(rows), tx=lent)
        if not isinstance(group, Group):
            raise InvalidJob(
                "group: expected the value of `async with jobs.group(...)`, got a"
                f" {type(group).__name__}"
            )
        group.require_open()
        queue_ids = await self.queues.ids(rows)
        return await self._inserts.insert_members(
            rows, queue_ids, [group.id] * len(rows), tx=lent, is_counted=True
        )

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
        callbacks, members = prepare_groups(groups, self.registry)
        lent = _borrowed(tx)
        callback_queues = await self.queues.ids(callbacks)
        member_queues = await self.queues.ids(members)
        pending = [len(group.members) for group in groups]
        is_keyed = any(key is not None for key in members.keys)
        async with self._within(lent) as inner:
            # With keys the members are known only afterwards: those groups are open until then.
            with spans.producing(callbacks.queues) as traceparent:
                ids = await store.jobs.add_groups(
                    inner,
                    [1] * len(groups) if is_keyed else pending,
                    callbacks,
                    queue_ids=callback_queues,
                    headers=callbacks.headers(traceparent),
                )
            of_member = [
                group_id for group_id, count in zip(ids, pending, strict=True) for _ in range(count)
            ]
            for cut, chunk in _chunks(members):
                await self._inserts.insert_members(
                    chunk, member_queues[cut], of_member[cut], tx=inner, is_counted=is_keyed
                )
            if is_keyed:
                await inner.run(SQL.seal_groups, groups=ids)
        return ids

    @asynccontextmanager
    async def group(
        self, *, on_done: NewJob, keep_results: bool = False, tx: Transaction | None = None
    ) -> AsyncIterator[Group]:
        """Open a group for the block: jobs enqueued with `group=group` are its members.

        `on_done` is enqueued exactly once, after the block ended and every member is final. With
        `keep_results` it can read theirs: `jobs.group_results(group["id"])`.
        Raises: InvalidJob, PayloadTooLarge, QueueUnknown; GroupClosed after 7 days.
        """
        callback, _ = prepare_groups([NewGroup(members=[], on_done=on_done)], self.registry)
        queue_ids = await self.queues.ids(callback)
        runner = _borrowed(tx) or self._postgres
        with spans.producing(callback.queues) as traceparent:
            headers = callback.headers(traceparent)
            ids = await store.jobs.add_groups(
                runner, [1], callback, queue_ids=queue_ids, headers=headers
            )
        group = Group(ids[0])
        try:
            await runner.run(SQL.mark_group_open, group=group.id)
            if keep_results:
                await runner.run(SQL.keep_results, group=group.id)
            yield group
        except BaseException:
            group.is_open = False
            await _abandon_group(runner, group.id)
            raise
        group.is_open = False
        if not await runner.run(SQL.mark_group_closed, group=group.id):
            raise GroupClosed(group.id)
        await runner.run(SQL.seal_groups, groups=ids)

    async def group_results(
        self, group_id: int, *, after: int = 0, jobs_max: int = 1_000
    ) -> list[JobResult]:
        """How the members of a group with results ended, in order of their ids, over id `after`.

        Kept for `jobs.events_kept`. Raises: InvalidFilter.
        """
        require_page("jobs_max", jobs_max)
        return await store.workflows.group_results(
            self._postgres, group_id, after=after, jobs_max=jobs_max
        )

    async def result(
        self, job_id: int, *, timeout_s: float | None = None, keeps_result: bool = True
    ) -> Any:
        """Wait up to `timeout_s` for the job to end; return what its handler returned.

        The wait polls by primary key and holds no connection. Whether the job still exists costs
        more and is checked first, then every 5 s.
        Raises: JobFailed, ResultGone, NoResultKept, ResultLate (a TimeoutError), JobUnknown.
        """
        if not keeps_result:
            raise NoResultKept(job_id)
        require_job_id(job_id)
        began_s = checked_s = time.monotonic()
        wait_s = RESULT_FIRST_WAIT_S
        while True:
            ending = await self._postgres.one(SQL.find_ending, job=job_id)
            now_s = time.monotonic()
            is_check_due = checked_s == began_s or now_s - checked_s > STATE_CHECK_EVERY_S
            if ending is None and is_check_due:
                ending, checked_s = await self._ending_if_over(job_id), now_s
            if ending is not None:
                return _result_of(job_id, ending)
            if timeout_s is not None:
                wait_s = min(wait_s, began_s + timeout_s - now_s)
                if wait_s <= 0:
                    raise ResultLate(job_id, timeout_s)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, RESULT_WAIT_S_MAX)

    async def job(self, job_id: int, *, tx: Transaction | None = None) -> Job:
        """The job in any state; `gone` if it ended and was not kept. Raises: JobUnknown."""
        require_job_id(job_id)
        runner = _borrowed(tx) or self._postgres
        found = await store.jobs.find_job(runner, job_id)
        if found is not None:
            return found
        if job_id > await runner.value(SQL.newest_job):
            raise JobUnknown(job_id)
        return Job(id=job_id, state=JobState.GONE)

    async def why(self, job_id: int) -> Why:
        """Why the job is in its state. Raises: JobUnknown."""
        job = await self.job(job_id)
        facts, retries = None, 0
        if job.state is JobState.READY:
            facts = await self._postgres.one(SQL.why_waiting, job=job_id, count_max=AHEAD_MAX)
            if facts is None:
                job = await self.job(job_id)
        counts_runs = job.state is JobState.FAILED or (job.error is not None and not job.ended_at)
        if counts_runs and job.queue is not None:
            retries = await self._postgres.value(SQL.retries_of, queue=job.queue)
            retries = retries if job.retries is None else job.retries
        why = explain_wait(job, facts, ahead_max=AHEAD_MAX, retries=retries)
        if job.state is JobState.SCHEDULED and (job.queue or "").startswith(WORKFLOW_PREFIX):
            waits = await store.workflows.waiting_steps(self._postgres, job_id)
            if waits:
                why = msgspec.structs.replace(why, reason="workflow_waits", text="; ".join(waits))
        return why

    async def find(
        self,
        *,
        queue: str | None = None,
        state: str | None = None,
        lane: str | None = None,
        q: str | None = None,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
        cursor: int | None = None,
        jobs_max: int = 100,
    ) -> JobPage:
        """A page of up to `jobs_max` jobs, at most 1,000, newest first.

        The next page has `cursor` = `next_cursor`: ids below it. `q` searches the errors of ended
        jobs. `from_at` and `to_at` bound the time of the end, or of being due for unfinished jobs.
        A page may be short where the search was cut off.
        Raises: InvalidFilter, QueueUnknown.
        """
        job_filter = JobFilter(
            queue=queue, state=state, lane=lane, q=q, from_at=from_at, to_at=to_at
        )
        return await self._bulk.find(job_filter, cursor=cursor, jobs_max=jobs_max)

    async def cancel(
        self, job_id: int, *, running: bool = False, tx: Transaction | None = None
    ) -> bool:
        """Cancel a waiting job, inside `tx` if given; with `running` also one that runs.

        Return whether it is cancelled. False: it runs, and its end was requested.
        An async handler gets CancelledError, a sync one sees `JobContext.is_cancelled`. A job that
        does not end within `jobs.grace` is ended with its slot. Until `tx` ends a waiting job can
        be neither claimed nor changed: commit soon.
        Raises: JobUnknown, JobNotWaiting.
        """
        require_job_id(job_id)
        if running:
            ids = await store.workflows.cancel_tree(_borrowed(tx) or self._postgres, [job_id])
            if any(ids):
                return job_id in ids[0]
        if not await (_borrowed(tx) or self._postgres).value(SQL.end_waiting, ids=[job_id]):
            raise not_waiting(await self.job(job_id, tx=tx), "cancelled")
        return True

    async def edit(
        self,
        job_id: int,
        *,
        payload: Any = msgspec.UNSET,
        priority: int | None = None,
        at: datetime | None = None,
        after_s: float | None = None,
        tx: Transaction | None = None,
    ) -> None:
        """Change a waiting job, inside `tx` if given; what is left out stays.

        Raises: JobUnknown, JobNotWaiting, InvalidJob, PayloadTooLarge.
        """
        if payload is msgspec.UNSET and (priority, at, after_s) == (None, None, None):
            raise InvalidJob(
                "nothing was changed: name what to change: payload, priority, at, after"
            )
        job = await self.job(job_id, tx=tx)
        if job.state not in (JobState.READY, JobState.SCHEDULED) or job.queue is None:
            raise not_waiting(job, "changed")
        task = self.registry.find(job.queue)
        has_payload = payload is not msgspec.UNSET
        new = NewJob(
            queue=job.queue,
            payload=payload if has_payload else job.payload,
            version=1 if task is None else task.version,
            priority=5 if priority is None else priority,
            at=at,
            after_s=after_s,
        )
        row = prepare_change(new, self.registry if has_payload else None)
        is_edited = await (_borrowed(tx) or self._postgres).value(
            SQL.edit_waiting,
            job=job_id,
            payload=row.payloads[0] if has_payload else None,
            version=row.versions[0] if has_payload else None,
            priority=priority,
            run_at=row.run_ats[0],
            delay_s=row.delays_s[0],
        )
        if not is_edited:
            raise not_waiting(await self.job(job_id, tx=tx), "changed")

    async def retry(self, job_id: int, *, tx: Transaction | None = None) -> None:
        """Make a failed, cancelled or quarantined job ready again, with all its retries.

        Raises: JobUnknown, JobNotEnded, KeyTaken.
        """
        require_job_id(job_id)
        retried, taken = await store.jobs.retry_jobs(
            _borrowed(tx) or self._postgres, [job_id], CHANGEABLE["retry"]
        )
        if taken:
            raise KeyTaken(
                f"job {job_id}: another unfinished job has its unique key: let that one end first"
            )
        if not retried:
            job = await self.job(job_id, tx=tx)
            raise JobNotEnded(
                f"job {job_id} is {job.state.value}: only a failed, cancelled or quarantined job"
                " that is kept can be retried"
            )

    async def delete(self, job_id: int, *, tx: Transaction | None = None) -> None:
        """Delete a waiting or ended job. Its group counts a waiting one as cancelled.

        Raises: JobUnknown; JobNotWaiting if it is leased or gone.
        """
        require_job_id(job_id)
        runner = _borrowed(tx) or self._postgres
        if not await runner.value(SQL.delete_jobs, ids=[job_id], states=list(CHANGEABLE["delete"])):
            raise not_waiting(await self.job(job_id, tx=tx), "deleted")

    async def bulk(
        self,
        action: str,
        job_filter: JobFilter,
        *,
        dry_run: bool = False,
        cursor: int | None = None,
    ) -> BulkDone:
        """`retry`, `cancel` or `delete` matching jobs, newest first, for at most some seconds.

        `dry_run` only counts. If `more`, call again with `cursor` = `next_cursor`. Jobs that the
        action cannot change, such as leased ones, do not match.
        Raises: InvalidFilter, QueueUnknown.
        """
        return await self._bulk.apply(action, job_filter, dry_run=dry_run, cursor=cursor)

    async def sweep(self) -> Sweep:
        """Do one bounded step of maintenance. Any number of processes may sweep at once."""
        return await self._sweeper.run_once()

    async def lock_lease(self, tx: Transaction, lease_id: int) -> None:
        """Bind `tx` to the lease: it can commit only while the lease is held.

        The lease cannot be returned or settled until `tx` ends: call this last, commit soon.
        Raises: LeaseLost.
        """
        if not await store.leases.lock_leases(runner_for(tx), [lease_id], None):
            raise LeaseLost(lease_id)

    async def lock_leases(self, tx: Transaction, lease_ids: Iterable[int]) -> set[int]:
        """`lock_lease` for several in a `tx` without pauses of half a lease; return those held."""
        return await store.leases.lock_leases(runner_for(tx), lease_ids, self.config.lease_s / 2)

    async def _ending_if_over(self, job_id: int) -> Row | None:
        """None while the job is unfinished. Raises: ResultGone, JobUnknown."""
        job = await self.job(job_id)
        if job.state not in (JobState.DONE, JobState.GONE):
            return None
        # It may have ended between the two queries.
        ending = await self._postgres.one(SQL.find_ending, job=job_id)
        if ending is None:
            raise ResultGone(job_id)
        return ending

    async def _declare(self) -> None:
        await self.queues.declare()

    @asynccontextmanager
    async def _within(self, tx: Runner | None) -> AsyncIterator[Runner]:
        if tx is not None:
            yield tx
        else:
            async with self._postgres.transaction() as own:
                yield own


def _borrowed(tx: Transaction | None) -> Runner | None:
    """The caller's transaction as a runner, if given. Raises: ConnectionUnknown."""
    return None if tx is None else runner_for(tx)


async def _abandon_group(runner: Runner, group_id: int) -> None:
    """Delete the group. If that fails it stays open and never calls back, which is equivalent."""
    try:
        await runner.run(SQL.drop_group, group=group_id)
    except HeadraceError as error:
        _log.warning("group_not_deleted", group_id=group_id, error=error.text)


def _result_of(job_id: int, ending: Row) -> Any:
    if ending["state"] != JobState.DONE:
        raise JobFailed(job_id, ending["state"], ending["error"])
    return None if ending["result"] is None else msgspec.json.decode(ending["result"])


def _chunks(rows: JobColumns) -> Iterator[tuple[slice, JobColumns]]:
    """`rows` in pieces for one statement each, with their place in `rows`."""
    for start in range(0, len(rows), ROWS_PER_STATEMENT):
        cut = slice(start, start + ROWS_PER_STATEMENT)
        yield cut, rows.part(cut)
