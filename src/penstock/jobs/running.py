"""One queue in a worker: claim, call the handler, settle; as many calls at once as the task allows.

A task with `batch` makes one call a lease. A task without takes as many jobs as it has free calls under one
lease, and their outcomes are coalesced: an ack a job is a commit a job (115,000 -> 17-49,000 jobs/s).
For jobs of lanes the clock is read as the last thing before the handler: past the deadline they go back
unstarted, which keeps a lane's window strict whatever stopped this process since the claim was sent.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from penstock.jobs.handling import (
    DONE,
    RETURNED,
    UNSTARTED,
    Batch,
    JobInHand,
    Outcome,
    outcome_of,
    settled_outcome,
    told_text,
)
from penstock.jobs.leases import RECONNECT, Desk, Lease, Scan, require_not_cancelled
from penstock.jobs.model import jobs_run_seconds
from penstock.jobs.tasks import Task
from penstock.kernel.errors import PenstockError
from penstock.kernel.logs import logger
from penstock.kernel.trace import current_traceparent, next_hop

FLUSH_AFTER_S: Final = 0.02
JOBS_PER_CLAIM_MAX: Final = 1_000
AGAIN_AFTER_S: Final = 0.02
ABANDON_AFTER_S: Final = 2.0
_log: Final = logger(__name__)


class QueueRunner:
    """Works one queue for one host until it is told to stop, or cancelled because the host is lost."""

    def __init__(self, desk: Desk, task: Task, queue_id: int, poll: Callable[[], float]) -> None:
        self.task = task
        self.queue_id = queue_id
        self.jobs_run = 0
        self.on_lanes_freed: Callable[[], None] = self.hint
        self._desk = desk
        self._poll = poll
        self._scan = Scan()
        self._wake = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._flushes: set[asyncio.Task[None]] = set()
        self._lanes_due_s = 0.0
        self._is_fenced = False
        self._is_cutting = False
        self._lanes_first = task.limiter != task.queue

    @property
    def calls_running(self) -> int:
        """Handler calls under way."""
        return len(self._calls)

    def hint(self) -> None:
        """There may be work now."""
        self._lanes_due_s = 0.0
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Claim and run until `stop`, then let calls end within the grace time and return the rest."""
        try:
            failures = 0
            while not stop.is_set():
                require_not_cancelled()
                # Cleared before the claim: a hint that comes while it is under way must survive it.
                self._wake.clear()
                try:
                    wait_s = await self._fill()
                    failures = 0
                except PenstockError as error:
                    if not error.retryable:
                        raise
                    failures += 1
                    wait_s = RECONNECT.delay_s(failures)
                    _log.warning("claim_failed", queue=self.task.queue, error=error.text)
                    await asyncio.sleep(min(wait_s, 0.1))
                if wait_s > 0 and not stop.is_set():
                    await self._wait_wake(wait_s)
            await self._drain()
        finally:
            # Reached with calls where the host was lost, whose leases are not ours any more, and where
            # handlers outlived the grace time. A handler that swallows its cancellation is left behind.
            self._is_fenced = self._is_cutting = True
            left = self._calls | self._flushes
            for call in left:
                call.cancel("the host was lost")
            if left:
                await asyncio.wait(left, timeout=ABANDON_AFTER_S)

    async def _fill(self) -> float:
        """Claim once for the free calls and start them; seconds until it makes sense to look again."""
        free = self.task.concurrency - len(self._calls)
        if free <= 0:
            return self._poll()
        lease = await self._claim(self.task.batch or min(free, JOBS_PER_CLAIM_MAX))
        if lease is None:
            return max(0.0, min(self._poll(), self._lanes_due_s - time.monotonic()))
        self._start(lease)
        return 0.0

    async def _claim(self, jobs_max: int) -> Lease | None:
        """Jobs of lanes and jobs without, in turns; lanes are asked only when they may have some."""
        self._lanes_first = not self._lanes_first
        if self._lanes_first and (lease := await self._claim_lanes(jobs_max)):
            return lease
        claim = await self._desk.claim_ready(self.queue_id, self._scan, jobs_max=jobs_max)
        if claim.moved:
            self._lanes_due_s = 0.0
        if claim.lease_id is not None:
            return Lease(claim, None, len(claim.ids))
        return await self._claim_lanes(jobs_max)

    async def _claim_lanes(self, jobs_max: int) -> Lease | None:
        sent_s = time.monotonic()
        if sent_s < self._lanes_due_s:
            return None
        # Set before the claim, for a hint that comes meanwhile sets it back to now.
        self._lanes_due_s = sent_s + self._poll()
        claim = await self._desk.claim_lanes(self.queue_id, jobs_max=jobs_max)
        if claim.lease_id is not None and claim.slack_s is not None:
            self._lanes_due_s = 0.0
            return Lease(claim, sent_s + claim.slack_s, len(claim.ids))
        if claim.wait_s is not None:
            due_s = time.monotonic() + max(claim.wait_s, AGAIN_AFTER_S)
            self._lanes_due_s = min(self._lanes_due_s, due_s)
        return None

    def _start(self, lease: Lease) -> None:
        jobs = self._in_hand(lease)
        if self.task.batch:
            self._spawn(self._calls, self._run_batch(lease, jobs))
            return
        for job in jobs:
            self._spawn(self._calls, self._run_single(lease, job))

    def _in_hand(self, lease: Lease) -> list[JobInHand[Any]]:
        claim = lease.claim
        return [
            JobInHand(
                job_id,
                payload,
                lease_id=lease.id,
                attempt=attempt + 1,
                lane=lane,
                traceparent=traceparent,
            )
            for job_id, payload, attempt, lane, traceparent in zip(
                claim.ids,
                claim.payloads,
                claim.attempts,
                claim.lanes,
                claim.traceparents,
                strict=True,
            )
        ]

    async def _run_batch(self, lease: Lease, jobs: list[JobInHand[Any]]) -> None:
        try:
            good = [job for job in jobs if self._decode(job)]
            if lease.is_late:
                for job in jobs:
                    job.outcome = UNSTARTED
            elif good:
                await self._call(good, (Batch(good, lease.id),), {})
        except BaseException as error:  # noqa: BLE001 - else its jobs would stay leased for ever
            self._note_broken(jobs, error)
        lease.pending = {job.id: self._final(job) for job in jobs}
        await self._flush(lease)

    async def _run_single(self, lease: Lease, job: JobInHand[Any]) -> None:
        try:
            await self._work(lease, job)
        except BaseException as error:  # noqa: BLE001 - else its jobs would stay leased for ever
            self._note_broken([job], error)
        lease.pending[job.id] = self._final(job)
        lease.open_count -= 1
        if lease.open_count == 0:
            await self._flush(lease)
        elif not lease.is_flush_planned:
            lease.is_flush_planned = True
            self._spawn(self._flushes, self._flush_later(lease))

    async def _work(self, lease: Lease, job: JobInHand[Any]) -> None:
        """Call the handler with one job, unless it may not start."""
        is_good = self._decode(job)
        if lease.is_late:
            job.outcome = UNSTARTED
        elif is_good and self.task.takes_fields:
            fields = job.payload.__struct_fields__
            arguments = {name: getattr(job.payload, name) for name in fields}
            await self._call([job], (), arguments)
        elif is_good:
            await self._call([job], (job if self.task.takes_job else job.payload,), {})

    def _note_broken(self, jobs: Sequence[JobInHand[Any]], error: BaseException) -> None:
        """The last net: a fault around the handler is a failed attempt, and no job stays in hand.

        Raises: `error` where it is the end of this call, by the worker or by the event loop.
        """
        if isinstance(error, asyncio.CancelledError) and self._is_cutting:
            raise error
        if isinstance(error, GeneratorExit) and _running_task() not in self._calls:
            raise error
        rest = outcome_of(error)
        _log.error("call_broke", queue=self.task.queue, jobs=len(jobs), error=rest.error)
        for job in jobs:
            job.outcome = job.outcome or replace(rest, word="retry")

    async def _call(
        self, jobs: Sequence[JobInHand[Any]], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Call the handler; afterwards each of `jobs` has its outcome, whatever happened."""
        current_traceparent.set(next_hop(jobs[0].traceparent))
        began_s = time.monotonic()
        limit = asyncio.timeout(self.task.timeout_s)
        rest = DONE
        try:
            async with limit:
                if self.task.is_async:
                    await self.task.handler(*arguments, **named)
                else:
                    await _run_in_thread(self.task.handler, arguments, named)
        except asyncio.CancelledError:
            cancelled_itself = Outcome("retry", None, "the handler cancelled itself")
            rest = RETURNED if self._is_cutting else cancelled_itself
        # Also SystemExit, which would end the event loop if it left this task.
        except BaseException as error:
            if isinstance(error, GeneratorExit) and _running_task() not in self._calls:
                raise
            rest = outcome_of(error)
            if limit.expired():
                text = f"it ran over its timeout of {self.task.timeout_s:g} s"
                rest = Outcome("retry", None, text)
            # Retry, Snooze and Fail are words of the handler, not faults; a fault has a traceback.
            self._log_raised(jobs, rest, is_fault=limit.expired() or bool(rest.traceback))
        if not self._is_fenced:
            await _go_on_after_cancellation()
        jobs_run_seconds.observe(time.monotonic() - began_s)
        self.jobs_run += len(jobs)
        for job in jobs:
            job.outcome = job.outcome or rest

    def _log_raised(self, jobs: Sequence[JobInHand[Any]], rest: Outcome, *, is_fault: bool) -> None:
        say = _log.warning if is_fault else _log.info
        say(
            "handler_raised",
            queue=self.task.queue,
            job_id=jobs[0].id,
            jobs=len(jobs),
            attempt=jobs[0].attempt,
            error=rest.error,
            traceback=rest.traceback,
        )

    def _decode(self, job: JobInHand[Any]) -> bool:
        """Decode the payload in place; one that does not fit goes to retry, for newer code may know it."""
        try:
            job.payload = self.task.decode(job.payload)
        except Exception as error:  # noqa: BLE001 - a payload's type may run code of its own
            told = told_text(error)
            job.outcome = Outcome("retry", None, f"the payload does not fit the task: {told}")
            _log.warning("payload_not_understood", queue=self.task.queue, job_id=job.id, error=told)
            return False
        return True

    def _final(self, job: JobInHand[Any]) -> Outcome:
        outcome = job.outcome
        if not isinstance(outcome, Outcome):
            outcome = Outcome("retry", None, "its call ended without an outcome")
        final = settled_outcome(
            outcome,
            attempt=job.attempt,
            retries=self.task.retries,
            backoff=self._desk.config.backoff,
        )
        if final.word == "fail":
            _log.warning(
                "job_failed",
                queue=self.task.queue,
                job_id=job.id,
                attempt=job.attempt,
                error=final.error,
            )
        return final

    async def _flush_later(self, lease: Lease) -> None:
        await asyncio.sleep(FLUSH_AFTER_S)
        lease.is_flush_planned = False
        await self._flush(lease)

    async def _flush(self, lease: Lease) -> None:
        outcomes, lease.pending = lease.pending, {}
        if outcomes:
            is_whole = len(outcomes) == len(lease.claim.ids)
            is_done = is_whole and all(outcome is DONE for outcome in outcomes.values())
            await self._settle(lease, DONE if is_done else outcomes, len(outcomes))

    async def _settle(
        self, lease: Lease, outcomes: dict[int, Outcome] | Outcome, jobs: int
    ) -> None:
        """Record outcomes, unless this host was lost: then another has the jobs."""
        if self._is_fenced:
            return
        try:
            await self._desk.settle(lease.id, outcomes, jobs)
        except Exception as error:
            if isinstance(outcomes, Outcome):
                raise
            await self._desk.settle(lease.id, self._unrecorded(lease, outcomes, error), jobs)
        finally:
            lease.unsettled_count -= jobs
            if lease.unsettled_count == 0:
                self._desk.forget(lease.id)
        if lease.start_before_s is not None:
            self.on_lanes_freed()

    def _unrecorded(
        self, lease: Lease, outcomes: dict[int, Outcome], error: Exception
    ) -> dict[int, Outcome]:
        """A retry in place of each of `outcomes`, which the database refused."""
        told = outcome_of(error).error
        _log.error("outcomes_refused", queue=self.task.queue, jobs=len(outcomes), error=told)
        rest = Outcome("retry", None, f"what became of it could not be recorded: {told}")
        return {
            job_id: settled_outcome(
                rest,
                attempt=attempt + 1,
                retries=self.task.retries,
                backoff=self._desk.config.backoff,
            )
            for job_id, attempt in zip(lease.claim.ids, lease.claim.attempts, strict=True)
            if job_id in outcomes
        }

    def _spawn(self, group: set[asyncio.Task[None]], work: Any) -> None:
        task = asyncio.create_task(work)
        group.add(task)
        task.add_done_callback(lambda ended: self._ended(group, ended))

    def _ended(self, group: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        group.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("call_broke", queue=self.task.queue, error=repr(error))

    async def _wait_wake(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _drain(self) -> None:
        """Let calls end within the grace time; cancel and return what has not ended by then."""
        ends_s = time.monotonic() + self._desk.config.grace_s
        while self._calls or self._flushes:
            left_s = ends_s - time.monotonic()
            _, late = await asyncio.wait(self._calls | self._flushes, timeout=max(0.0, left_s))
            if late:
                break
        self._is_cutting = True
        for call in list(self._calls):
            call.cancel("the worker stops")
        if self._calls or self._flushes:
            await asyncio.wait(self._calls | self._flushes, timeout=2)


def _running_task() -> asyncio.Task[Any] | None:
    """The task that runs; None where a coroutine is closed after its event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def _go_on_after_cancellation() -> None:
    """Take a cancellation as answered: what the handler left is still to be settled."""
    task = asyncio.current_task()
    if task is None or task.cancelling() == 0:
        return
    while task.cancelling() > 0:
        task.uncancel()
    # A handler that cancelled itself and awaited nothing more left it for the next await.
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def _run_in_thread(
    handler: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Run sync code in a daemon thread of its own.

    Not in an executor: a handler past its timeout cannot be ended, and would hold a place in the pool
    and the process's exit.
    """
    loop = asyncio.get_running_loop()
    # Errors are carried as values: a future refuses StopIteration, and one that raises GeneratorExit
    # closes the coroutines that wait for it.
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(handler, *arguments, **named)
        except BaseException as raised:  # noqa: BLE001 - carried to the awaiting side
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, name="penstock-handler", daemon=True).start()
    result, error = await answer
    if error is not None:
        raise error
    return result
