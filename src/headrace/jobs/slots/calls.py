"""One handler call: within its timeout, inside its middlewares, in the loop or in a thread.

Whatever the handler does, the call ends with an answer: it may raise anything (also SystemExit, or an error
whose text cannot be read), cancel its own task, swallow a cancellation. For jobs of lanes the clock is read
as the last thing before the handler: past the deadline they go back unstarted, which keeps a lane's
window strict whatever stopped this process since the claim was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from headrace.jobs.handling import DONE, RETURNED, UNSTARTED, Outcome, Snooze, outcome_of
from headrace.jobs.inhand import JobInHand
from headrace.jobs.model import jobs_run_seconds
from headrace.jobs.slots.cell import Cell
from headrace.jobs.slots.children import ending_children, forks_behind
from headrace.jobs.slots.threads import Threads
from headrace.jobs.tasks import Call, Registry, Task
from headrace.kernel.logs import logger

_log: Final = logger(__name__)
CANCELLED_ITSELF: Final = Outcome("retry", None, "the handler cancelled itself")


class _Late(Snooze):
    """The deadline for the start has passed; a word, so that middlewares take it for no fault."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(slots=True, kw_only=True)
class HandlerCall:
    """What to call, and when it may no longer start."""

    task: Task
    jobs: Sequence[JobInHand[Any]]
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] | None = None
    attempt: int = 1
    job_id: int = -1
    start_before_s: float | None = None
    is_search: bool = False
    """It runs a part of a batch that raised before; that it raises as well is no news."""
    is_late: bool = False

    def require_in_time(self) -> None:
        """Raises: _Late."""
        if self.start_before_s is not None and time.monotonic() > self.start_before_s:
            self.is_late = True
            raise _Late

    def run_here(self) -> Any:
        """Call the handler; the deadline is judged right before it."""
        if self.start_before_s is not None:
            self.require_in_time()
        return self.task.handler(*self.arguments, **(self.named or {}))


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call ended."""

    rest: Outcome
    """Of the jobs that it said nothing about."""
    is_fault: bool
    """It raised, and not by a word, and can be tried again: its code has ended."""
    value: Any
    run_s: float


class Calls:
    """The handler calls of a slot."""

    def __init__(self, registry: Registry, board: Cell | None) -> None:
        self.threads = Threads()
        self.running: set[asyncio.Task[None]] = set()
        """The tasks that calls are made in."""
        self.is_cutting = False
        """Calls that are cancelled from now on are cancelled by the slot."""
        self._registry = registry
        self._board = board
        self._jobs_running = 0
        self._home = forks_behind()

    async def call(self, call: HandlerCall) -> CallEnd:
        """Call the handler, whatever comes of it."""
        jobs = len(call.jobs)
        began_s = time.monotonic()
        self._jobs_running += jobs
        if self._board is not None:
            job_id = call.job_id if self._jobs_running == 1 else -1
            self._board.begin(job_id, self._jobs_running, call.task.timeout_s)
        try:
            rest, is_fault, value = await self._answered(call)
        finally:
            self._jobs_running -= jobs
            if self._board is not None and self._jobs_running == 0:
                self._board.end()
        run_s = time.monotonic() - began_s
        jobs_run_seconds.observe(run_s)
        if call.is_late:
            return CallEnd(UNSTARTED, is_fault=False, value=None, run_s=run_s)
        return CallEnd(rest, is_fault, value, run_s)

    def beat(self) -> None:
        """Show that the event loop lives."""
        if self._board is not None and self._jobs_running > 0:
            self._board.beat()

    def is_end_of_loop(self, error: BaseException) -> bool:
        """Whether `error` is a coroutine being closed after its event loop, and no handler's doing."""
        return isinstance(error, GeneratorExit) and _running_task() not in self.running

    async def _answered(self, call: HandlerCall) -> tuple[Outcome, bool, Any]:
        """(what becomes of the rest, whether it is a fault, the handler's value)."""
        task = call.task
        limit = asyncio.timeout(task.timeout_s)
        rest, is_fault, value = DONE, False, None
        try:
            async with limit:
                value = await ending_children(self._home, self._inside(call))
        except asyncio.CancelledError:
            rest, is_fault = (RETURNED, False) if self.is_cutting else (CANCELLED_ITSELF, True)
        # Also SystemExit, which would end the event loop if it left this task.
        except BaseException as error:
            if self.is_end_of_loop(error):
                raise
            rest = outcome_of(error)
            if limit.expired():
                text = f"it ran over its timeout of {task.timeout_s:g} s"
                rest = Outcome("retry", None, text)
            # Retry, Snooze and their like are words of the handler, not faults; a fault has a traceback.
            is_fault = limit.expired() or bool(rest.traceback)
            _log_raised(call, rest, is_fault=is_fault)
            # A thread past its timeout goes on: its jobs must not run again beside it at once.
            is_fault = is_fault and (task.is_async or not limit.expired())
        await _go_on_after_cancellation()
        return rest, is_fault, value

    async def _inside(self, call: HandlerCall) -> Any:
        registry = self._registry
        if not registry.middlewares and call.task.is_async:
            return await call.run_here()
        seen = Call(task=call.task, queue=call.task.queue, jobs=call.jobs, attempt=call.attempt)
        code: Callable[[], Any] = call.run_here
        if not call.task.is_async:
            for around in reversed(registry.thread_middlewares):
                code = partial(around, seen, code)
            code = partial(self.threads.run, code)
        for around in reversed(registry.middlewares):
            code = partial(around, seen, code)
        return await code()


def _log_raised(call: HandlerCall, rest: Outcome, *, is_fault: bool) -> None:
    if call.is_late or (is_fault and call.is_search and len(call.jobs) > 1):
        return
    (_log.warning if is_fault else _log.info)(
        "handler_raised",
        queue=call.task.queue,
        job_id=call.job_id,
        jobs=len(call.jobs),
        attempt=call.attempt,
        error=rest.error,
        traceback=rest.traceback,
    )


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
