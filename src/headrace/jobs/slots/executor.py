"""Runs handler calls: timeout, middlewares, event loop or thread, forked children.

Every call ends with a result, whatever the handler does: it may raise anything (also SystemExit,
or an error whose text cannot be read), cancel its own task, or swallow a cancellation. For jobs of
lanes the clock is read immediately before the handler. Past their deadline the jobs return
unstarted, so that a lane's window holds whatever delayed this process since the claim.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import coroutine
from typing import Any, Final, TypeVar

from headrace.jobs.errors import SlotHookFailed
from headrace.jobs.job_context import JobContext
from headrace.jobs.model import jobs_run_seconds
from headrace.jobs.outcomes import DONE, RETURNED, UNSTARTED, Outcome, Snooze, outcome_of
from headrace.jobs.slots.status_board import StatusCell
from headrace.jobs.tasks import Call, Registry, Task
from headrace.jobs.tasks.registry import Hook
from headrace.kernel.logs import logger

CANCELLED_ITSELF: Final = Outcome("retry", None, "the handler cancelled itself")
HOOK_S_MAX: Final = 60.0
THREAD_NAME: Final = "headrace-handler"
Value = TypeVar("Value")
_log: Final = logger(__name__)


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
    start_before_s: float | None = None
    is_bisecting: bool = False
    """It runs a part of a batch that raised before, so another error is expected."""
    is_late: bool = False

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
        self._home = fork_count()

    async def call(self, call: HandlerCall) -> CallResult:
        """Call the handler and return how it ended; never raises a handler's error."""
        jobs = len(call.jobs)
        began_s = time.monotonic()
        self._jobs_running += jobs
        if self._status is not None:
            job_id = call.job_id if self._jobs_running == 1 else -1
            self._status.begin(job_id, self._jobs_running, call.task.timeout_s)
        try:
            rest, is_fault, value = await self._run(call)
        finally:
            self._jobs_running -= jobs
            if self._status is not None and self._jobs_running == 0:
                self._status.end()
        run_s = time.monotonic() - began_s
        jobs_run_seconds.observe(run_s)
        if call.is_late:
            return CallResult(UNSTARTED, is_fault=False, value=None, run_s=run_s)
        return CallResult(rest, is_fault, value, run_s)

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
        limit = asyncio.timeout(task.timeout_s)
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
                text = f"it ran over its timeout of {task.timeout_s:g} s"
                rest = Outcome("retry", None, text)
            # Retry, Snooze and their like are outcomes, not faults; a fault has a traceback.
            is_fault = limit.expired() or bool(rest.traceback)
            _log_raised(call, rest, is_fault=is_fault)
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
            code = partial(self.threads.run, code)
        for around in reversed(registry.middlewares):
            code = partial(around, seen, code)
        return await code()


def _log_raised(call: HandlerCall, rest: Outcome, *, is_fault: bool) -> None:
    if call.is_late or (is_fault and call.is_bisecting and len(call.jobs) > 1):
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


# Threads of sync handlers

Code = Callable[[], None] | None


class HandlerThreads:
    """Daemon threads for sync handlers, one per concurrent call; the last used is used first.

    Threads persist, so that thread-local state of libraries (Django's connections) persists too.
    This is not an executor of the standard library: a handler past its timeout cannot be stopped,
    and would hold a place in the pool and delay the process's exit. Here its thread is abandoned
    and replaced.
    """

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Code]] = []
        self._home = fork_count()

    async def run(self, code: Callable[[], Any]) -> Any:
        """Run `code` in a thread, in this context; a cancelled caller abandons the thread."""
        loop = asyncio.get_running_loop()
        # Errors are passed as values: a future refuses StopIteration, and one that raises
        # GeneratorExit closes the coroutines that wait for it.
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def report(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result((result, error))

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(code)
            except BaseException as raised:  # noqa: BLE001 - raised again in the awaiting task
                error = raised
            exit_if_forked(self._home, 1 if error is not None else 0)
            # A loop that was closed meanwhile needs no answer.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(report, result, error)

        thread = self._idle.pop() if self._idle else _start_thread()
        thread.put(work)
        try:
            result, error = await answer
        except BaseException:
            # The thread ends after the code, which cannot be interrupted.
            thread.put(None)
            raise
        self._idle.append(thread)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Let the idle threads end."""
        while self._idle:
            self._idle.pop().put(None)


def _start_thread() -> queue.SimpleQueue[Code]:
    works: queue.SimpleQueue[Code] = queue.SimpleQueue()
    threading.Thread(target=_run_thread, args=(works,), name=THREAD_NAME, daemon=True).start()
    return works


def _run_thread(works: queue.SimpleQueue[Code]) -> None:
    while (work := works.get()) is not None:
        work()
        # Otherwise the frame would keep the last payload alive until the next one.
        del work


# Processes that handlers fork: none of them may become a second slot


class _Forks:
    """The number of forks behind this process, counted because getpid is a system call."""

    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.note)


def fork_count() -> int:
    """A number that differs between this process and its forked children: see `exit_if_forked`."""
    return _Forks.count


def hide_from_children(link: socket.socket, descriptors: Sequence[int]) -> None:
    """Close the slot's socket and `descriptors` in forked children, and reset their signals."""

    def let_go() -> None:
        for descriptor in (link.fileno(), *descriptors):
            with suppress(OSError):
                os.close(descriptor)
        # The wakeup socket of the loop is shared: a signal to the child would reach its parent.
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=let_go)


def exit_if_forked(home: int, code: int = 0) -> None:
    """End this process if it was forked since `fork_count` returned `home`."""
    if _Forks.count != home:
        os._exit(code)


@coroutine
def ending_children(home: int, code: Coroutine[Any, Any, Value]) -> Generator[Any, Any, Value]:
    """Await `code`; end any child that it forks where the child returns, raises or would wait.

    Such a child would continue in the slot's code, with the slot's sockets and the event loop's
    epoll, which it shares with its parent. Other processes that it leaves running are killed after
    the slot, by their process group.
    """
    resume: Any = code.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration as end:
            exit_if_forked(home)
            return end.value  # type: ignore[no-any-return]
        except BaseException:
            exit_if_forked(home, 1)
            # Otherwise the error would hold this frame, and the frame the error.
            value = None
            raise
        exit_if_forked(home)
        try:
            value = yield awaited
            resume = code.send
        except BaseException as error:  # noqa: BLE001 - a cancellation, passed on to `code`
            resume, value = code.throw, error


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
            answer = hook() if inspect.iscoroutinefunction(hook) else await threads.run(hook)
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
