"""The world of one run: processes, network, clocks and randomness of a seed, and its history.

`World.running` replaces the clocks and the random sources of this interpreter, so that the
product's modules need no change: `time`, `random`, `os.urandom` and the event loop. Wall clocks
differ by process. Every source of chance has its own stream, so that a smaller plan of faults
changes as little else as possible.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import UTC, datetime
from typing import Any, Final

import structlog
from tests.kit.history import LOST, Event, History, Recorder

from verification.simulation.loop import CURRENT, OUTSIDE, Process, SimulatedLoop

BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""Wall clock at the beginning of every run."""
RESTART_S: Final = (0.05, 2.0)
"""A supervisor restarts a dead process after a time in this range."""
LATENCY_S: Final = (0.0002, 0.002)
CUT_MAX_S: Final = 3600.0


class Unreachable(Exception):
    """A message did not arrive: its link is cut, or its receiver is dead."""


class Network:
    """Links between named processes: latency, loss, and cuts in one or both directions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.stream("network")
        self._cuts: dict[tuple[str, str], int] = {}
        self._slow: dict[str, float] = {}
        self._loss: dict[str, float] = {}

    def cut(self, sender: str, receiver: str) -> Callable[[], None]:
        """Drop all messages in one direction until the returned function is called.

        `*` is everyone.
        """
        link = (sender, receiver)
        self._cuts[link] = self._cuts.get(link, 0) + 1

        def heal() -> None:
            self._cuts[link] -= 1
            if not self._cuts[link]:
                del self._cuts[link]

        return heal

    def slow(self, name: str, latency_s: float) -> Callable[[], None]:
        """Delay messages of and to a process by up to `latency_s` more; the result ends it."""
        self._slow[name] = latency_s
        return lambda: self._slow.pop(name, None) and None

    def lose(self, name: str, share: float) -> Callable[[], None]:
        """Lose this share of the messages of and to a process; the result ends it."""
        self._loss[name] = share
        return lambda: self._loss.pop(name, None) and None

    def is_disturbed(self, name: str) -> bool:
        """Whether messages of or to a process are lost or late."""
        has_cut = any(name in link for link in self._cuts)
        return has_cut or name in self._slow or name in self._loss

    def is_cut(self, sender: str, receiver: str) -> bool:
        """Whether messages in this direction are dropped."""
        cuts = self._cuts
        return bool(cuts) and any(
            link in cuts for link in ((sender, receiver), (sender, "*"), ("*", receiver))
        )

    async def trip(self, sender: str, receiver: str, *, timeout_s: float) -> None:
        """Wait while a message travels. Raises: Unreachable, after `timeout_s` if it is lost."""
        delay_s = self.delay_s(sender, receiver)
        if delay_s is None:
            await asyncio.sleep(timeout_s)
            raise Unreachable(f"{sender} to {receiver}")
        await asyncio.sleep(delay_s)

    def delay_s(self, sender: str, receiver: str) -> float | None:
        """How long a message travels that is sent now; None: it is lost."""
        if (self._cuts or self._loss) and self._is_lost(sender, receiver):
            return None
        first_s, last_s = LATENCY_S
        if self._slow:
            last_s += max(self._slow.get(sender, 0.0), self._slow.get(receiver, 0.0))
        return first_s + (last_s - first_s) * self._chance.random()

    def _is_lost(self, sender: str, receiver: str) -> bool:
        if self.is_cut(sender, receiver):
            return True
        share = max(self._loss.get(sender, 0.0), self._loss.get(receiver, 0.0))
        return share > 0 and self._chance.random() < share


class World:
    """Everything of one run. Create it, `start` processes, and `run` the scenario's coroutine."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = SimulatedLoop(self.stream("order"))
        self.loop.on_error = self._note_error
        self.network = Network(self)
        self.processes: dict[str, Process] = {}
        self.recorder = WorldRecorder(self)
        self.errors: list[str] = []
        """Errors that no task awaited, and ends of processes that no fault caused."""
        self._mains: dict[str, Callable[[], Awaitable[None]]] = {}
        self._children: set[str] = set()
        """Processes that only their parents start."""
        self._on_death: list[Callable[[Process], None]] = []
        self._graveyard: list[Process] = []
        self._digest = hashlib.sha256()
        self._restart_chance = self.stream("restarts")
        self._is_ending = False
        self.replaced: dict[tuple[Any, str], Any] = {}
        """Attributes that a scenario replaces during its run, by their owner and name."""

    def stream(self, name: str) -> random.Random:
        """A random source of its own, derived from the seed."""
        return random.Random(f"{self.seed}/{name}")

    @property
    def now_s(self) -> float:
        """Virtual seconds since the run began."""
        return self.loop.time()

    def trace(self, *what: object) -> None:
        """Add a fact to the digest, by which two runs of a seed are compared."""
        self._digest.update(repr((round(self.now_s, 9), what)).encode())

    @property
    def digest(self) -> str:
        """A hash of all that was traced."""
        return self._digest.hexdigest()[:16]

    # Processes

    def start(
        self, name: str, main: Callable[[], Awaitable[None]], *, is_child: bool = False
    ) -> Process:
        """Start a process that runs `main`; after a kill a supervisor starts it again.

        A child is started again by its parent alone.
        """
        self._mains[name] = main
        if is_child:
            self._children.add(name)
        process = Process(name)
        self.processes[name] = process
        process.context = copy_context()
        process.context.run(CURRENT.set, process)
        self.trace("start", name)
        task_context = process.context.copy()
        self.loop.create_task(self._supervised(process, main), name=name, context=task_context)
        return process

    async def _supervised(self, process: Process, main: Callable[[], Awaitable[None]]) -> None:
        try:
            await main()
        except Exception as error:  # noqa: BLE001 - a role that ends by itself is a finding
            if not self._is_ending:
                self.errors.append(f"{process.name} ended by itself: {error!r}")

    def end(self) -> None:
        """Let processes end."""
        self._is_ending = True

    def on_death(self, note: Callable[[Process], None]) -> None:
        """Call `note` with each process that is killed: its peers' connections end."""
        self._on_death.append(note)

    def kill(self, name: str, *, restarts: bool = True) -> None:
        """End a process as SIGKILL does: nothing of it runs any more. No process: no effect."""
        process = self.processes.get(name)
        if process is None or not process.is_alive:
            return
        process.is_alive = False
        process.ready.clear()
        self._graveyard.append(process)
        self.trace("kill", name)
        self.recorder.note(LOST, "process", pid=self.recorder.pid_of(process))
        for note in self._on_death:
            note(process)
        if restarts and name not in self._children:
            delay_s = self._restart_chance.uniform(*RESTART_S)
            context = copy_context()
            context.run(CURRENT.set, OUTSIDE)
            self.loop.call_later(delay_s, self._restart, name, context=context)

    def _restart(self, name: str) -> None:
        if not self.processes[name].is_alive and not self._is_ending:
            clock_off_s = self.processes[name].clock_off_s
            self.start(name, self._mains[name]).clock_off_s = clock_off_s

    def pause(self, name: str) -> Callable[[], None]:
        """Stop a process as SIGSTOP does, until the returned function is called."""
        process = self.processes.get(name)
        if process is None or not process.is_alive:
            return lambda: None
        process.is_paused = True
        self.trace("pause", name)
        return lambda: self.loop.resume(process)

    def is_disturbed(self, name: str) -> bool:
        """Whether a process is dead or paused, or its network is not as it should be."""
        process = self.processes.get(name)
        is_running = process is not None and process.is_alive and not process.is_paused
        return not is_running or self.network.is_disturbed(name)

    def in_process(
        self, process: Process, delay_s: float, call: Callable[..., Any], *args: Any
    ) -> None:
        """Call a function later inside a process, as when a message arrives there.

        A process that has died by then does not receive it.
        """
        self.loop.call_later(delay_s, call, *args, context=process.context)

    def step_clock(self, name: str, by_s: float) -> None:
        """Step the wall clock of a process."""
        if name not in self.processes:
            return
        self.processes[name].clock_off_s += by_s
        self.trace("clock", name, by_s)

    # A run

    def run(self, scenario: Callable[[], Awaitable[None]], *, hours_max: float) -> None:
        """Run a coroutine in this world. Raises: SimulationStuck, TimeoutError, its own error."""
        with self.running(), silent_logs():
            self.loop.run_until_complete(self._limited(scenario, hours_max * 3600))

    async def _limited(self, scenario: Callable[[], Awaitable[None]], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await scenario()

    def wall_s(self) -> float:
        """The wall clock of the current process, in seconds since 1970."""
        return BEGIN.timestamp() + self.loop.time() + CURRENT.get().clock_off_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace the clocks and random sources of this interpreter inside the block."""
        monotonic_s, wall_s = self.loop.time, self.wall_s
        random_bytes = self.stream("urandom").randbytes
        replaced: dict[tuple[Any, str], Any] = {
            (time, "monotonic"): monotonic_s,
            (time, "perf_counter"): monotonic_s,
            (time, "monotonic_ns"): lambda: round(monotonic_s() * 1e9),
            (time, "time"): wall_s,
            (time, "time_ns"): lambda: round(wall_s() * 1e9),
            (os, "urandom"): random_bytes,
            (random, "_urandom"): random_bytes,  # of `secrets`
            (os, "getloadavg"): lambda: (0.0, 0.0, 0.0),
            (os, "sched_getaffinity"): lambda _pid: {0, 1},
            **self.replaced,
        }
        kept = {place: getattr(*place) for place in replaced}
        state = random.getstate()
        random.seed(f"{self.seed}/random")
        for (module, name), value in replaced.items():
            setattr(module, name, value)
        try:
            yield
        finally:
            for (module, name), value in kept.items():
                setattr(module, name, value)
            random.setstate(state)

    def _note_error(self, context: dict[str, Any]) -> None:
        if not self._is_ending:
            self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")


class WorldRecorder(Recorder):
    """Records the history of a world in memory, with virtual times and a number per process."""

    def __init__(self, world: World) -> None:  # the base class opens a folder
        self._world = world
        self._events: list[Event] = []
        self._pids: dict[Process, int] = {}
        self._next = 0

    @property
    def history(self) -> History:
        """All events so far."""
        return History(tuple(self._events))

    def pid_of(self, process: Process) -> int:
        """The number of a process."""
        return self._pids.setdefault(process, len(self._pids) + 1)

    def note(
        self, kind: str, what: str, *, call: str = "", pid: int | None = None, **facts: Any
    ) -> None:
        """As `Recorder.note`."""
        own = self.pid_of(CURRENT.get()) if pid is None else pid
        at_ns = round(self._world.now_s * 1e9)
        event = Event(kind=kind, what=what, at_ns=at_ns, pid=own, call=call, facts=facts)
        self._events.append(event)
        self._world.trace(kind, what, facts)

    def close(self) -> None:
        """Nothing to close."""

    def _next_call(self) -> str:
        self._next += 1
        return str(self._next)


@contextmanager
def silent_logs() -> Iterator[None]:
    """Drop the product's log, unless logging is on: its lines would cost most of the time."""
    if logging.root.manager.disable < logging.CRITICAL:
        yield
        return
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
