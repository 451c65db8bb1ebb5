"""Runs the handlers of a slot: receives `Work`, sends `Ack`, needs no database connection.

A batch task has one call for all jobs of a lease. A call that raises is bisected, so that only a
job that fails alone spends an attempt. A task of single jobs has `concurrency` concurrent calls,
refilled as they end, so that one slow job delays no other. Their outcomes are reported together,
because one ack per job would be one commit per job. Every job that was given is settled exactly
once, also by `stop`, which lets calls end within the grace time and returns the other jobs.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from headrace.jobs.errors import LaneExhausted, PayloadNewer
from headrace.jobs.job_context import (
    Batch,
    JobContext,
    encode_result,
    job_context,
    running_job,
)
from headrace.jobs.messages import (
    Ack,
    CancelJob,
    Failure,
    FromSlot,
    Left,
    Outcome,
    Ready,
    Result,
    SpendAnswer,
    ToSlot,
    Work,
)
from headrace.jobs.model import JobsConfig
from headrace.jobs.outcomes import (
    DONE,
    RETURNED,
    UNSTARTED,
    outcome_of,
    readable_text,
)
from headrace.jobs.slots.agent_client import AgentClient
from headrace.jobs.slots.executor import (
    Bisect,
    CallResult,
    Executor,
    HandlerCall,
    LeaseRun,
    begin_span,
    end_span,
    run_start_hooks,
    run_stop_hooks,
)
from headrace.jobs.slots.status_board import StatusCell
from headrace.jobs.tasks import Registry, Task
from headrace.kernel import spans
from headrace.kernel.logs import logger

REPORT_AFTER_S: Final = 0.005
BEAT_S: Final = 1.0
ABANDON_AFTER_S: Final = 2.0
NEWER_CODE_AFTER_S: Final = 15.0
"""When a job that this code cannot decode is due again, for a host with newer code."""
LANE_WAIT_MAX_S: Final = 60.0
CANCELLED: Final = Outcome("cancel", None, "cancelled while it ran")
_log: Final = logger(__name__)


@dataclass(slots=True)
class _Backlog:
    """The jobs of one task that wait for a free call."""

    task: Task
    waiting: deque[tuple[LeaseRun, int]] = field(default_factory=deque)
    """Lease and index of the job; index -1 for the whole lease."""
    running: int = 0


class SlotRunner:
    """Runs the tasks of `registry` for one slot; `send` must neither wait nor raise."""

    def __init__(
        self,
        registry: Registry,
        *,
        send: Callable[[FromSlot], None],
        config: JobsConfig,
        status: StatusCell | None = None,
    ) -> None:
        self._registry = registry
        self._send = send
        self._config = config
        self._executor = Executor(registry, status)
        self.agent = AgentClient(send, registry.slack_s)
        self._backlogs: dict[str, _Backlog] = {}
        self._leases: set[LeaseRun] = set()
        self._unreported: set[LeaseRun] = set()
        self._report_timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._running: dict[int, tuple[JobContext[Any], asyncio.Task[Any] | None]] = {}
        """Single jobs whose calls run, and the tasks of async ones."""
        self._cancelled: set[int] = set()
        """Jobs that were cancelled while this slot had them."""

    @property
    def jobs_open(self) -> int:
        """Jobs that were given and have no outcome yet."""
        return sum(lease.open_count for lease in self._leases)

    async def start(self) -> None:
        """Run the start hooks, then send `Ready`. Raises: SlotHookFailed."""
        self.agent.bind(asyncio.get_running_loop())
        await run_start_hooks(self._registry.start_hooks, self._executor.threads)
        # After the fork, since exporters have threads, and after hooks that set a TracerProvider.
        spans.start("slot")
        self._beating = asyncio.create_task(self._beat())
        self._send(Ready(os.getpid()))

    def receive(self, message: ToSlot) -> None:
        """Handle a message of the agent. `Stop` is the process's: see `stop`."""
        match message:
            case Work():
                self.give(message)
            case CancelJob():
                self.cancel(message.job_id)
            case SpendAnswer() | Result() | Failure():
                self.agent.answer(message)

    def give(self, work: Work) -> None:
        """Accept the jobs of one lease; they start as calls become free."""
        backlog = self._backlog(work.queue)
        if backlog is None:
            self._refuse(work)
            return
        lease = LeaseRun(work, backlog.task, self._config.backoff)
        self._leases.add(lease)
        if backlog.task.batch:
            backlog.waiting.append((lease, -1))
        else:
            backlog.waiting.extend((lease, index) for index in range(len(work.ids)))
        if self._is_stopping:
            self._return_waiting(backlog)
        else:
            self._refill(backlog)

    def cancel(self, job_id: int) -> None:
        """Cancel a job: an async handler by CancelledError, a sync one by its context."""
        self._cancelled.add(job_id)
        job, task = self._running.get(job_id, (None, None))
        if job is not None:
            job.is_cancelled = True
        if task is not None:
            task.cancel("the job was cancelled")

    async def stop(self, grace_s: float) -> None:
        """Let calls end within `grace_s`, return other jobs, run the stop hooks, send `Left`."""
        self._is_stopping = True
        for backlog in self._backlogs.values():
            self._return_waiting(backlog)
        await self._wait_calls(grace_s)
        self._executor.is_aborting = True
        for call in list(self._executor.running):
            call.cancel("the slot stops")
        await self._wait_calls(ABANDON_AFTER_S)
        for lease in list(self._leases):
            # Their handlers swallow the cancellation and are abandoned.
            lease.note_all(range(len(lease.ids)), RETURNED)
            self._report_soon(lease)
        self._report_all()
        if self._beating is not None:
            self._beating.cancel()
        await run_stop_hooks(self._registry.stop_hooks, self._executor.threads)
        self._executor.threads.close()
        self._send(Left())

    async def wait_idle(self, wait_s: float) -> bool:
        """After `stop`: wait for abandoned handlers. Return False if one still runs."""
        return await self._executor.threads.wait_idle(wait_s) and not self._executor.running

    def _backlog(self, queue: str) -> _Backlog | None:
        backlog = self._backlogs.get(queue)
        if backlog is None and (task := self._registry.get(queue)) is not None:
            backlog = self._backlogs[queue] = _Backlog(task)
        return backlog

    def _refuse(self, work: Work) -> None:
        """Return jobs of a queue that this code does not declare."""
        _log.error("queue_unknown_to_slot", queue=work.queue, jobs=len(work.ids))
        later = Outcome("snooze", NEWER_CODE_AFTER_S)
        self._send(Ack(lease_id=work.lease_id, outcomes=dict.fromkeys(work.ids, later)))

    def _refill(self, backlog: _Backlog) -> None:
        limit = 0 if self._executor.is_overdue else backlog.task.concurrency
        while backlog.waiting and backlog.running < limit:
            lease, index = backlog.waiting.popleft()
            backlog.running += 1
            task = asyncio.create_task(self._run(lease, index))
            self._executor.running.add(task)
            task.add_done_callback(lambda ended: self._ended(backlog, ended))

    def _ended(self, backlog: _Backlog, task: asyncio.Task[None]) -> None:
        self._executor.running.discard(task)
        backlog.running -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("call_broke", queue=backlog.task.queue, error=repr(error))
        if not self._is_stopping:
            self._refill(backlog)

    async def _run(self, lease: LeaseRun, index: int) -> None:
        """Run a batch (index -1) or one job. An error around the handler is a failed attempt."""
        try:
            await (self._run_batch(lease) if index < 0 else self._run_single(lease, index))
        except BaseException as error:
            if self._executor.is_end_of_loop(error):
                raise
            is_aborted = isinstance(error, asyncio.CancelledError) and self._executor.is_aborting
            rest = RETURNED if is_aborted else outcome_of(error)
            if not is_aborted:
                _log.error("call_broke", queue=lease.task.queue, error=rest.error)
                rest = Outcome("retry", None, rest.error, rest.traceback)
            lease.note_all(range(len(lease.ids)) if index < 0 else (index,), rest)
        self._report_soon(lease)

    async def _run_single(self, lease: LeaseRun, index: int) -> None:
        """Call the handler with one job, unless the job cannot be decoded."""
        work, task = lease.work, lease.task
        indexes, payloads = self._decode(lease, lease.drop_expired((index,)))
        if not indexes:
            return
        job = job_context(work, index, payloads[0], self.agent)
        call = HandlerCall(
            task=task,
            jobs=(job,),
            attempt=job.attempt,
            job_id=job.id,
            is_last=job.attempt > lease.retries_of(job.id),
            timeout_s=lease.timeout_s((index,)),
            start_before_s=work.start_before_s,
        )
        if task.takes_fields:
            call.named = msgspec.structs.asdict(job.payload)
        else:
            call.arguments = (job if task.takes_job else job.payload,)
        if job.id in self._cancelled:
            self._cancelled.discard(job.id)
            lease.note(index, CANCELLED)
            return
        running_job.set(job)
        span = begin_span(work, (index,))
        self._running[job.id] = job, asyncio.current_task() if task.is_async else None
        try:
            end = await self._executor.call(call)
        finally:
            self._running.pop(job.id, None)
        lease.note_call(end.run_s)
        rest = end.rest
        if job.id in self._cancelled:
            self._cancelled.discard(job.id)
            rest = rest if rest is DONE else CANCELLED
        if task.keep_result and rest is DONE and (job.outcome is None or job.outcome is DONE):
            job.outcome = _outcome_with_result(end.value)
        outcome = rest if job.outcome is None or call.is_late else job.outcome
        lease.note(index, outcome)
        end_span(span, end, outcome)

    async def _run_batch(self, lease: LeaseRun) -> None:
        """Call the handler with all jobs; if it raises, bisect them."""
        indexes, payloads = self._decode(lease, lease.drop_expired(range(len(lease.ids))))
        end, unset = await self._call_batch(lease, indexes, payloads)
        if end is None or not end.is_fault or len(indexes) == 1:
            return
        self._report_soon(lease)
        await self._bisect(lease, unset, end)

    async def _bisect(self, lease: LeaseRun, indexes: Sequence[int], first: CallResult) -> None:
        """Run the jobs of a call that raised in halves, then singly.

        After the time of one call, and once one job was blamed, the other jobs are snoozed.
        """
        _log.warning(
            "batch_bisected", queue=lease.task.queue, jobs=len(indexes), error=first.rest.error
        )
        bisect = Bisect(())
        bisect.split(indexes)
        ends_s = time.monotonic() + lease.task.timeout_s
        is_one_blamed = False
        while (run := bisect.next_run()) is not None:
            if self._is_stopping:
                lease.note_all([*run, *bisect.give_up()], RETURNED)
                return
            if is_one_blamed and time.monotonic() > ends_s:
                later = Outcome("snooze", self._config.backoff.delay_s(1))
                lease.note_all([*run, *bisect.give_up()], later)
                return
            start_before_s = None
            if lease.work.start_before_s is not None:
                run, late, start_before_s = await self._take_tokens(lease, run)
                bisect.put_back(late)
            run, payloads = self._decode(lease, lease.drop_expired(run))
            end, unset = await self._call_batch(
                lease, run, payloads, is_again=True, start_before_s=start_before_s
            )
            if end is not None and end.is_fault:
                is_one_blamed = is_one_blamed or len(run) == 1
                if len(run) > 1:
                    bisect.split(unset)
            self._report_soon(lease)

    async def _call_batch(
        self,
        lease: LeaseRun,
        indexes: Sequence[int],
        payloads: Sequence[Any],
        *,
        is_again: bool = False,
        start_before_s: float | None = None,
    ) -> tuple[CallResult | None, Sequence[int]]:
        """Make one call and note the certain outcomes.

        Return its result, and the jobs whose outcome the handler did not set before it raised.
        """
        if not indexes:
            return None, ()
        work = lease.work
        batch: Batch[Any] = Batch(work, indexes, payloads, self.agent)
        call = HandlerCall(
            task=lease.task,
            jobs=batch,
            arguments=(batch,),
            attempt=work.attempts[indexes[0]] + 1,
            job_id=work.ids[indexes[0]] if len(indexes) == 1 else -1,
            timeout_s=lease.timeout_s(indexes),
            start_before_s=start_before_s if is_again else work.start_before_s,
            is_bisecting=is_again,
        )
        span = begin_span(work, indexes)
        end = await self._executor.call(call)
        end_span(span, end, end.rest)
        lease.note_call(end.run_s)
        outcomes = {} if call.is_late else batch.outcomes()
        is_whole = len(indexes) == len(work.ids)
        if end.rest is DONE and not outcomes and is_whole and not is_again:
            self._leases.discard(lease)
            self._send(lease.ack_all_done())
            return end, ()
        for index, outcome in outcomes.items():
            lease.note(index, outcome)
        unset = [index for index in indexes if index not in outcomes] if outcomes else indexes
        if not end.is_fault or len(indexes) == 1:
            # A late second start keeps the token of its first start, which did run.
            lease.note_all(unset, RETURNED if call.is_late and is_again else end.rest)
        return end, unset

    async def _take_tokens(
        self, lease: LeaseRun, run: Sequence[int]
    ) -> tuple[list[int], list[int], float]:
        """Take a token of its lane for a second start of each job of `run`.

        Return the jobs that may start now, the jobs that are too late, and the earliest deadline.
        While one lane was waited for, the deadline of another may have passed. The last lane is
        always in time, so fewer jobs are left with each call. Jobs whose lane allows no start fail
        an attempt.
        """
        work = lease.work
        by_lane: dict[str, list[int]] = {}
        for index in run:
            by_lane.setdefault(work.lanes[index] or "", []).append(index)
        allowed: dict[int, float] = {}
        for lane, indexes in by_lane.items():
            try:
                before_s = math.inf
                if lane:
                    before_s = await self.agent.spend(
                        work.queue, lane, len(indexes), LANE_WAIT_MAX_S
                    )
            except LaneExhausted as error:
                lease.note_all(indexes, Outcome("retry", None, error.text))
            else:
                allowed |= dict.fromkeys(indexes, before_s)
        now_s = time.monotonic()
        in_time = sorted(index for index, before_s in allowed.items() if now_s <= before_s)
        late = sorted(allowed.keys() - set(in_time))
        return in_time, late, min((allowed[index] for index in in_time), default=math.inf)

    def _decode(
        self, lease: LeaseRun, indexes: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[Any]]:
        """The jobs that can be decoded, and their payloads; the others get an outcome."""
        work, task = lease.work, lease.task
        if not task.takes_fields and not lease.has_old_payloads:
            # On an error the loop below finds the payload that does not fit.
            with suppress(Exception):
                whole = len(indexes) == len(work.ids)
                chosen = work.payloads if whole else [work.payloads[index] for index in indexes]
                return indexes, task.payloads.decode_all(chosen)
        good, payloads = [], []
        for index in indexes:
            try:
                payload = task.decode(work.payloads[index], work.versions[index])
            except PayloadNewer as error:
                lease.note(index, Outcome("snooze", NEWER_CODE_AFTER_S, error.text))
                _log.info("payload_newer", queue=work.queue, job_id=work.ids[index])
            except Exception as error:  # noqa: BLE001 - a payload's type may run code of its own
                lease.note(index, _undecodable(lease, index, error))
            else:
                good.append(index)
                payloads.append(payload)
        return good, payloads

    def _return_waiting(self, backlog: _Backlog) -> None:
        """Return the jobs that have not started, as if they had never been given."""
        while backlog.waiting:
            lease, index = backlog.waiting.popleft()
            is_laned = lease.work.start_before_s is not None
            indexes = range(len(lease.ids)) if index < 0 else (index,)
            lease.note_all(indexes, UNSTARTED if is_laned else RETURNED)
            self._report_soon(lease)

    def _report_soon(self, lease: LeaseRun) -> None:
        """Send the noted outcomes: at once if the lease is complete, else with others soon."""
        if lease.open_count == 0:
            self._leases.discard(lease)
            self._unreported.discard(lease)
            self._report(lease)
            return
        self._unreported.add(lease)
        if self._report_timer is None:
            loop = asyncio.get_running_loop()
            self._report_timer = loop.call_later(REPORT_AFTER_S, self._report_all)

    def _report_all(self) -> None:
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        unreported, self._unreported = self._unreported, set()
        for lease in unreported:
            self._report(lease)

    def _report(self, lease: LeaseRun) -> None:
        if (ack := lease.take_ack()) is not None:
            self._send(ack)

    async def _wait_calls(self, wait_s: float) -> None:
        """Wait until no call is in progress, at most `wait_s`."""
        ends_s = time.monotonic() + wait_s
        while self._executor.running and (left_s := ends_s - time.monotonic()) > 0:
            await asyncio.wait(self._executor.running, timeout=left_s)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._executor.beat()


def _undecodable(lease: LeaseRun, index: int, error: Exception) -> Outcome:
    """The outcome of a job whose payload its task cannot decode."""
    work = lease.work
    text = readable_text(error)
    # In this very version it will never fit; an upgrade, or a type's own code, may succeed later.
    is_same_version = work.versions[index] == lease.task.version
    is_final = is_same_version and isinstance(error, msgspec.DecodeError)
    if not is_final:  # The failure of the job is logged with the same text.
        _log.warning("payload_invalid", queue=work.queue, job_id=work.ids[index], error=text)
    fields = lease.task.fields_text
    expected = "" if fields is None else f"; its handler takes: {fields}"
    return Outcome(
        "fail" if is_final else "retry",
        None,
        f"the payload does not fit the task: {text}{expected}",
    )


def _outcome_with_result(value: Any) -> Outcome:
    """Done with the handler's return value; failed if it cannot be stored."""
    try:
        return Outcome("done", result=encode_result(value))
    except ValueError as error:
        return Outcome("fail", None, readable_text(error))
