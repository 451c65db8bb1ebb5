"""What runs the handlers of a slot: takes `Work`, says `Settled`, knows no database.

A batch task has one call for all jobs of a lease; a call that raises is run again in halves (`halving.py`), so
that only a job that fails alone spends an attempt. A task of single jobs has `concurrency` calls at once,
refilled as they end, so that one slow job idles nobody; what became of them is said together, since an ack a
job is a commit a job (115,000 -> 17-49,000 jobs/s). Every job that was given is settled exactly once, also by
`stop`, which lets calls end within the grace time and hands back the rest.
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
from headrace.jobs.handling import (
    DONE,
    RETURNED,
    UNSTARTED,
    Outcome,
    outcome_of,
    told_text,
)
from headrace.jobs.inhand import Batch, encoded_result, job_of, running_job
from headrace.jobs.model import JobsConfig
from headrace.jobs.slots.acks import LeaseInSlot, returned_later
from headrace.jobs.slots.calls import CallEnd, Calls, HandlerCall
from headrace.jobs.slots.cell import Cell
from headrace.jobs.slots.halving import Halving
from headrace.jobs.slots.hooks import run_start_hooks, run_stop_hooks
from headrace.jobs.slots.messages import FromSlot, Left, Ready, SpendAnswer, Work
from headrace.jobs.slots.reach import SlotReach
from headrace.jobs.tasks import Registry, Task
from headrace.jobs.tasks.payloads import fields_of
from headrace.kernel.logs import child_traceparent, current_traceparent, logger

SAY_AFTER_S: Final = 0.005
BEAT_S: Final = 1.0
ABANDON_AFTER_S: Final = 2.0
NEWER_CODE_AFTER_S: Final = 15.0
"""When a job that this code cannot read is offered again, to whoever can."""
LANE_WAIT_MAX_S: Final = 60.0
_log: Final = logger(__name__)


@dataclass(slots=True)
class _Line:
    """The jobs of one task: what waits for a free call and how many calls there are."""

    task: Task
    waiting: deque[tuple[LeaseInSlot, int]] = field(default_factory=deque)
    running: int = 0


class SlotRunner:
    """Runs the tasks of `registry` for one slot; `say` must neither wait nor raise."""

    def __init__(
        self,
        registry: Registry,
        *,
        say: Callable[[FromSlot], None],
        config: JobsConfig,
        board: Cell | None = None,
    ) -> None:
        self._registry = registry
        self._say = say
        self._config = config
        self._calls = Calls(registry, board)
        self._reach = SlotReach(say, registry.slack_s)
        self._lines: dict[str, _Line] = {}
        self._leases: set[LeaseInSlot] = set()
        self._unsaid: set[LeaseInSlot] = set()
        self._saying: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def jobs_open(self) -> int:
        """Jobs that were given and of which nothing was noted yet."""
        return sum(lease.open_count for lease in self._leases)

    @property
    def calls_running(self) -> int:
        """Handler calls under way."""
        return sum(line.running for line in self._lines.values())

    async def start(self) -> None:
        """Run the start hooks, then say `Ready`. Raises: SlotHookFailed."""
        self._reach.bind(asyncio.get_running_loop())
        await run_start_hooks(self._registry.start_hooks, self._calls.threads)
        self._beating = asyncio.create_task(self._beat())
        self._say(Ready(os.getpid()))

    def give(self, work: Work) -> None:
        """Take jobs of one lease: they start as calls are free, and each is settled."""
        line = self._line(work.queue)
        if line is None:
            self._refuse(work)
            return
        lease = LeaseInSlot(work, line.task, self._config.backoff)
        self._leases.add(lease)
        if line.task.batch:
            line.waiting.append((lease, -1))
        else:
            line.waiting.extend((lease, pick) for pick in range(len(work.ids)))
        if self._is_stopping:
            self._hand_back(line)
        else:
            self._refill(line)

    def answer(self, answer: SpendAnswer) -> None:
        """Pass on what came of a lane's further starts."""
        self._reach.answer(answer)

    async def stop(self, grace_s: float) -> None:
        """Start nothing more, let calls end within `grace_s`, hand back the rest, run the stop hooks, say `Left`."""
        self._is_stopping = True
        for line in self._lines.values():
            self._hand_back(line)
        await self._wait_calls(grace_s)
        self._calls.is_cutting = True
        for call in list(self._calls.running):
            call.cancel("the slot stops")
        await self._wait_calls(ABANDON_AFTER_S)
        for lease in list(self._leases):
            # Their handlers swallow their cancellation and are left behind.
            lease.note_all(range(len(lease.work.ids)), RETURNED)
            self._note_said(lease)
        self._say_all()
        if self._beating is not None:
            self._beating.cancel()
        await run_stop_hooks(self._registry.stop_hooks, self._calls.threads)
        self._calls.threads.close()
        self._say(Left())

    def _line(self, queue: str) -> _Line | None:
        line = self._lines.get(queue)
        if line is None and (task := self._registry.get(queue)) is not None:
            line = self._lines[queue] = _Line(task)
        return line

    def _refuse(self, work: Work) -> None:
        """Hand back jobs of a queue that this code does not know, for code that does."""
        _log.error("work_not_known", queue=work.queue, jobs=len(work.ids))
        self._say(returned_later(work, NEWER_CODE_AFTER_S))

    def _refill(self, line: _Line) -> None:
        while line.waiting and line.running < line.task.concurrency:
            lease, pick = line.waiting.popleft()
            line.running += 1
            task = asyncio.create_task(self._run(lease, pick))
            self._calls.running.add(task)
            task.add_done_callback(lambda ended: self._ended(line, ended))

    def _ended(self, line: _Line, task: asyncio.Task[None]) -> None:
        self._calls.running.discard(task)
        line.running -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("call_broke", queue=line.task.queue, error=repr(error))
        if not self._is_stopping:
            self._refill(line)

    async def _run(self, lease: LeaseInSlot, pick: int) -> None:
        """Run a batch (pick -1) or one job. The last net: a fault around the handler is a failed attempt."""
        try:
            await (self._run_batch(lease) if pick < 0 else self._run_single(lease, pick))
        except BaseException as error:
            if self._calls.is_end_of_loop(error):
                raise
            is_cut = isinstance(error, asyncio.CancelledError) and self._calls.is_cutting
            rest = RETURNED if is_cut else outcome_of(error)
            if not is_cut:
                _log.error("call_broke", queue=lease.task.queue, error=rest.error)
                rest = Outcome("retry", None, rest.error, rest.traceback)
            lease.note_all(range(len(lease.work.ids)) if pick < 0 else (pick,), rest)
        self._note_said(lease)

    async def _run_single(self, lease: LeaseInSlot, pick: int) -> None:
        """Call the handler with one job, unless it may not start."""
        work, task = lease.work, lease.task
        picks, payloads = self._decoded(lease, (pick,))
        if not picks:
            return
        job = job_of(work, pick, payloads[0], self._reach)
        call = HandlerCall(
            task=task,
            jobs=(job,),
            attempt=job.attempt,
            job_id=job.id,
            start_before_s=work.start_before_s,
        )
        if task.takes_fields:
            call.named = fields_of(job.payload)
        else:
            call.arguments = (job if task.takes_job else job.payload,)
        running_job.set(job)
        current_traceparent.set(child_traceparent(job.traceparent))
        end = await self._calls.call(call)
        lease.note_call(end.run_s)
        rest = end.rest
        if task.keep_result and rest is DONE and (job.outcome is None or job.outcome is DONE):
            job.outcome = _outcome_with_result(end.value)
        lease.note(pick, rest if job.outcome is None or call.is_late else job.outcome)

    async def _run_batch(self, lease: LeaseInSlot) -> None:
        """Call the handler with all jobs; where it raises, with fewer and fewer of them."""
        picks, payloads = self._decoded(lease, range(len(lease.work.ids)))
        end, unsaid = await self._call_batch(lease, picks, payloads)
        if end is None or not end.is_fault or len(picks) == 1:
            return
        self._note_said(lease)
        await self._run_apart(lease, unsaid, end)

    async def _run_apart(self, lease: LeaseInSlot, picks: Sequence[int], first: CallEnd) -> None:
        """Run the jobs of a call that raised in halves, then singly.

        For as long as one call may take: then the rest goes back for a while, once one job was blamed.
        """
        _log.warning(
            "batch_runs_apart", queue=lease.task.queue, jobs=len(picks), error=first.rest.error
        )
        halving = Halving(())
        halving.run_apart(picks)
        ends_s = time.monotonic() + lease.task.timeout_s
        is_one_blamed = False
        while (run := halving.next_run()) is not None:
            if self._is_stopping:
                lease.note_all([*run, *halving.give_up()], RETURNED)
                return
            if is_one_blamed and time.monotonic() > ends_s:
                later = Outcome("snooze", self._config.backoff.delay_s(1))
                lease.note_all([*run, *halving.give_up()], later)
                return
            start_before_s = None
            if lease.work.start_before_s is not None:
                run, late, start_before_s = await self._allowed_again(lease, run)
                halving.put_back(late)
            run, payloads = self._decoded(lease, run)
            end, unsaid = await self._call_batch(
                lease, run, payloads, is_again=True, start_before_s=start_before_s
            )
            if end is not None and end.is_fault:
                is_one_blamed = is_one_blamed or len(run) == 1
                if len(run) > 1:
                    halving.run_apart(unsaid)
            self._note_said(lease)

    async def _call_batch(
        self,
        lease: LeaseInSlot,
        picks: Sequence[int],
        payloads: Sequence[Any],
        *,
        is_again: bool = False,
        start_before_s: float | None = None,
    ) -> tuple[CallEnd | None, Sequence[int]]:
        """One call; notes what is certain. Also the jobs, if any, that a raise left without a word."""
        if not picks:
            return None, ()
        work = lease.work
        batch: Batch[Any] = Batch(work, picks, payloads, self._reach)
        call = HandlerCall(
            task=lease.task,
            jobs=batch,
            arguments=(batch,),
            attempt=work.attempts[picks[0]] + 1,
            job_id=work.ids[picks[0]] if len(picks) == 1 else -1,
            start_before_s=start_before_s if is_again else work.start_before_s,
            is_search=is_again,
        )
        current_traceparent.set(child_traceparent(work.traceparents[picks[0]]))
        end = await self._calls.call(call)
        lease.note_call(end.run_s)
        said = {} if call.is_late else batch.said()
        if end.rest is DONE and not said and len(picks) == len(work.ids) and not is_again:
            self._leases.discard(lease)
            self._say(lease.all_done())
            return end, ()
        for pick, outcome in said.items():
            lease.note(pick, outcome)
        unsaid = [pick for pick in picks if pick not in said] if said else picks
        if not end.is_fault or len(picks) == 1:
            # What is late to start again did start under the lease's own grant, which is not to be given back.
            lease.note_all(unsaid, RETURNED if call.is_late and is_again else end.rest)
        return end, unsaid

    async def _allowed_again(
        self, lease: LeaseInSlot, run: Sequence[int]
    ) -> tuple[list[int], list[int], float]:
        """The jobs of `run` whose lanes allow a further start, those too late for theirs, and until when the first may.

        Where one lane was long waited for, the starts of another may be over: the lane asked last is always
        in time, so with each call there are fewer. Those whose lanes allow none have failed an attempt.
        """
        work = lease.work
        counts: dict[str, list[int]] = {}
        for pick in run:
            counts.setdefault(work.lanes[pick] or "", []).append(pick)
        allowed: dict[int, float] = {}
        for lane, picks in counts.items():
            try:
                before_s = math.inf
                if lane:
                    before_s = await self._reach.spend(
                        work.queue, lane, len(picks), LANE_WAIT_MAX_S
                    )
            except LaneExhausted as error:
                lease.note_all(picks, Outcome("retry", None, error.text))
            else:
                allowed |= dict.fromkeys(picks, before_s)
        now_s = time.monotonic()
        in_time = sorted(pick for pick, before_s in allowed.items() if now_s <= before_s)
        late = sorted(allowed.keys() - set(in_time))
        return in_time, late, min((allowed[pick] for pick in in_time), default=math.inf)

    def _decoded(
        self, lease: LeaseInSlot, picks: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[Any]]:
        """The jobs that can be read, and their payloads; the others are noted."""
        work, task = lease.work, lease.task
        if not task.takes_fields and not lease.has_old_payloads:
            # One that does not fit is found again below, where it is told apart.
            with suppress(Exception):
                whole = len(picks) == len(work.ids)
                chosen = work.payloads if whole else [work.payloads[pick] for pick in picks]
                return picks, task.payloads.decode_all(chosen)
        good, payloads = [], []
        for pick in picks:
            try:
                payload = task.decode(work.payloads[pick], work.versions[pick])
            except PayloadNewer as error:
                lease.note(pick, Outcome("snooze", NEWER_CODE_AFTER_S, error.text))
                _log.info("payload_newer", queue=work.queue, job_id=work.ids[pick])
            except Exception as error:  # noqa: BLE001 - a payload's type may run code of its own
                told = told_text(error)
                text = f"the payload does not fit the task: {told}"
                # Of this very version it will never fit; an upgrade, or a type's own code, may have a better day.
                is_final = work.versions[pick] == task.version and isinstance(
                    error, msgspec.DecodeError
                )
                lease.note(pick, Outcome("fail" if is_final else "retry", None, text))
                _log.warning(
                    "payload_not_understood", queue=work.queue, job_id=work.ids[pick], error=told
                )
            else:
                good.append(pick)
                payloads.append(payload)
        return good, payloads

    def _hand_back(self, line: _Line) -> None:
        """What has not started goes back, as if it had never been given."""
        while line.waiting:
            lease, pick = line.waiting.popleft()
            is_laned = lease.work.start_before_s is not None
            picks = range(len(lease.work.ids)) if pick < 0 else (pick,)
            lease.note_all(picks, UNSTARTED if is_laned else RETURNED)
            self._note_said(lease)

    def _note_said(self, lease: LeaseInSlot) -> None:
        """Say what was noted of a lease: at once where that was the rest of it, else with others soon."""
        if lease.open_count == 0:
            self._leases.discard(lease)
            self._unsaid.discard(lease)
            self._say_of(lease)
            return
        self._unsaid.add(lease)
        if self._saying is None:
            loop = asyncio.get_running_loop()
            self._saying = loop.call_later(SAY_AFTER_S, self._say_all)

    def _say_all(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None
        unsaid, self._unsaid = self._unsaid, set()
        for lease in unsaid:
            self._say_of(lease)

    def _say_of(self, lease: LeaseInSlot) -> None:
        if (settled := lease.take()) is not None:
            self._say(settled)

    async def _wait_calls(self, wait_s: float) -> None:
        """Until no call is under way, `wait_s` at most."""
        ends_s = time.monotonic() + wait_s
        while self._calls.running and (left_s := ends_s - time.monotonic()) > 0:
            await asyncio.wait(self._calls.running, timeout=left_s)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._calls.beat()


def _outcome_with_result(value: Any) -> Outcome:
    """Done with what the handler returned; a failure where that cannot be kept."""
    try:
        return Outcome("done", result=encoded_result(value))
    except ValueError as error:
        return Outcome("fail", None, told_text(error))
