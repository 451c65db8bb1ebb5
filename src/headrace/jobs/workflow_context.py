"""What a workflow's handler receives: steps, sleeps, events and jobs, each recorded once.

A run replays its handler from the beginning. A call whose end is recorded returns it; the first
other one acts. A call that has to wait blocks, and once all open calls of the run block, `parked`
has a result: the run ends and its job waits without a slot.

`StepStore` refuses a run that lost its lease or was cancelled. Such an error, and one of the
database, ends the run: every later call raises it again, so that a handler cannot catch it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Protocol, TypeVar

import msgspec

from headrace.engines.caller_transaction import Transaction
from headrace.jobs.errors import InvalidStep, LeaseLost
from headrace.jobs.handle import Bridge
from headrace.jobs.job_context import JobContext, encode_result
from headrace.jobs.model import NewJob
from headrace.jobs.outcomes import Cancel, Fail, final_outcome, outcome_of, readable_text
from headrace.jobs.steps import (
    JobResult,
    RecordedStep,
    Replay,
    require_event,
    require_jobs,
    require_seconds,
    seconds_until,
)
from headrace.kernel import spans
from headrace.kernel.resilience import Backoff, crash_point

P = ParamSpec("P")
R = TypeVar("R")
_in_step: Final[ContextVar[str | None]] = ContextVar("in_step", default=None)
TURNS: Final = 10
"""Turns of the event loop in which a handler may make its next call before its run is parked."""
PARKED_S_MAX: Final = 30 * 86_400.0
"""Longest wait between two runs; what wakes a workflow ends it earlier."""


class StepFailed(Fail):
    """A step failed permanently. A handler that does not catch it fails."""

    def __init__(self, name: str, number: int, error: str) -> None:
        super().__init__(f"step {name!r} failed: {error}")
        self.name = name
        self.number = number
        self.error = error


class EventLate(StepFailed, TimeoutError):
    """The event was not sent in time. A handler that does not catch it fails."""


class Parked(BaseException):
    """A sync handler has to wait; no `except Exception` catches it."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s


class StepStore(Protocol):
    """Records steps of a running job while its lease is held."""

    backoff: Backoff

    async def begin(self, job: JobContext[Any]) -> tuple[str, Mapping[int, RecordedStep]]:
        """Begin a run. Return the state of the lease, and the recorded steps by number."""

    async def mark_uncaught(self, job: JobContext[Any], number: int) -> None:
        """Let a retry of the job repeat a failed step."""

    async def record(
        self, job: JobContext[Any], step: RecordedStep, *, tx: Transaction | None
    ) -> str:
        """Record a step, in `tx` if given. Return the state of the lease."""

    async def wait(
        self, job: JobContext[Any], step: RecordedStep, event: tuple[str, str] | None = None
    ) -> tuple[str, RecordedStep]:
        """Record a wait, unless it is; return the state of the lease and the step as it is now."""

    async def start_jobs(
        self, job: JobContext[Any], step: RecordedStep, jobs: Sequence[NewJob]
    ) -> str:
        """Enqueue jobs and record it, in one transaction. Return the state of the lease."""

    async def jobs_ended(
        self, job: JobContext[Any], step: RecordedStep
    ) -> tuple[str, list[JobResult] | None]:
        """The state of the lease, and the results of a step's jobs; None before all have ended."""


def _to_await(
    method: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]]:
    """A method whose calls the handler has to await."""

    @wraps(method)
    def call(self: WorkflowContext, /, *arguments: P.args, **named: P.kwargs) -> Any:
        made = method(self, *arguments, **named)
        self.made.append(made)
        return made

    return call


class WorkflowContext:
    """The context of a running workflow, for an async handler."""

    def __init__(
        self,
        job: JobContext[Any],
        store: StepStore,
        recorded: Mapping[int, RecordedStep],
        *,
        retries: int,
    ) -> None:
        self.job = job
        """The job that runs; its id is the workflow's."""
        self.replay = Replay(recorded)
        self._store = store
        self._retries = retries
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._acting = 0
        self._waits_s: list[float] = []
        self._broken: BaseException | None = None
        self._is_over = False
        self.made: list[Coroutine[Any, Any, Any]] = []
        """Calls that the handler has to await."""
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks that called it, such as those of `asyncio.gather`."""
        self.parked: asyncio.Future[float] = self._loop.create_future()
        """Seconds until the run continues; it is set when the run has to wait."""

    @property
    def id(self) -> int:
        """The id of the workflow: that of its job."""
        return self.job.id

    @property
    def version(self) -> int:
        """The version of the code that the workflow began with."""
        return self.job.version

    @_to_await
    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *arguments: Any,
        retries: int | None = None,
        tx: Transaction | None = None,
        **named: Any,
    ) -> Any:
        """Call `function` once and record its result; return it as JSON decodes it.

        The function runs again if its process dies before the record, or if it raises: after a
        backoff, up to `retries` times, by default those of the workflow. `Fail` fails it at once.
        With `tx` the record commits with that transaction.
        Raises: StepFailed.
        """
        with self._call():
            opened = await self.open_step(name)
            if opened.state == "done":
                return self.value_of(opened)
            try:
                with _inside_step(name, self.job):
                    value = function(*arguments, **named)
                    if inspect.isawaitable(value):
                        value = await value
            except Exception as error:  # noqa: BLE001 - of the user's code, recorded
                await self.close_failed(opened, error, retries)
            return await self.close_done(opened, value, tx)

    @_to_await
    async def sleep(self, name: str, until: float | datetime) -> None:
        """Wait for seconds, or until a moment, up to a year, without a slot."""
        with self._call():
            number, known = self._next(name, "sleep")
            wait_s = self._left_s(known)
            if known is None:
                new = RecordedStep(
                    number=number, name=name, kind="sleep", state="waiting",
                    wait_s=seconds_until(name, until),
                )  # fmt: skip
                state, new = await self._stored(self._store.wait(self.job, new))
                self._require_held(state)
                wait_s = new.wait_s or 0.0
            if wait_s > 0:
                await self._block(wait_s)

    @_to_await
    async def wait_event(self, name: str, key: str | int, *, timeout_s: float | None = None) -> Any:
        """Wait without a slot for the event `name` with `key`; return its payload.

        An event that was sent before is returned at once. Raises: EventLate after `timeout_s`.
        """
        with self._call():
            event = require_event(name, key)
            if timeout_s is not None:
                timeout_s = require_seconds(f"event {name!r}: timeout_s", timeout_s)
            number, known = self._next(f"{event[0]} {event[1]}"[:128], "event")
            step = known or RecordedStep(
                number=number, name=f"{event[0]} {event[1]}"[:128], kind="event", state="waiting",
                wait_s=timeout_s,
            )  # fmt: skip
            if step.state == "waiting":
                state, step = await self._stored(self._store.wait(self.job, step, event))
                self._require_held(state)
                crash_point("workflows.event_waited")
            if step.state == "waiting":
                await self._block(PARKED_S_MAX if step.wait_s is None else step.wait_s)
            if step.state == "failed":
                text = f"event {event[0]!r} with key {event[1]!r} was not sent in time"
                raise EventLate(step.name, step.number, text)
            return self.value_of(step)

    @_to_await
    async def run(self, name: str, job: NewJob) -> Any:
        """Enqueue a job, `task.job(...)`, and wait without a slot for its end; return its result.

        It is None if the task keeps no results. Raises: StepFailed if the job does not end done.
        """
        return (await self.run_all(name, [job]))[0]

    @_to_await
    async def run_all(
        self, name: str, jobs: Sequence[NewJob], *, return_errors: bool = False
    ) -> list[Any]:
        """Enqueue up to 5,000 jobs and wait without a slot until all have ended.

        Return their results in order. With `return_errors` the result of a job that did not end
        done is a StepFailed. Raises: StepFailed.
        """
        with self._call():
            number, known = self._next(name, "jobs")
            step = known or RecordedStep(number=number, name=name, kind="jobs", state="waiting")
            if known is None:
                require_jobs(name, jobs)
                self._require_held(await self._stored(self._store.start_jobs(self.job, step, jobs)))
                crash_point("workflows.jobs_started")
                await self._block(PARKED_S_MAX)
            state, ended = await self._stored(self._store.jobs_ended(self.job, step))
            self._require_held(state)
            if ended is None:
                await self._block(PARKED_S_MAX)
            results = [_result_of(step, one) for one in ended]
            failed = next((one for one in results if isinstance(one, StepFailed)), None)
            if failed is not None and not return_errors:
                raise failed
            return results

    async def open_step(self, name: str) -> RecordedStep:
        """The record of the step called now, once it may act. Raises: StepFailed."""
        number, known = self._next(name, "step")
        if known is None:
            return RecordedStep(number=number, name=name, kind="step", state="waiting")
        if known.state == "failed":
            raise StepFailed(name, number, known.error or "")
        if known.state == "waiting" and (left_s := self._left_s(known)) > 0:
            await self._block(left_s)
        return known

    async def close_done(self, step: RecordedStep, value: Any, tx: Transaction | None) -> Any:
        """Record the result of a step. Return it as recorded. Raises: StepFailed, LeaseLost."""
        try:
            encoded = encode_result(value)
        except ValueError as error:
            await self.close_failed(step, Fail(readable_text(error)), None)
        crash_point("workflows.step_ran")
        step = _changed(step, state="done", result=encoded, error=None, wait_s=None)
        self._require_held(await self._stored(self._store.record(self.job, step, tx=tx)))
        crash_point("workflows.step_recorded")
        return self.value_of(step)

    async def close_failed(
        self, step: RecordedStep, error: Exception, retries: int | None
    ) -> NoReturn:
        """Record that a step raised. Wait for its next attempt, or raise StepFailed."""
        most = self._retries if retries is None else retries
        outcome = final_outcome(
            outcome_of(error), attempt=step.failures + 1, retries=most, backoff=self._store.backoff
        )
        if outcome.kind == "cancel":
            raise error
        is_failed = outcome.kind == "fail"
        failures = step.failures + (outcome.kind != "snooze")
        step = _changed(
            step,
            state="failed" if is_failed else "waiting",
            failures=min(failures, 32_767),
            wait_s=outcome.after_s,
            error=outcome.error,
        )
        self._require_held(await self._stored(self._store.record(self.job, step, tx=None)))
        if is_failed:
            raise StepFailed(step.name, step.number, outcome.error) from error
        await self._block(outcome.after_s or 0.0)

    def value_of(self, step: RecordedStep) -> Any:
        """The recorded result of a step."""
        return None if step.result is None else msgspec.json.decode(step.result)

    def require_unbroken(self) -> None:
        """Raise again the error that ended the run."""
        if self._broken is not None:
            raise self._broken

    def end(self) -> None:
        """Refuse further calls: the run is over."""
        self._is_over = True

    async def mark_uncaught(self, number: int) -> None:
        """Let a retry of the job repeat a failed step, since its failure ends the job."""
        await self._store.mark_uncaught(self.job, number)

    def _next(self, name: str, kind: str) -> tuple[int, RecordedStep | None]:
        self.require_unbroken()
        if self._is_over:
            raise InvalidStep(f"step {name!r} is called after the end of its workflow's run")
        try:
            _require_outside_step(name)
            return self.replay.next(name, kind)
        except Exception as error:
            self._broken = error
            raise

    def _left_s(self, step: RecordedStep | None) -> float:
        """Seconds until the time of a recorded step."""
        if step is None or step.wait_s is None:
            return 0.0
        return step.wait_s - (self._loop.time() - self._began_s)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call that acts until it ends or blocks."""
        self._acting += 1
        task = asyncio.current_task()
        if task is not None:
            self.tasks.add(task)
        try:
            yield
        finally:
            self._acting -= 1
            self._park_if_idle(self.replay.calls, TURNS)

    async def _block(self, wait_s: float) -> NoReturn:
        """Block this call until the run is parked and ends."""
        self._waits_s.append(min(max(wait_s, 0.0), PARKED_S_MAX))
        self._park_if_idle(self.replay.calls, TURNS)
        await self._loop.create_future()
        raise AssertionError("a blocked call never continues")

    def _park_if_idle(self, calls: int, turns: int) -> None:
        """Park the run if every open call blocks and the handler makes no other one."""
        is_idle = self._waits_s and self._acting <= len(self._waits_s)
        if not is_idle or calls != self.replay.calls or self.parked.done():
            return
        if turns:
            self._loop.call_soon(self._park_if_idle, calls, turns - 1)
        else:
            self.parked.set_result(min(self._waits_s))

    async def _stored(self, recording: Any) -> Any:
        """The answer of the store. Its error ends the run."""
        try:
            return await recording
        except BaseException as error:
            self._broken = self._broken or error
            raise

    def _require_held(self, state: str) -> None:
        """Raises: LeaseLost, Cancel."""
        if state == "held":
            return
        self._broken = refusal(self.job, state)
        raise self._broken


@contextmanager
def _inside_step(name: str, job: JobContext[Any]) -> Iterator[None]:
    """The call of a step's function, as a span; no step may be called in it."""
    with spans.inside(f"step {name}", "INTERNAL", {"headrace.workflow": job.queue}):
        inside = _in_step.set(name)
        try:
            yield
        finally:
            _in_step.reset(inside)


class BlockingWorkflowContext:
    """The context of a running workflow, for a plain `def` handler: the same calls, blocking."""

    def __init__(self, inner: WorkflowContext, bridge: Bridge) -> None:
        self._inner = inner
        self._run = bridge.run
        self.job = inner.job

    @property
    def id(self) -> int:
        """The id of the workflow: that of its job."""
        return self.job.id

    @property
    def version(self) -> int:
        """The version of the code that the workflow began with."""
        return self.job.version

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *arguments: Any,
        retries: int | None = None,
        tx: Transaction | None = None,
        **named: Any,
    ) -> Any:
        """As `WorkflowContext.step`; the function runs in the handler's thread."""
        inner = self._inner
        opened = self._run(_parking(inner, inner.open_step(name)))
        if opened.state == "done":
            return inner.value_of(opened)
        try:
            with _inside_step(name, self.job):
                value = function(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - of the user's code, recorded
            self._run(_parking(inner, inner.close_failed(opened, error, retries)))
        return self._run(inner.close_done(opened, value, tx))

    def sleep(self, name: str, until: float | datetime) -> None:
        """As `WorkflowContext.sleep`."""
        self._run(_parking(self._inner, self._inner.sleep(name, until)))

    def wait_event(self, name: str, key: str | int, *, timeout_s: float | None = None) -> Any:
        """As `WorkflowContext.wait_event`."""
        waiting = self._inner.wait_event(name, key, timeout_s=timeout_s)
        return self._run(_parking(self._inner, waiting))

    def run(self, name: str, job: NewJob) -> Any:
        """As `WorkflowContext.run`."""
        return self._run(_parking(self._inner, self._inner.run(name, job)))

    def run_all(
        self, name: str, jobs: Sequence[NewJob], *, return_errors: bool = False
    ) -> list[Any]:
        """As `WorkflowContext.run_all`."""
        running = self._inner.run_all(name, jobs, return_errors=return_errors)
        result: list[Any] = self._run(_parking(self._inner, running))
        return result


async def _parking(context: WorkflowContext, call: Any) -> Any:
    """The result of a call, or Parked once it blocks."""
    calling = asyncio.ensure_future(call)
    await asyncio.wait((calling, context.parked), return_when=asyncio.FIRST_COMPLETED)
    if calling.done():
        return calling.result()
    calling.cancel()
    await asyncio.wait((calling,))
    raise Parked(context.parked.result())


def refusal(job: JobContext[Any], state: str) -> Exception:
    """The error of a run whose lease is not held."""
    return Cancel("cancelled") if state == "cancelled" else LeaseLost(job.lease_id)


def _require_outside_step(name: str) -> None:
    """Raises: InvalidStep."""
    if (outer := _in_step.get()) is not None:
        raise InvalidStep(
            f"step {name!r} is called by the function of step {outer!r}: call steps from the"
            " workflow's handler only"
        )


def _changed(step: RecordedStep, **fields: Any) -> RecordedStep:
    return msgspec.structs.replace(step, **fields)


def _result_of(step: RecordedStep, ended: JobResult) -> Any:
    if ended.state == "done":
        return ended.result
    text = f"job {ended.job_id} ended {ended.state}: {ended.error or 'without an error'}"
    return StepFailed(step.name, step.number, text)
