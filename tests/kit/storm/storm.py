"""A storm: real roles on real engines, the workloads of some rooms, faults, and the checkers.

    await weather(folder, rooms=[JobsRoom], faults=JOB_FAULTS, rounds=1, pause_s=(0.1, 0.5))

A room starts its workload and judges its history. FAULTS is the table of faults; each happens once
a round, in random order and at random moments. A supervisor restarts roles that died; a role that
ended without a fault is a finding. The seed is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from tests.kit.chaos import BLACK_HOLE, PASS, RESET, ChaosProxy, Mode, delay
from tests.kit.checkers import Finding
from tests.kit.processes import HeadraceProcess, descendants, free_ports, is_alive
from tests.kit.storm.fleet import HEARTBEAT_S, SETTINGS, Fleet, slot_pids, zygote_pid
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.endpoints import Endpoints
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.kernel.errors import Unavailable
from headrace.web.tokens import Tokens

LEASE_S = 2.0
LOST_AFTER_S = LEASE_S - HEARTBEAT_S - 0.3
SILENT_S = LEASE_S + 0.5
"""A stopped host is declared dead within this time."""
PREFIX = "storm"
SECRET = "the secret of a storm, thirty-two characters"
STORM_SETTINGS = {
    **SETTINGS,
    "JOBS_LEASE": f"{LEASE_S}s",
    "JOBS_SWEEP_EVERY": "200ms",
    "JOBS_PLAN_EVERY": "1s",
    "JOBS_FLOATS": "3",
    "JOBS_LOSSES_MAX": "12",
    "POSTGRES_CONNECT_TIMEOUT": "2s",
    "POSTGRES_STATEMENT_TIMEOUT": "5s",
    "FEED_SHARDS": "2",
    "FEED_SWEEP_EVERY": "100ms",
    "VIEWS_FLUSH_EVERY": "50ms",
    "VIEWS_LEASE": "1s",
    "SECRET": SECRET,
}
ROLES: Final = {
    "a0": "agent",
    "a1": "agent",
    "w0": "work",
    "s0": "scheduler",
    "s1": "scheduler",
    "f0": "flusher",
    "f1": "flusher",
    "api": "api",
}
FAR: Final = ("a1", "w0")
"""Roles whose connections to PostgreSQL pass through the proxy."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a workload; what was neither acknowledged nor is unknown was refused."""

    operations: int = 0
    acknowledged: int = 0
    unknown: int = 0


class Room(Protocol):
    """The workload and the checkers of one room."""

    name: str
    roles: tuple[str, ...]
    """Kinds of the roles that it needs."""

    async def begin(self, storm: Storm) -> None:
        """Prepare, while no role runs."""

    def clients(self) -> list[Callable[[asyncio.Event], Awaitable[None]]]:
        """Functions that send requests until the event is set."""

    async def is_settled(self) -> bool:
        """Whether all accepted work has ended. May raise Unavailable."""

    async def findings(self) -> list[Finding]:
        """Broken promises since the previous call; the room is settled."""

    async def last_findings(self) -> list[Finding]:
        """Broken promises of all workloads together, after the last `findings`."""

    def tally(self) -> Tally:
        """Counts since the previous call."""

    def require_work(self) -> None:
        """Fail if too little happened for the checkers to mean something."""

    async def round_trip(self) -> bool:
        """Send one request; return whether its effect is visible. May raise Unavailable."""

    async def close(self) -> None:
        """Close connections."""


class Storm(Fleet):
    """The roles of some rooms, the faults that hit them and the supervisor that restarts them."""

    def __init__(self, folder: Path, engines: EmbeddedEngines, proxy: ChaosProxy, **parts: Any):
        self.endpoints: Endpoints = parts["endpoints"]
        urls = {"POSTGRES_URL": self.endpoints.postgres_url}
        urls |= {"VALKEY_URL": self.endpoints.valkey_url, "VALKEY_PREFIX": PREFIX}
        urls |= {"BLOBS_URL": self.endpoints.blobs_url}
        super().__init__(folder, parts["postgres"], urls=urls, **STORM_SETTINGS)
        self.disk = folder
        """The folder of the rooms' own data."""
        self.engines, self.proxy, self.chance = engines, proxy, parts["chance"]
        self.roles: dict[str, HeadraceProcess] = {}
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.headers: dict[str, str] = {}
        self.faults: list[str] = []
        self._silent: dict[str, tuple[float, Callable[[], None]]] = {}
        self._doubtful_until_s = 0.0
        self._ended_alone: list[Finding] = []

    async def begin(self, rooms: Sequence[Room]) -> None:
        """Start the rooms and their roles; wait until workers and the API are ready."""
        rooms_scopes = ("views:hit", "views:read", "feed:read", "feed:write")
        scopes = ("jobs:read", "jobs:write", *rooms_scopes)
        token = await Tokens(self.postgres).create("caller", scopes)
        self.headers = {"authorization": f"Bearer {token.text}"}
        await self.jobs.queues.declare()
        for room in rooms:
            await room.begin(self)
        kinds = {kind for room in rooms for kind in room.roles}
        for name, kind in ROLES.items():
            if kind in kinds:
                self.start_role(name)
        workers = self.of_kind("agent", "work")
        await wait_true(lambda: self.has_hosts(len(workers)), what="workers are registered")
        if "api" in self.roles:
            await wait_true(self._api_answers, what="the API answers")

    def start_role(self, name: str, **settings: str) -> HeadraceProcess:
        """Start or replace a role."""
        url = self.proxy.url if name in FAR else None
        settings |= {"WEB_LISTEN": self.address} if name == "api" else {}
        process = self.start(
            ROLES[name],
            host=name,
            app="storm_app:app",
            url=url,
            code=self.code_of(name),
            **settings,
        )
        self.roles[name] = process
        return process

    def code_of(self, _name: str) -> Path | None:
        """A folder with the package that a role runs; None: the present one."""
        return None

    def of_kind(self, *kinds: str) -> list[str]:
        return [name for name in self.roles if ROLES[name] in kinds]

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://{self.address}", headers=self.headers, timeout=60, verify=False
        )

    # The supervisor

    def keep_up(self) -> None:
        """Restart what ended, wake what was silent for long, note whose jobs others may have."""
        now_s = time.monotonic()
        for name, process in list(self.roles.items()):
            if not is_alive(process.pid):
                self._judge_end(name, process)
                self.kill(process)
                if name in self._silent:
                    self._silent.pop(name)[1]()
                self.start_role(name)
        for name, (since_s, wake) in list(self._silent.items()):
            if now_s - since_s > LOST_AFTER_S:
                self.note_lost(self.roles[name])
            if now_s - since_s > SILENT_S:
                del self._silent[name]
                self._doubtful_until_s = max(self._doubtful_until_s, now_s + 1.0)
                wake()
        if now_s < self._doubtful_until_s:
            for name in self.of_kind("agent", "work"):
                self.note_lost(self.roles[name])

    def _judge_end(self, name: str, process: HeadraceProcess) -> None:
        """Accept SIGKILL by a fault or handler, and an outage of PostgreSQL during a start."""
        is_starting = not process.events("host_registered")
        is_unavailable = "[postgres.unavailable]" in process.out + process.err
        if process.wait_exit() != -signal.SIGKILL and not (is_starting and is_unavailable):
            text = f"{ROLES[name]} ended by itself: {process.out[-500:]}{process.err[-900:]}"
            self._ended_alone.append(Finding("ended", name, text))

    async def pass_time(self, seconds: float) -> None:
        """Supervise for so long."""
        ends_s = time.monotonic() + seconds

        def is_over() -> bool:
            self.keep_up()
            return time.monotonic() > ends_s

        await wait_true(is_over, deadline_s=seconds + 60)

    async def all_findings(self, rooms: Sequence[Room]) -> list[Finding]:
        """Broken promises of all rooms, and roles that ended by themselves."""
        found = [finding for room in rooms for finding in await room.findings()]
        found += [finding for room in rooms for finding in await room.last_findings()]
        return [*self._ended_alone, *found]

    # What faults do

    def doom(self, name: str) -> HeadraceProcess:
        """Announce the death of a role."""
        process = self.roles[name]
        if ROLES[name] in ("agent", "work"):
            self.note_lost(process)
        return process

    def pick(self, *kinds: str) -> str:
        """A role of these kinds that is not silent now."""
        names = [name for name in self.of_kind(*kinds) if name not in self._silent]
        return self.chance.choice(names or self.of_kind(*kinds))

    def silence(self, name: str, stop: Callable[[], None], wake: Callable[[], None]) -> None:
        """Make a worker silent until `keep_up` wakes it, if another one still works."""
        if len(self._silent) < len(self.of_kind("agent", "work")) - 1 and name not in self._silent:
            stop()
            self._silent[name] = (time.monotonic(), wake)

    def doubt(self, began_s: float) -> None:
        """After an outage since `began_s`, any worker may have lost its jobs."""
        if time.monotonic() - began_s > LOST_AFTER_S:
            self._doubtful_until_s = time.monotonic() + 2.0

    async def _api_answers(self) -> bool:
        self.keep_up()
        with suppress(httpx.TransportError):
            async with httpx.AsyncClient(verify=False) as client:
                return (await client.get(f"http://{self.address}/healthz")).is_success
        return False


# The table of faults


def send_signal(pid: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_role(*kinds: str) -> Callable[[Storm], Awaitable[None]]:
    async def kill(storm: Storm) -> None:
        send_signal(storm.doom(storm.pick(*kinds)).pid)

    return kill


async def _kill_host(storm: Storm) -> None:
    for pid in storm.doom(storm.pick("agent", "work")).family():
        send_signal(pid)


async def _kill_slot(storm: Storm) -> None:
    pids = slot_pids(storm.roles[storm.pick("agent")])
    if pids:
        pid = storm.chance.choice(pids)
        storm.recorder.note("lost", "process", pid=pid)
        send_signal(pid)


async def _kill_zygote(storm: Storm) -> None:
    send_signal(zygote_pid(storm.roles[storm.pick("agent")]))


async def _crash_api(storm: Storm) -> None:
    """The API dies between the commit of a feed's change and its index."""
    storm.kill(storm.doom("api"))
    passes = storm.chance.randint(1, 12)
    crashing = storm.start_role("api", CRASH_AT=f"feed.committed:{passes}")
    await wait_true(lambda: not is_alive(crashing.pid), what="the API dies at its crash point")


def _kill_engines(*names: str) -> Callable[[Storm], Awaitable[None]]:
    async def kill(storm: Storm) -> None:
        began_s = time.monotonic()
        for name in names:
            send_signal(getattr(storm.engines, f"{name}_pid"))
        for name in reversed(names):
            await storm.engines.restart(name)
        storm.doubt(began_s)

    return kill


@contextmanager
def frozen(postmaster: int):
    """The postmaster and all its children are stopped inside the block."""
    stopped = []
    try:
        # The postmaster first, so that no child is added meanwhile.
        for find in (lambda: [postmaster], lambda: descendants(postmaster)):
            for pid in find():
                send_signal(pid, signal.SIGSTOP)
                stopped.append(pid)
        yield
    finally:
        # The postmaster last: it reaps children that were ending.
        for pid in reversed(stopped):
            send_signal(pid, signal.SIGCONT)


async def _freeze_postgres(storm: Storm) -> None:
    began_s = time.monotonic()
    with frozen(storm.engines.postgres_pid):
        await storm.pass_time(SILENT_S)
    storm.doubt(began_s)


def _stop(*, is_whole: bool) -> Callable[[Storm], Awaitable[None]]:
    async def stop(storm: Storm) -> None:
        name = storm.pick("agent", "work") if is_whole else storm.pick("agent")
        process = storm.roles[name]

        def send(number: signal.Signals) -> None:
            storm.signal(process, number) if is_whole else send_signal(process.pid, number)

        storm.silence(name, lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))

    return stop


def _cut(mode: Mode) -> Callable[[Storm], Awaitable[None]]:
    async def cut(storm: Storm) -> None:
        await wait_true(lambda: storm.keep_up() or not storm._silent, what="all workers work")
        for name in set(FAR) & set(storm.roles):
            storm.silence(name, lambda: storm.proxy.set(mode), lambda: storm.proxy.set(PASS))

    return cut


FAULTS: Final[dict[str, Callable[[Storm], Awaitable[None]]]] = {
    "kill_slot": _kill_slot,
    "kill_zygote": _kill_zygote,
    "kill_agent": _kill_role("agent"),
    "kill_worker": _kill_role("work"),
    "kill_host": _kill_host,
    "kill_scheduler": _kill_role("scheduler"),
    "kill_flusher": _kill_role("flusher"),
    "kill_api": _kill_role("api"),
    "crash_api": _crash_api,
    "kill_postgres": _kill_engines("postgres"),
    "kill_valkey": _kill_engines("valkey"),
    "kill_engines": _kill_engines("postgres", "valkey"),
    "freeze_postgres": _freeze_postgres,
    "stop_agent": _stop(is_whole=False),
    "stop_host": _stop(is_whole=True),
    "reset_network": _cut(RESET),
    "silent_network": _cut(BLACK_HOLE),
    "slow_network": _cut(delay(0.05)),
}
JOB_FAULTS = tuple(name for name in FAULTS if name not in ("kill_flusher", "crash_api"))
ENGINE_FAULTS = ("kill_postgres", "kill_valkey", "kill_engines", "freeze_postgres")
FETCH_FAULTS = ("kill_slot", "kill_agent", "kill_host", "kill_scheduler", *ENGINE_FAULTS)
FLUSH_FAULTS = ("kill_flusher", "kill_api", "crash_api", *ENGINE_FAULTS)


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, or until the event is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


@asynccontextmanager
async def own_engines(folder: Path, *, durable: bool, timeout_s: float = 2.0):
    """Engines of a test's own with a schema: engines, endpoints and a pool."""
    engines = EmbeddedEngines(folder / "data", durable=durable)
    endpoints = await engines.start()
    config = PostgresConfig(connect_timeout_s=timeout_s, statement_timeout_s=timeout_s)
    postgres = Postgres(endpoints.postgres_url, config)
    try:
        await apply_migrations(postgres, PACKAGES)
        yield engines, endpoints, postgres
    finally:
        await postgres.close()
        await engines.stop()


async def weather(
    folder: Path,
    *,
    rooms: Sequence[Callable[[], Room]],
    faults: Sequence[str],
    rounds: int,
    pause_s: tuple[float, float],
) -> None:
    """Let every fault happen once a round while the rooms work, then judge all of it."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    own = own_engines(folder, durable=True)
    async with own as (engines, endpoints, postgres):
        with ChaosProxy(endpoints.postgres_url) as proxy:
            chance = random.Random(seed)
            parts = {"endpoints": endpoints, "postgres": postgres, "chance": chance}
            storm = Storm(folder / "fleet", engines, proxy, **parts)
            made = [room() for room in rooms]
            try:
                await storm.begin(made)
                await _rage(storm, made, faults=faults, rounds=rounds, pause_s=pause_s)
                for room in made:
                    room.require_work()
                found = await storm.all_findings(made)
            finally:
                print(f"faults {storm.faults}")
                storm.end()
                for room in made:
                    await room.close()
    assert found == []


async def _rage(storm: Storm, rooms: Sequence[Room], *, faults, rounds, pause_s) -> None:
    stop = asyncio.Event()
    functions = [client for room in rooms for client in room.clients()]
    clients = [asyncio.create_task(client(stop)) for client in functions]

    def require_no_error() -> None:
        for client in clients:
            if client.done():
                client.result()

    def have_ended() -> bool:
        storm.keep_up()
        require_no_error()
        return all(client.done() for client in clients)

    try:
        for _ in range(rounds):
            for fault in storm.chance.sample(faults, len(faults)):
                await storm.pass_time(storm.chance.uniform(*pause_s))
                require_no_error()
                storm.faults.append(fault)
                await FAULTS[fault](storm)
        stop.set()
        await wait_true(have_ended, what="clients end", deadline_s=120)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def is_settled() -> bool:
        storm.keep_up()
        with suppress(Unavailable):
            return not storm._silent and all([await room.is_settled() for room in rooms])
        return False

    await wait_true(is_settled, what="all work ended", deadline_s=90 + 30 * rounds)
