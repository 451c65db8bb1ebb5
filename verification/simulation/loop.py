"""An event loop with virtual time, in which many simulated processes run.

Each callback belongs to the process of its context. The loop runs the ready callbacks of one
process in their order, as asyncio does, then those of another process; the seed chooses which. When
nothing is ready, time moves to the next timer. A killed process never runs again: its tasks are
neither cancelled nor collected, so no `finally` of them runs, as after SIGKILL. A paused process
keeps its callbacks until it resumes.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar

T = TypeVar("T")
CALLBACKS_PER_INSTANT_MAX: Final = 1_000_000
"""More callbacks without any time between them are an endless loop."""
RESOLUTION_S: Final = 1e-9
"""Of the clock: a shorter delay would be lost in the rounding of the virtual time."""


class Process:
    """A simulated process: a name, and whether it lives, runs, and by how much its clock is off."""

    __slots__ = ("clock_off_s", "context", "is_alive", "is_paused", "name", "ready", "tasks")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self.clock_off_s = 0.0
        """Added to its wall clock."""
        self.context = Context()
        """Of messages that arrive."""
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Keeps the tasks of a dead process, so that they are not collected."""

    def __repr__(self) -> str:
        return f"<{self.name}>"


class _Handle(asyncio.Handle):
    """A callback without the costs of asyncio's debug mode."""

    __slots__ = ()

    def __init__(  # not the base class's, which checks the debug mode
        self,
        callback: Callable[..., object],
        args: Any,
        loop: SimulatedLoop,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class _TimerHandle(asyncio.TimerHandle):
    """The same for a timer. Cancelled timers stay in the heap until their time."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Any,
        loop: SimulatedLoop,
        context: Context | None,
    ) -> None:
        _Handle.__init__(self, callback, args, loop, context)  # type: ignore[arg-type]
        self._when = when
        self._scheduled = False

    def cancel(self) -> None:
        """As asyncio's."""
        self._cancelled = True
        self._callback = self._args = None


OUTSIDE: Final = Process("outside")
"""The process of the scenario itself, which no fault hits."""
CURRENT: Final[ContextVar[Process]] = ContextVar("process", default=OUTSIDE)


class SimulationStuck(Exception):
    """Nothing is left to run, or time does not move: the code under test never ends."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs callbacks of simulated processes in virtual time; `chance` orders the processes."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._added = 0
        self._waiting: dict[Process, None] = {}
        """Processes with ready callbacks that may run."""
        self._is_running = False
        self._is_closed = False
        self.steps = 0
        """Callbacks that were run."""
        self.on_error: Callable[[dict[str, Any]], None] = lambda _context: None
        """Receives errors that no task awaited."""
        self._servers: dict[str, Callable[[Callable[[], Any]], Awaitable[Any]]] = {}

    # What asyncio calls

    def time(self) -> float:
        """Seconds since the run began."""
        return self._now_s

    def call_soon(  # type: ignore[override]  # the stubs' variadic generics
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's."""
        handle = _Handle(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(  # type: ignore[override]  # the stubs' variadic generics
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's; time moves by any delay, however small."""
        if delay > 0:
            delay = max(delay, RESOLUTION_S)
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # the stubs' variadic generics
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's."""
        handle = _TimerHandle(when, callback, args, self, context)
        self._added += 1
        heapq.heappush(self._timers, (when, self._added, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """As asyncio's."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # the stubs' coroutine type
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """As asyncio's; the process of the context keeps the task."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        process = CURRENT.get() if context is None else context.get(CURRENT, OUTSIDE)
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop)
        return task

    async def create_connection(  # type: ignore[override]  # servers of the simulation only
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_options: Any
    ) -> tuple[Any, Any]:
        """As asyncio's, to a server of `listen`. Raises: OSError."""
        transport = await self._servers[host](protocol_factory)
        return transport, transport.protocol

    async def run_in_executor(  # type: ignore[override]  # asyncio returns a future
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> T:
        """Run a thread's function at once; its result arrives later, as from a thread."""
        result = func(*args)
        await asyncio.sleep(self._chance.uniform(0.0, 0.002))
        return result

    def get_debug(self) -> bool:
        """As asyncio's."""
        return False

    def is_running(self) -> bool:
        """As asyncio's."""
        return self._is_running

    def is_closed(self) -> bool:
        """As asyncio's."""
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As asyncio's."""
        self.on_error(context)

    def remove_reader(self, fd: Any) -> bool:
        """As asyncio's; no descriptor is watched here."""
        return False

    async def shutdown_asyncgens(self) -> None:
        """As asyncio's; nothing to do."""

    # What the simulation calls

    def run_until_complete(self, future: Any) -> Any:
        """Run until the future or coroutine is done. Raises: SimulationStuck; its own error."""
        asyncio.events._set_running_loop(self)
        self._is_running = True
        try:
            task = asyncio.ensure_future(future, loop=self)
            while not task.done():
                self._run_instant()
                if not task.done():
                    self._advance()
            return task.result()
        finally:
            self._is_running = False
            asyncio.events._set_running_loop(None)

    def listen(self, host: str, connect: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        """Let `create_connection` to `host` call `connect`, which returns a transport."""
        self._servers[host] = connect

    def close(self) -> None:
        """Drop everything that is left, without running it."""
        self._timers.clear()
        self._waiting.clear()
        self._is_closed = True

    def resume(self, process: Process) -> None:
        """Let a paused process run again, with all callbacks that became ready meanwhile."""
        process.is_paused = False
        if process.ready:
            self._waiting[process] = None

    def _add(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(CURRENT, OUTSIDE)  # type: ignore[attr-defined]
        if not process.is_alive:
            return
        process.ready.append(handle)
        if not process.is_paused:
            self._waiting[process] = None

    def _run_instant(self) -> None:
        """Run callbacks until none is ready at this time."""
        first = self.steps
        while self._waiting:
            process = self._next_process()
            ready = process.ready
            for _ in range(len(ready)):
                if not ready or not process.is_alive or process.is_paused:
                    break
                handle = ready.popleft()
                if not handle._cancelled:
                    self.steps += 1
                    handle._run()
            if not process.is_alive:
                ready.clear()
            if not ready or process.is_paused:
                self._waiting.pop(process, None)
            if self.steps - first > CALLBACKS_PER_INSTANT_MAX:
                raise SimulationStuck(
                    f"time does not move at {self._now_s:.6f} s: {process} never waits"
                )

    def _next_process(self) -> Process:
        if len(self._waiting) == 1:
            return next(iter(self._waiting))
        return self._chance.choice(list(self._waiting))

    def _advance(self) -> None:
        """Move time to the next timer and make its callbacks ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise SimulationStuck(f"nothing is left to run at {self._now_s:.6f} s")
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:
                self._add(handle)
