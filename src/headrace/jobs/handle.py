"""Handles: what `enqueue` and `group` return to their caller; and the sync bridge.

Django, Flask and scripts call the same async methods:

    send_mail.sync.enqueue(to="ann", text="hi", tx=connection)    # any method of a task
    app.sync.jobs.cancel(job_id)                                  # any method of a room
    app.sync(send_mail.enqueue)(to="ann", text="hi")              # the same, with its types
    app.sync.run(some_coroutine())                                # any coroutine

One thread per process runs an event loop, from the first call to the end of the process; a forked
child starts its own. While the caller waits, its thread also runs statements on the caller's own
blocking connection, which Django forbids to any other thread. A call from inside an event loop
would block that loop, so it is refused: use `await` there.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import wraps
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakSet

from headrace.engines.caller_transaction import Transaction, caller_thread
from headrace.jobs.errors import GroupClosed, InvalidTask
from headrace.jobs.model import Job, NewJob, Why
from headrace.kernel.errors import InvalidInput, Unavailable

CLOSING_S_MAX: Final = 1.5
JOINING_S_MAX: Final = 0.5
P = ParamSpec("P")
T = TypeVar("T")


class AwaitInstead(InvalidInput):
    """`sync` was called in a thread that runs an event loop; use `await` there."""

    code = "jobs.await_instead"

    def __init__(self) -> None:
        super().__init__(
            "this thread runs an event loop, which a sync call would block: use `await` without"
            " `sync`, or make the call in a thread (asyncio.to_thread, sync_to_async)"
        )


class BridgeClosed(Unavailable):
    """The thread behind `sync` ended, or its caller was interrupted, before the call returned."""

    code = "jobs.bridge_closed"

    def __init__(self) -> None:
        super().__init__(
            "the sync call ended without a result, since the app was closed or the caller was"
            " interrupted: check whether it took effect before you call again"
        )


class View:
    """A synchronous view of an object with async methods."""

    def __init__(self, bridge: Bridge, target: Any) -> None:
        self._bridge = bridge
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._bridge.seen(getattr(self._target, name))

    def __repr__(self) -> str:
        return f"{self._target!r}.sync"


class Bridge:
    """Runs the async methods of `app` for sync code. `closing` is awaited at the end."""

    def __init__(self, app: Any, closing: Callable[[], Awaitable[None]]) -> None:
        self._app = app
        self._closing = closing
        self._lock = threading.Lock()
        self._running: _Running | None = None
        _bridges.add(self)

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the bridge's own."""
        return self._running is not None and self._running.thread is threading.current_thread()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.seen(getattr(self._app, name))

    def __call__(self, verb: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        """Wrap an async function as a sync one."""

        @wraps(verb)
        def call(*arguments: P.args, **named: P.kwargs) -> T:
            _require_no_loop()
            return cast("T", self._settled(verb(*arguments, **named)))

        return call

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the bridge's loop and wait for it, with the caller's context.

        Raises: AwaitInstead inside an event loop; BridgeClosed; errors of `work`.
        """
        try:
            _require_no_loop()
        except AwaitInstead:
            work.close()
            raise
        waiting = _Waiting()
        token = caller_thread.set(waiting.run_here)
        try:
            ended = asyncio.run_coroutine_threadsafe(work, self._loop())
        finally:
            caller_thread.reset(token)
        ended.add_done_callback(waiting.leave)
        try:
            waiting.serve()
            return ended.result()
        except concurrent.futures.CancelledError as error:
            raise BridgeClosed from error
        except BaseException:
            ended.cancel()
            raise

    def seen(self, value: Any) -> Any:
        """Convert an attribute: a view of an object with async methods, a function for a method."""
        if not inspect.isroutine(value) and _has_verbs(value):
            return View(self, value)
        return self(value) if callable(value) else value

    def close(self) -> None:
        """Close what was opened on the loop and stop it, within 2 s. A later call restarts it."""
        with self._lock:
            running, self._running = self._running, None
        if running is None:
            return
        atexit.unregister(self.close)
        ended = asyncio.run_coroutine_threadsafe(_awaited(self._closing()), running.loop)
        with contextlib.suppress(Exception):
            # Connections that do not close in time are closed by the server.
            ended.result(CLOSING_S_MAX)
        running.loop.call_soon_threadsafe(running.loop.stop)
        running.thread.join(JOINING_S_MAX)

    def forget(self) -> None:
        """After a fork: drop the parent's thread and loop without touching them."""
        self._lock = threading.Lock()
        if self._running is not None:
            _left_to_parents.append(self._running)
            self._running = None
            atexit.unregister(self.close)

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                self._running = _start()
                atexit.register(self.close)
            return self._running.loop

    def _settled(self, answer: Any) -> Any:
        """The result of a call, awaited if necessary."""
        if inspect.iscoroutine(answer):
            return self.run(answer)
        if inspect.isawaitable(answer):
            return self.run(_awaited(answer))
        if hasattr(answer, "__aenter__") and not hasattr(answer, "__enter__"):
            return self._block(answer)
        return answer

    @contextlib.contextmanager
    def _block(self, block: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Convert an `async with` block to a `with` block."""
        stack = contextlib.AsyncExitStack()
        entered = self.run(stack.enter_async_context(block))
        with contextlib.ExitStack() as leaving:
            leaving.push(lambda *raised: self.run(stack.__aexit__(*raised)))
            yield entered


@dataclass(frozen=True, slots=True)
class _Running:
    """A loop and its thread."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread


class _Waiting:
    """A caller's thread that waits for its result and runs callbacks meanwhile."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_over = False

    async def run_here(self, work: Callable[[], T]) -> T:
        """Run `work` in the waiting thread. Raises: BridgeClosed if it no longer waits."""
        if self._is_over:
            raise BridgeClosed
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

        def tell(result: Any, error: Exception | None) -> None:
            if not answer.done():
                answer.set_result((result, error))

        def ask() -> None:
            result, failed = None, None
            try:
                result = work()
            # Ctrl-C is not caught: it ends the wait.
            except Exception as error:  # noqa: BLE001 - carried to the awaiting side
                failed = error
            loop.call_soon_threadsafe(tell, result, failed)

        self._asked.put(ask)
        result, error = await answer
        if error is not None:
            raise error
        return cast("T", result)

    def serve(self) -> None:
        """Run requested callbacks until the result is available."""
        while (ask := self._asked.get()) is not None:
            ask()

    def leave(self, _: object) -> None:
        """Stop waiting: the result is available."""
        self._is_over = True
        self._asked.put(None)


_bridges: Final[WeakSet[Bridge]] = WeakSet()
_left_to_parents: Final[list[_Running]] = []


def _forget_all() -> None:
    for bridge in list(_bridges):
        bridge.forget()


os.register_at_fork(after_in_child=_forget_all)


def _start() -> _Running:
    # Not the policy's loop: libuv loops do not survive a fork.
    loop = asyncio.SelectorEventLoop()
    thread = threading.Thread(target=_serve, args=(loop,), name="headrace-sync", daemon=True)
    thread.start()
    return _Running(loop, thread)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its remaining tasks."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=JOINING_S_MAX / 2))
    loop.close()


def _require_no_loop() -> None:
    """Raises: AwaitInstead if the current thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise AwaitInstead


def _has_verbs(value: object) -> bool:
    """Whether an object, or one of its public attributes, has public async methods."""
    held = (held for name, held in getattr(value, "__dict__", {}).items() if name[0] != "_")
    return _has_async_methods(type(value)) or any(
        inspect.iscoroutinefunction(each) or _has_async_methods(type(each)) for each in held
    )


def _has_async_methods(kind: type) -> bool:
    names = (name for name in dir(kind) if not name.startswith("_"))
    return any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in names)


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer


class JobService(Protocol):
    """The verbs of `Jobs` that tasks and handles call."""

    workflows: Any
    """The service of workflows; a `StepStore` for running ones."""

    async def enqueue_many(
        self,
        jobs: Sequence[NewJob],
        *,
        tx: Transaction | None = None,
        group: Group | None = None,
    ) -> list[int]:
        """Enqueue jobs; return their ids in order."""

    async def result(
        self, job_id: int, *, timeout_s: float | None = None, keeps_result: bool = True
    ) -> Any:
        """The result of a job."""

    async def job(self, job_id: int) -> Job:
        """The job in its current state."""

    async def why(self, job_id: int) -> Why:
        """Why the job is in its state."""

    async def cancel(
        self, job_id: int, *, running: bool = False, tx: Transaction | None = None
    ) -> bool:
        """Cancel a waiting job, with `running` also one that runs. Return whether it is."""


class Group:
    """An open group. Jobs can join it until its block ends."""

    def __init__(self, group_id: int) -> None:
        self.id = group_id
        self.is_open = True

    def require_open(self) -> None:
        """Raises: GroupClosed."""
        if not self.is_open:
            raise GroupClosed(self.id)

    def __repr__(self) -> str:
        return f"Group(id={self.id}, is_open={self.is_open})"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where jobs were enqueued: the service, and what their handles need of the task."""

    jobs: JobService
    keeps_result: bool
    bridge: Callable[[], Bridge] | None


class JobRef(int):
    """A job's id. It is an `int`; its methods query the database."""

    _origin: Origin

    @classmethod
    def of(cls, job_id: int, origin: Origin) -> JobRef:
        """The handle of job `job_id`, enqueued at `origin`."""
        ref = cls(job_id)
        ref._origin = origin
        return ref

    @property
    def id(self) -> int:
        """The id as a plain number."""
        return int(self)

    @property
    def sync(self) -> View:
        """The same methods for sync code: `job.sync.result(timeout_s=5)`. Raises: InvalidTask."""
        bridge = self._origin.bridge
        if bridge is None:
            raise InvalidTask(
                f"job {int(self)} belongs to no app: enqueue it through an app's task"
            )
        return View(bridge(), self)

    async def result(self, timeout_s: float | None = None) -> Any:
        """Wait up to `timeout_s` for the job to end; return what its handler returned.

        Raises: JobFailed, ResultGone, NoResultKept, ResultLate (a TimeoutError), JobUnknown.
        """
        keeps_result = self._origin.keeps_result
        return await self._origin.jobs.result(
            int(self), timeout_s=timeout_s, keeps_result=keeps_result
        )

    async def job(self) -> Job:
        """The job in its current state."""
        return await self._origin.jobs.job(int(self))

    async def why(self) -> Why:
        """Why the job is in its state."""
        return await self._origin.jobs.why(int(self))

    async def cancel(self, *, running: bool = False, tx: Transaction | None = None) -> bool:
        """Cancel the job while it waits, with `running` also while it runs; see `Jobs.cancel`.

        Return whether it is cancelled. False: it runs, and its end was requested.
        Raises: JobNotWaiting.
        """
        return await self._origin.jobs.cancel(int(self), running=running, tx=tx)

    def __repr__(self) -> str:
        return f"JobRef({int(self)})"

    def __str__(self) -> str:
        return str(int(self))
