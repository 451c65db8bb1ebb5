"""Handler calls of a slot, and the outcomes of the jobs of each lease.

Every call ends with a result, whatever the handler does: it may raise anything (also SystemExit,
or an error whose text cannot be read), cancel its own task, or swallow a cancellation. For jobs of
lanes the clock is read immediately before the handler. Past their deadline the jobs return
unstarted, so that a lane's window holds whatever delayed this process since the claim.

`LeaseRun` collects one outcome per job; `Bisect` finds the jobs that make a batch raise.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from headrace.jobs.errors import SlotHookFailed
from headrace.jobs.headers import OwnOptions, have_options, options_of, traceparent_of
from headrace.jobs.job_context import JobContext
from headrace.jobs.messages import Ack, Outcome, Work
from headrace.jobs.model import jobs_run_seconds
from headrace.jobs.outcomes import (
    DONE,
    RETURNED,
    UNSTARTED,
    InFlightLease,
    Snooze,
    final_outcome,
    location_of,
    outcome_of,
    readable_text,
)
from headrace.jobs.slots.isolation import HandlerThreads, ending_children, fork_count
from headrace.jobs.slots.status_board import StatusCell
from headrace.jobs.tasks import Call, Registry, Task
from headrace.jobs.tasks.registry import Hook
from headrace.kernel import spans
from headrace.kernel.logs import child_traceparent, current_traceparent, logger
from headrace.kernel.resilience import Backoff

if TYPE_CHECKING:
    from headrace.kernel.otel import Span

_log: Final = logger(__name__)


class LeaseRun(InFlightLease):
    """A lease that a slot runs. Each job gets one outcome and is reported once."""

    __slots__ = (
        "_backoff",
        "_calls",
        "_has_reported",
        "_options",
        "_run_s",
        "_unsent",
        "task",
        "work",
    )

    def __init__(self, work: Work, task: Task, backoff: Backoff) -> None:
        super().__init__(
            work.lease_id, work.ids, work.attempts, retries=work.retries, headers=work.headers
        )
        self.work = work
        self.task = task
        self._backoff = backoff
        self._unsent: dict[int, Outcome] = {}
        """Outcomes that no ack has carried yet, by job."""
        self._options: Mapping[int, OwnOptions] = {}
        """Of jobs that differ from their task, by index."""
        if have_options(work.headers):
            self._options = dict(enumerate(map(options_of, work.headers)))
        self._has_reported = False
        self._calls = 0
        self._run_s = 0.0

    @property
    def has_old_payloads(self) -> bool:
        """Whether some payloads are not of the version that the task takes."""
        versions = self.work.versions
        return versions.count(self.task.version) != len(versions)

    def timeout_s(self, indexes: Sequence[int]) -> float:
        """Time limit of a call with these jobs: the least of theirs."""
        usual_s = self.task.timeout_s
        if not self._options:
            return usual_s
        return min(self._options[index].timeout_s or usual_s for index in indexes)

    def drop_expired(self, indexes: Sequence[int]) -> Sequence[int]:
        """Cancel the jobs that may not start any more; return the others."""
        if not self._options:
            return indexes
        now_s, left = time.time(), []
        for index in indexes:
            expires_s = self._options[index].expires_s
            if expires_s is None or now_s <= expires_s:
                left.append(index)
            else:
                late_s = now_s - expires_s
                self.note(index, Outcome("cancel", None, f"it expired {late_s:.1f} s ago"))
        return left

    def note_call(self, run_s: float) -> None:
        """Count a handler call that ended."""
        self._calls += 1
        self._run_s += run_s

    def note(self, index: int, outcome: Any) -> None:
        """Record the outcome of the job at `index`, unvalidated; the first outcome wins."""
        job_id = self.ids[index]
        if not self.is_open(job_id):
            return
        attempt = self.attempts[index] + 1
        final = final_outcome(
            outcome,
            attempt=attempt,
            retries=self.retries_of(job_id),
            backoff=self._backoff,
        )
        self.close((job_id,))
        self._unsent[job_id] = final
        if final.kind == "fail":
            _log.warning(
                "job_failed",
                queue=self.work.queue,
                job_id=job_id,
                attempt=attempt,
                error=final.error,
                is_raised=bool(final.traceback),
            )

    def note_all(self, indexes: Iterable[int], outcome: Outcome) -> None:
        """Record the same outcome for several jobs."""
        for index in indexes:
            self.note(index, outcome)

    def ack_all_done(self) -> Ack:
        """An ack of the whole lease, for one call that ran every job and set no outcome.

        It costs no work per job.
        """
        self.close(None)
        return Ack(lease_id=self.lease_id, calls=self._calls, run_s=self._run_s)

    def take_ack(self) -> Ack | None:
        """Pop the outcomes noted since the last ack; None where there are none."""
        noted, self._unsent = self._unsent, {}
        if not noted:
            return None
        calls, run_s = self._calls, self._run_s
        self._calls, self._run_s = 0, 0.0
        is_whole = not self._has_reported and len(noted) == len(self.ids)
        self._has_reported = True
        is_all_done = is_whole and all(outcome is DONE for outcome in noted.values())
        outcomes = None if is_all_done else noted
        return Ack(lease_id=self.lease_id, outcomes=outcomes, calls=calls, run_s=run_s)


class Bisect:
    """Find the jobs that make a batch raise: run it again in halves, then singly. No I/O.

    Only a job that fails alone is blamed, so one bad job never fails its neighbors. A good job
    among n runs at most ceil(log2 n) + 1 times. 100 jobs with one bad job take at most 15 calls;
    100 bad jobs take 199.
    """

    def __init__(self, jobs: Sequence[int]) -> None:
        self._runs = [jobs] if jobs else []

    def next_run(self) -> Sequence[int] | None:
        """The jobs of the next call; None where no job is left."""
        return self._runs.pop() if self._runs else None

    def split(self, jobs: Sequence[int]) -> None:
        """Run `jobs`, whose call raised, again in two halves, before all others."""
        middle = (len(jobs) + 1) // 2
        self._runs += [half for half in (jobs[middle:], jobs[:middle]) if half]

    def put_back(self, jobs: Sequence[int]) -> None:
        """Run `jobs` by themselves next: they could not start together with their run."""
        if jobs:
            self._runs.append(jobs)

    def give_up(self) -> list[int]:
        """Remove and return every job that has not run yet."""
        left = [job for run in self._runs for job in run]
        self._runs.clear()
        return left


CANCELLED_ITSELF: Final = Outcome("retry", None, "the handler cancelled itself")
HOOK_S_MAX: Final = 60.0


class _TooLate(Snooze):
    """The deadline to start has passed. A `Snooze`, so that middlewares do not report a fault."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(slots=True, kw_only=True)
class HandlerCall:
    """One call of a task's handler, and its deadline to start."""

    task: Task
    jobs: Sequence[JobContext[Any]]
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] | None = None
    attempt: int = 1
    job_id: int = -1
    is_last: bool = False
    """If it raises, no retry is left for its job."""
    timeout_s: float
    start_before_s: float | None = None
    is_bisecting: bool = False
    """It runs a part of a batch that raised before, so another error is expected."""
    is_late: bool = False
    abandoned: list[asyncio.Future[None]] = field(default_factory=list)
    """Done when threads of it that run over its timeout have ended."""

    def require_in_time(self) -> None:
        """Raises: _TooLate."""
        if self.start_before_s is not None and time.monotonic() > self.start_before_s:
            self.is_late = True
            raise _TooLate

    def run_here(self) -> Any:
        """Call the handler, after a last check of the deadline."""
        if self.start_before_s is not None:
            self.require_in_time()
        return self.task.handler(*self.arguments, **(self.named or {}))


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended."""

    rest: Outcome
    """Of the jobs whose outcome the handler did not set."""
    is_fault: bool
    """It raised an unexpected error and its code has ended, so it can run again."""
    value: Any
    run_s: float


class Executor:
    """Runs the handler calls of a slot, concurrently."""

    def __init__(self, registry: Registry, status: StatusCell | None) -> None:
        self.threads = HandlerThreads()
        self.running: set[asyncio.Task[None]] = set()
        """The tasks that calls run in."""
        self.is_aborting = False
        """The slot is stopping and cancels its calls."""
        self._registry = registry
        self._status = status
        self._jobs_running = 0
        self._overdue = 0
        self._home = fork_count()

    @property
    def is_overdue(self) -> bool:
        """Whether a thread runs over its timeout: the agent kills this slot unless it ends soon."""
        return self._overdue > 0

    async def call(self, call: HandlerCall) -> CallResult:
        """Call the handler and return how it ended; never raises a handler's error."""
        jobs = len(call.jobs)
        began_s = time.monotonic()
        self._jobs_running += jobs
        self._show(call, began_s)
        try:
            rest, is_fault, value = await self._run(call)
            await self._wait_abandoned(call, began_s)
        finally:
            self._jobs_running -= jobs
            if self._status is not None and self._jobs_running == 0:
                self._status.end()
            elif self._status is not None and call.abandoned:
                self._status.begin(-1, self._jobs_running, call.timeout_s)
        run_s = time.monotonic() - began_s
        jobs_run_seconds.observe(run_s)
        if call.is_late:
            return CallResult(UNSTARTED, is_fault=False, value=None, run_s=run_s)
        return CallResult(rest, is_fault, value, run_s)

    def _show(self, call: HandlerCall, began_s: float) -> None:
        """Record on the status board that the call runs."""
        if self._status is not None and not self._overdue:
            job_id = call.job_id if self._jobs_running == 1 else -1
            self._status.begin(job_id, self._jobs_running, call.timeout_s, began_s)

    async def _wait_abandoned(self, call: HandlerCall, began_s: float) -> None:
        """Wait until threads of the call have ended, so that no retry runs beside them.

        The agent kills a slot whose call runs over its timeout. Without an agent nobody ends the
        thread, and nothing waits for it.
        """
        if self._status is None or self.is_aborting or not call.abandoned:
            return
        self._show(call, began_s)
        self._overdue += 1
        with suppress(asyncio.CancelledError):
            await asyncio.wait(call.abandoned)
        self._overdue -= 1
        await _clear_cancellation()

    def beat(self) -> None:
        """Record on the status board that the event loop runs."""
        if self._status is not None and self._jobs_running > 0:
            self._status.beat()

    def is_end_of_loop(self, error: BaseException) -> bool:
        """Whether `error` closes a coroutine after its event loop, not caused by a handler."""
        return isinstance(error, GeneratorExit) and _running_task() not in self.running

    async def _run(self, call: HandlerCall) -> tuple[Outcome, bool, Any]:
        """(outcome of the remaining jobs, whether it is a fault, the handler's value)."""
        task = call.task
        limit = asyncio.timeout(call.timeout_s)
        rest, is_fault, value = DONE, False, None
        try:
            async with limit:
                value = await ending_children(self._home, self._with_middlewares(call))
        except asyncio.CancelledError:
            rest, is_fault = (RETURNED, False) if self.is_aborting else (CANCELLED_ITSELF, True)
        # Also SystemExit, which would end the event loop if it left this task.
        except BaseException as error:
            if self.is_end_of_loop(error):
                raise
            rest = outcome_of(error)
            if limit.expired():
                text = f"it ran over its timeout of {call.timeout_s:g} s"
                rest = Outcome("retry", None, text)
            # Retry, Snooze and their like are outcomes, not faults; a fault has a traceback.
            is_fault = limit.expired() or bool(rest.traceback)
            _log_raised(call, rest, location_of(error), is_fault=is_fault)
            # A thread past its timeout still runs: its jobs must not run again beside it at once.
            is_fault = is_fault and (task.is_async or not limit.expired())
        await _clear_cancellation()
        return rest, is_fault, value

    async def _with_middlewares(self, call: HandlerCall) -> Any:
        registry = self._registry
        if not registry.middlewares and call.task.is_async:
            return await call.run_here()
        seen = Call(task=call.task, queue=call.task.queue, jobs=call.jobs, attempt=call.attempt)
        code: Callable[[], Any] = call.run_here
        if not call.task.is_async:
            for around in reversed(registry.thread_middlewares):
                code = partial(around, seen, code)
            code = partial(self.threads.run, code, call.abandoned)
        for around in reversed(registry.middlewares):
            code = partial(around, seen, code)
        return await code()


def begin_span(work: Work, indexes: Sequence[int]) -> Span | None:
    """Continue the trace of the jobs of a call; its span if any of them is sampled."""
    if spans.active is None:
        parent = traceparent_of(work.headers[indexes[0]])
        current_traceparent.set(child_traceparent(parent))
        return None
    ids = [work.ids[index] for index in indexes]
    return spans.active.running(work.queue, ids, [work.headers[index] for index in indexes])


def end_span(span: Span | None, end: CallResult, outcome: Any) -> None:
    """End the span of a call, whose `outcome` may be any value that a handler set."""
    if span is None:
        return
    given = outcome if isinstance(outcome, Outcome) else Outcome("retry")
    kind, text = readable_text(given.kind), readable_text(given.error)
    span.note({"headrace.job.outcome": kind})
    if end.is_fault or kind in ("retry", "fail"):
        span.fail(text.partition(":")[0] if end.is_fault else kind, text)
    span.end()


def _log_raised(call: HandlerCall, rest: Outcome, at: str, *, is_fault: bool) -> None:
    if call.is_late or (is_fault and call.is_bisecting and len(call.jobs) > 1):
        return
    (_log.warning if is_fault else _log.info)(
        "handler_raised",
        queue=call.task.queue,
        job_id=call.job_id,
        jobs=len(call.jobs),
        attempt=call.attempt,
        is_last=call.is_last,
        error=rest.error,
        at=at,
        traceback=rest.traceback,
    )


def _running_task() -> asyncio.Task[Any] | None:
    """The current task; None where a coroutine is closed after its event loop ended."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


async def _clear_cancellation() -> None:
    """Treat a cancellation as handled: the handler's jobs still need their outcomes."""
    task = asyncio.current_task()
    if task is None or task.cancelling() == 0:
        return
    while task.cancelling() > 0:
        task.uncancel()
    # A handler that cancelled itself and awaited nothing more left it for the next await.
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


# Start and stop hooks of a slot; sync ones run in the handler thread, which they may prepare


async def run_start_hooks(hooks: Sequence[Hook], threads: HandlerThreads) -> None:
    """Run the hooks in order. Raises: SlotHookFailed at the first that raises or times out."""
    for hook in hooks:
        if error := await _run_hook(hook, threads):
            raise SlotHookFailed(
                f"start hook {_hook_name(hook)!r} raised, so this slot takes no work: {error}"
            )


async def run_stop_hooks(hooks: Sequence[Hook], threads: HandlerThreads) -> None:
    """Run every hook in order; errors are only logged."""
    for hook in hooks:
        await _run_hook(hook, threads)


async def _run_hook(hook: Hook, threads: HandlerThreads) -> str:
    """Run a hook and log its error. Return the error's text, empty on success."""
    try:
        async with asyncio.timeout(HOOK_S_MAX):
            answer = hook() if inspect.iscoroutinefunction(hook) else await threads.run(hook, [])
            if inspect.isawaitable(answer):
                await answer
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - also SystemExit, which has no meaning in a hook
        outcome = outcome_of(error)
        _log.error(
            "slot_hook_raised",
            hook=_hook_name(hook),
            error=outcome.error,
            traceback=outcome.traceback,
        )
        return outcome.error
    return ""


def _hook_name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", repr(hook))
