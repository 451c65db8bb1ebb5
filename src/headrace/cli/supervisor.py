"""One parent for engines and roles: starts them, restarts what dies, leaves nothing behind.

Engines first, then the roles, each a process of its own in a session of its own, so that a terminal's
Ctrl-C reaches this parent alone and the stop goes in order: roles, then engines. What dies is restarted
with backoff and reported; roles keep running while an engine is away, since they reconnect.

If this parent itself is killed, the kernel tells every child (see `engines.embedded.launch`): engines end
by themselves, a role gets SIGTERM, and `watch_parent` ends one that hangs in its answer to it.

A role says that it is ready by one line of JSON on the descriptor HEADRACE_READY_FD (`announce_ready`).
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.embedded.process import launcher_command
from headrace.engines.endpoints import Endpoints
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

PARENT_PID: Final = "HEADRACE_PARENT_PID"
READY_FD: Final = "HEADRACE_READY_FD"
GRACE_S: Final = 10.0
HURRIED_S: Final = 0.5
HEALTHY_S: Final = 60.0
"""A child that lived this long starts its backoff anew when it dies."""
RESTARTS: Final = Backoff(first_s=0.5, max_s=30.0)
EXIT_ORPHANED: Final = 70
_READY_BYTES_MAX: Final = 64 * 1024
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Role:
    """A process to keep running: its full command line, and what to add to our environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """What happened: `role_started`, `role_ready`, `role_died`, `engine_died`, `engine_restarted`,
    `engine_not_restarted` or `stopping`; `facts` is also what the log line carries."""

    kind: str
    name: str
    facts: Mapping[str, Any]


class Supervisor:
    """Keeps `engines` (None: they are elsewhere) and `roles` running until it is told to stop.

    Use it from the main thread. `on_event` is called in the loop, for progress shown to a person.
    """

    def __init__(
        self,
        engines: EmbeddedEngines | None,
        roles: Sequence[Role],
        *,
        on_event: Callable[[Event], None] | None = None,
        grace_s: float = GRACE_S,
        restarts: Backoff = RESTARTS,
    ) -> None:
        self._engines = engines
        self._roles = tuple(roles)
        self._on_event = on_event
        self._grace_s = grace_s
        self._restarts = restarts
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()
        self._ready: dict[str, dict[str, Any]] = {}
        self._pids: dict[str, int] = {}
        self._starting: asyncio.Task[Any] | None = None
        self._entered = False

    @property
    def role_pids(self) -> dict[str, int]:
        """Pids of the roles that run now."""
        return dict(self._pids)

    def request_stop(self) -> None:
        """Begin the orderly stop; a second call cuts every patience short."""
        if self._stop.is_set():
            self._hurry.set()
            return
        self._stop.set()
        self._report("stopping", "all", {})
        if self._starting is not None:
            self._starting.cancel()

    @asynccontextmanager
    async def started_engines(self) -> AsyncIterator[Endpoints | None]:
        """Engines run inside the block, and signals are ours; both end with it.

        A signal before `run` cancels the block and leaves as KeyboardInterrupt. Raises: as
        `EmbeddedEngines.start`.
        """
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self.request_stop)
        self._starting, self._entered = asyncio.current_task(), True
        try:
            yield await self._engines.start() if self._engines is not None else None
        except asyncio.CancelledError:
            if self._starting is None or not self._stop.is_set():
                raise
            self._starting.uncancel()
            raise KeyboardInterrupt from None
        finally:
            self._starting, self._entered = None, False
            if self._engines is not None:
                await self._engines.stop(self._hurry)
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def run(self) -> int:
        """Keep everything running until a signal or `request_stop`; returns the exit code, 0."""
        if not self._entered:
            async with self.started_engines():
                return await self.run()
        self._starting = None
        tasks = [asyncio.create_task(self._keep_role(role)) for role in self._roles]
        if self._engines is not None:
            tasks.append(asyncio.create_task(self._keep_engines(self._engines)))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
        for task in done - {stopping}:
            task.result()  # a keeper ends only by a fault of ours: let it be seen
        return 0

    async def wait_ready(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """Wait until each role was ready once; return what each announced, by role.

        Raises: TimeoutError, naming the roles that were not.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._missing():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = ", ".join(self._missing())
            raise TimeoutError(f"not ready within {timeout_s:.0f} s: {names}") from None
        return dict(self._ready)

    def _missing(self) -> list[str]:
        return [role.name for role in self._roles if role.name not in self._ready]

    def _report(self, kind: str, name: str, facts: Mapping[str, Any]) -> None:
        is_fault = kind in ("role_died", "engine_died", "engine_not_restarted")
        # A terminal that was closed or a pipe whose reader died must not end the supervision.
        with suppress(OSError):
            (log.warning if is_fault else log.info)(kind, name=name, **facts)
            if self._on_event is not None:
                self._on_event(Event(kind, name, facts))

    async def _keep_role(self, role: Role) -> None:
        deaths = 0
        while True:
            started_s = time.monotonic()
            exit_code = await self._run_role(role)
            deaths = 1 if time.monotonic() - started_s > HEALTHY_S else deaths + 1
            delay_s = round(self._restarts.delay_s(deaths), 2)
            facts = {"exit_code": exit_code, "deaths": deaths, "restart_in_s": delay_s}
            self._report("role_died", role.name, facts)
            await asyncio.sleep(delay_s)

    async def _run_role(self, role: Role) -> int:
        """Run it once to its end; when cancelled, end it in order first."""
        reading, writing = os.pipe()
        pipe = os.fdopen(reading, "rb", buffering=0)
        ready = asyncio.create_task(self._read_ready(role, pipe))
        ready.add_done_callback(lambda _: pipe.close())
        own = {PARENT_PID: str(os.getpid()), READY_FD: str(writing)}
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher_command(signal.SIGTERM),
                "--",
                *role.argv,
                env={**os.environ, **role.env, **own},
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(writing,),
                start_new_session=True,
            )
        except BaseException:
            ready.cancel()
            raise
        finally:
            os.close(writing)
        self._pids[role.name] = process.pid
        self._report("role_started", role.name, {"pid": process.pid})
        try:
            return await process.wait()
        finally:
            await self._end(process)
            del self._pids[role.name]
            ready.cancel()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        ended = asyncio.ensure_future(process.wait())
        hurried = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait(
                {ended, hurried}, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended.done():
                await asyncio.wait({ended}, timeout=HURRIED_S)
        finally:
            # Also when this wait itself is cancelled: the role must not outlive us. Its session goes
            # with it, since a role that had to be killed has not ended its own children.
            hurried.cancel()
            if process.returncode is None:
                _kill_session(process.pid)
        await ended

    async def _read_ready(self, role: Role, pipe: BinaryIO) -> None:
        reader = asyncio.StreamReader(limit=_READY_BYTES_MAX)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            line = await reader.readline()
            facts = json.loads(line) if line else None
        except ValueError as error:
            log.warning("ready_line_not_understood", name=role.name, error=str(error))
            return
        finally:
            transport.close()
        if isinstance(facts, dict) and facts.pop("ready", False) is True:
            self._ready[role.name] = facts
            self._changed.set()
            self._report("role_ready", role.name, {"announced": facts})

    async def _keep_engines(self, engines: EmbeddedEngines) -> None:
        began_s = time.monotonic()
        deaths, healthy_since_s = Counter[str](), dict[str, float]()
        while True:
            name = await engines.wait_exit()
            lived_s = time.monotonic() - healthy_since_s.get(name, began_s)
            deaths[name] = 1 if lived_s > HEALTHY_S else deaths[name] + 1
            deaths[name] = await self._restart_engine(engines, name, deaths[name])
            healthy_since_s[name] = time.monotonic()

    async def _restart_engine(self, engines: EmbeddedEngines, name: str, deaths: int) -> int:
        kind, facts = "engine_died", dict[str, Any]()
        while True:
            delay_s = round(self._restarts.delay_s(deaths), 2)
            self._report(kind, name, {"deaths": deaths, "restart_in_s": delay_s, **facts})
            await asyncio.sleep(delay_s)
            try:
                await engines.restart(name)
            except (HeadraceError, OSError) as error:
                kind, facts, deaths = "engine_not_restarted", {"error": str(error)}, deaths + 1
                continue
            self._report("engine_restarted", name, {})
            return deaths


def _kill_session(leader: int) -> None:
    """Kill a session's leader and every process in it, whatever group it is in."""
    os.killpg(leader, signal.SIGKILL)
    while members := [pid for pid in _running_pids() if _session_of(pid) == leader]:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _running_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session_of(pid: int) -> int:
    """The session of a process that runs; 0: it does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[3])


def announce_ready(**facts: Any) -> None:
    """Tell the supervisor, where there is one, that this role serves now; `listen` is an address."""
    descriptor = os.environ.pop(READY_FD, None)
    if descriptor is None:
        return
    with os.fdopen(int(descriptor), "wb", buffering=0) as pipe:
        pipe.write(json.dumps({"ready": True, **facts}).encode() + b"\n")


def watch_parent(*, grace_s: float = GRACE_S) -> None:
    """End this role `grace_s` after its supervisor is gone, whatever it hangs in; a daemon thread.

    The kernel has sent SIGTERM by then; this is for a role that does not get round to obeying it. Without
    a supervisor it does nothing.
    """
    parent = os.environ.pop(PARENT_PID, None)
    if parent is not None:
        arguments = (int(parent), grace_s)
        threading.Thread(
            target=_end_with_parent, args=arguments, name="watch-parent", daemon=True
        ).start()


def _end_with_parent(parent: int, grace_s: float) -> None:
    _wait_parent_gone(parent)
    time.sleep(grace_s)
    # Standard error may lead to whoever is gone.
    with suppress(OSError):
        os.write(2, f"the supervisor is gone, this role did not end in {grace_s:.0f} s\n".encode())
    os._exit(EXIT_ORPHANED)


def _wait_parent_gone(parent: int) -> None:
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        # Gone already, or a kernel or sandbox without pidfds: asking once a second does as well.
        while os.getppid() == parent:
            time.sleep(1)
        return
    try:
        if os.getppid() == parent:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
    finally:
        os.close(pidfd)
