"""Supervise engines and roles: start them, restart them after a crash, leave none behind.

Engines start first. Each role is a process in its own session, so Ctrl-C in a terminal reaches
only this process, which stops roles before engines. Crashed processes restart with backoff. Roles
keep running while an engine is down, since they reconnect.

If the supervisor is killed, the kernel signals every child (see `engines.launcher`): engines stop
by themselves, roles receive SIGTERM, and `watch_parent` ends a role that hangs. If a role is
killed, the supervisor adopts and reaps the processes that the role had started.

A role reports readiness by one line of JSON on the descriptor HEADRACE_READY_FD (`announce_ready`).

`watch_code` implements `--reload`: it runs one role as a child and restarts it when code changes.
It compares modification times twice per second, which needs no dependency.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Final

from headrace.engines.children import ChildProcess, RestartDelay, adopt_orphans
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.endpoints import Endpoints
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import configure_logs, logger
from headrace.kernel.resilience import Backoff

PARENT_PID: Final = "HEADRACE_PARENT_PID"
READY_FD: Final = "HEADRACE_READY_FD"
GRACE_S: Final = 10.0
REAP_EVERY_S: Final = 1.0
RESTARTS: Final = Backoff(first_s=0.5, max_s=30.0)
EXIT_ORPHANED: Final = 70
_READY_BYTES_MAX: Final = 64 * 1024
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Role:
    """A process to keep running, and its command line."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """A change of state; `facts` are also the fields of its log line.

    Kinds: `role_started`, `role_ready`, `role_died`, `engine_died`, `engine_restarted`,
    `engine_not_restarted` and `stopping`.
    """

    kind: str
    name: str
    facts: Mapping[str, Any]


class Supervisor:
    """Keeps `roles` and embedded `engines`, if any, running until a stop is requested.

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
        self._starting: asyncio.Task[Any] | None = None
        self._entered = False

    def request_stop(self) -> None:
        """Start the orderly stop; a second call kills without grace periods."""
        if self._stop.is_set():
            self._hurry.set()
            return
        self._stop.set()
        self._report("stopping", "all", {})
        if self._starting is not None:
            self._starting.cancel()

    @asynccontextmanager
    async def started_engines(self) -> AsyncIterator[Endpoints | None]:
        """Run engines and handle signals inside the block.

        A signal before `run` cancels the block and raises KeyboardInterrupt. Also raises what
        `EmbeddedEngines.start` raises.
        """
        adopt_orphans()
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
            ChildProcess.reap_orphans()
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def run(self) -> int:
        """Keep everything running until a signal or `request_stop`; return exit code 0."""
        if not self._entered:
            async with self.started_engines():
                return await self.run()
        self._starting = None
        tasks = [asyncio.create_task(self._keep_role(role)) for role in self._roles]
        tasks.append(asyncio.create_task(_keep_reaping()))
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
            task.result()  # a keeper task ends only by an internal error: raise it
        return 0

    async def wait_ready(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """Wait until each role was ready once; return the facts announced by each.

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
        # A closed terminal or broken pipe must not end the supervisor.
        with suppress(OSError):
            (log.warning if is_fault else log.info)(kind, name=name, **facts)
            if self._on_event is not None:
                self._on_event(Event(kind, name, facts))

    async def _keep_role(self, role: Role) -> None:
        delay = RestartDelay(self._restarts)
        while True:
            delay.note_start()
            exit_code = await self._run_role(role)
            delay_s = delay.next_s()
            facts = {"exit_code": exit_code, "deaths": delay.deaths, "restart_in_s": delay_s}
            self._report("role_died", role.name, facts)
            await asyncio.sleep(delay_s)

    async def _run_role(self, role: Role) -> int:
        """Run the role until it exits; on cancellation, stop it in order."""
        process, ready = await start_announcing(role.argv, partial(self._note_ready, role))
        self._report("role_started", role.name, {"pid": process.pid})
        try:
            return await process.wait()
        finally:
            await process.stop([(signal.SIGTERM, self._grace_s)], self._hurry)
            ready.cancel()

    def _note_ready(self, role: Role, facts: dict[str, Any]) -> None:
        self._ready[role.name] = facts
        self._changed.set()
        self._report("role_ready", role.name, {"announced": facts})

    async def _keep_engines(self, engines: EmbeddedEngines) -> None:
        delays: defaultdict[str, RestartDelay] = defaultdict(lambda: RestartDelay(self._restarts))
        while True:
            name = await engines.wait_exit()
            await self._restart_engine(engines, name, delays[name])
            delays[name].note_start()

    async def _restart_engine(
        self, engines: EmbeddedEngines, name: str, delay: RestartDelay
    ) -> None:
        kind, facts = "engine_died", dict[str, Any]()
        while True:
            delay_s = delay.next_s()
            self._report(kind, name, {"deaths": delay.deaths, "restart_in_s": delay_s, **facts})
            await asyncio.sleep(delay_s)
            try:
                await engines.restart(name)
            except (HeadraceError, OSError) as error:
                kind, facts = "engine_not_restarted", {"error": str(error)}
                continue
            self._report("engine_restarted", name, {})
            return


async def start_announcing(
    command: Sequence[str],
    on_ready: Callable[[dict[str, Any]], None],
    *,
    files: tuple[int, ...] = (),
    leads_session: bool = True,
) -> tuple[ChildProcess, asyncio.Task[bool]]:
    """Start a process; `on_ready` receives what it announces by `announce_ready`.

    The task returns whether it did.
    """
    reading, writing = os.pipe()
    ready = asyncio.create_task(_read_ready(os.fdopen(reading, "rb", buffering=0), on_ready))
    own = {PARENT_PID: str(os.getpid()), READY_FD: str(writing)}
    try:
        process = await ChildProcess.start(
            command,
            leads_session=leads_session,
            environment={**os.environ, **own},
            files=(*files, writing),
        )
    except BaseException:
        ready.cancel()
        raise
    finally:
        os.close(writing)
    return process, ready


async def _read_ready(pipe: BinaryIO, on_ready: Callable[[dict[str, Any]], None]) -> bool:
    with pipe:
        reader = asyncio.StreamReader(limit=_READY_BYTES_MAX)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            line = await reader.readline()
            facts = json.loads(line) if line else None
        except ValueError as error:
            log.warning("ready_line_not_understood", error=str(error))
            return False
        finally:
            transport.close()
    if not isinstance(facts, dict) or facts.pop("ready", False) is not True:
        return False
    on_ready(facts)
    return True


async def _keep_reaping() -> None:
    while True:
        ChildProcess.reap_orphans()
        await asyncio.sleep(REAP_EVERY_S)


def announce_ready(**facts: Any) -> None:
    """Report readiness to the supervisor, if any; `listen` is an address."""
    descriptor = os.environ.pop(READY_FD, None)
    if descriptor is None:
        return
    with os.fdopen(int(descriptor), "wb", buffering=0) as pipe:
        pipe.write(json.dumps({"ready": True, **facts}).encode() + b"\n")


def watch_parent(*, grace_s: float = GRACE_S) -> None:
    """Start a thread that ends this role `grace_s` after its supervisor died.

    The kernel sends SIGTERM first; this ends a role that does not react to it. Without a
    supervisor it has no effect.
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
    # Standard error may be a closed pipe.
    with suppress(OSError):
        os.write(
            2, f"the supervisor died and this role did not stop within {grace_s:.0f} s\n".encode()
        )
    os._exit(EXIT_ORPHANED)


def _wait_parent_gone(parent: int) -> None:
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        # The parent is dead, or the kernel or sandbox has no pidfds: poll once a second.
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


LOOK_EVERY_S: Final = 0.5
FILES_MAX: Final = 20_000
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "headrace-data"})
log = logger(__name__)


def watch_code() -> int:
    """Run this command line without `--reload`, restart it on changes; return its exit code."""
    configure_logs("reload")
    command = [sys.executable, "-P", "-u", "-m", "headrace"]
    command += [word for word in sys.argv[1:] if word != "--reload"]
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    seen = stamps(Path.cwd())
    child = _start(command)
    while not stopping:
        time.sleep(LOOK_EVERY_S)
        now = stamps(Path.cwd())
        if now != seen:
            changed = {file for file, _ in set(now.items()) ^ set(seen.items())}
            log.info("code_changed", files=sorted(changed)[:5])
            _end(child)
            seen, child = now, _start(command)
    return _end(child)


def stamps(folder: Path) -> dict[str, int]:
    """Modification times in ns of Python files below `folder`, except in SKIPPED."""
    found: dict[str, int] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in SKIPPED]
        for name in files:
            if name.endswith(".py") and len(found) < FILES_MAX:
                path = os.path.join(place, name)  # noqa: PTH118 - runs twice per second
                try:
                    found[path] = os.stat(path).st_mtime_ns  # noqa: PTH116 - as above
                except FileNotFoundError:
                    continue
    return found


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # Own process group: Ctrl-C reaches only this process, which then stops the child.
    return subprocess.Popen(command, process_group=0)


def _end(child: subprocess.Popen[bytes]) -> int:
    child.terminate()
    return child.wait()
