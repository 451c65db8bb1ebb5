"""Real engines and roles, started once, and the runs of a fault on them.

A run is one seed: the workloads of the rooms begin, the fault happens at a random moment and is
healed, each room repeats a round trip until it works, the workloads end, all work settles, and the
checkers of `tests.kit.storm` judge what happened since the run began.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx
import valkey.asyncio
from tests.kit.chaos import PASS, ChaosProxy, Mode
from tests.kit.checkers import Finding
from tests.kit.old_code import extract_old_code
from tests.kit.processes import HeadraceProcess
from tests.kit.stepped_clock import install_stepped_clock, set_clock
from tests.kit.storm.room_feed import FeedRoom
from tests.kit.storm.room_fetch import FetchRoom
from tests.kit.storm.room_jobs import JobsRoom
from tests.kit.storm.room_media import MediaRoom
from tests.kit.storm.room_views import ViewsRoom
from tests.kit.storm.storm import ROLES, Room, Storm, Tally, own_engines, pause
from tests.kit.waiting import wait_true

from headrace.engines.endpoints import Endpoints
from headrace.kernel.errors import Unavailable

ROOMS: Final[dict[str, Callable[[], Room]]] = {
    "jobs": lambda: JobsRoom(has_killer=False),
    "fetch": lambda: FetchRoom(2, 1, is_repeated=True),
    "views": ViewsRoom,
    "feed": FeedRoom,
    "media": MediaRoom,
}
KINDS: Final = {
    "lost": ("lost", "undelivered", "unfinished", "results"),
    "doubled": ("doubled", "overlapping", "shared key"),
    "over_limit": ("over limit", "over concurrency", "stopped"),
}
"""Columns of the scoreboard, and the findings that count there; all others are `wrong`."""
RECOVERY_MAX_S: Final = 120.0
SETTLING_MAX_S: Final = 90.0
RUN_MAX_S: Final = 240.0
"""Longest wait for clients and round trips together."""
TRIP_EVERY_S: Final = 0.05
SETTINGS: Final = {
    "POSTGRES_CONNECT_TIMEOUT": "1s",
    "POSTGRES_STATEMENT_TIMEOUT": "2s",
    "VIEWS_LEASE": "1s",
}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a fault needs of its site."""

    mounted: Callable[[Path], AbstractContextManager[Path]] | None = None
    """Mounts the disk of the site."""
    has_stepped_clock: bool = False
    has_old_code: bool = False
    """Whether every second role starts with older code."""
    servers: Callable[[Path, Endpoints], AbstractAsyncContextManager[Any]] | None = None
    """Starts servers that replace the embedded ones; see `engine_faults`."""


Apply = Callable[["Site"], Awaitable[float | None]]
"""Injects a fault and heals it; returns when its effect ended, by default when it returned."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of one room showed."""

    tally: Tally
    recovery_s: float
    findings: tuple[Finding, ...] = ()
    lost_as_promised: int = 0
    """Acknowledged operations that were lost and that the promises allow to be lost."""

    def count(self, column: str) -> int:
        """Findings of a column."""
        if column in KINDS:
            return sum(found.fault in KINDS[column] for found in self.findings)
        return len(self.findings) - sum(self.count(name) for name in KINDS)


@dataclass(slots=True)
class Phase:
    """The clients of a run."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[asyncio.Task[None]] = field(default_factory=list)

    async def end(self) -> None:
        """Cancel what still runs."""
        for client in self.clients:
            client.cancel()
        await asyncio.gather(*self.clients, return_exceptions=True)


class Site(Storm):
    """Roles behind proxies to their engines, and rooms that are judged after each run."""

    def __init__(self, folder: Path, engines: Any, proxies: dict[str, ChaosProxy], **parts: Any):
        super().__init__(folder, engines, proxies["postgres"], **parts)
        self.disk = folder.parent / "disk"
        self.settings = {**self.settings, **SETTINGS}
        self.proxies = proxies
        self.direct: Endpoints = parts["direct"]
        self.rooms: list[Room] = []
        self.promised_losses: dict[str, int] = {}
        self.servers: Any = None
        """The servers of the fault, beside the embedded engines."""
        self.old_code: Path | None = None
        """A folder with older code, for the roles and nodes of `old`."""
        self.old: set[str] = set()
        self.is_repeating = False
        """Whether each writing request is sent twice."""

    @property
    def media(self) -> MediaRoom | None:
        """The media room, if it takes part."""
        return next((room for room in self.rooms if isinstance(room, MediaRoom)), None)

    @property
    def fetch(self) -> FetchRoom:
        """The fetch room, which takes part."""
        return next(room for room in self.rooms if isinstance(room, FetchRoom))

    @property
    def views(self) -> ViewsRoom | None:
        """The views room, if it takes part."""
        return next((room for room in self.rooms if isinstance(room, ViewsRoom)), None)

    @property
    def names(self) -> set[str]:
        """The names of the rooms."""
        return {room.name for room in self.rooms}

    def client(self) -> httpx.AsyncClient:
        transport = RepeatingTransport(self)
        return httpx.AsyncClient(
            base_url=f"http://{self.address}", headers=self.headers, timeout=60, transport=transport
        )

    def code_of(self, name: str) -> Path | None:
        return self.old_code if name in self.old else None

    def swap_code(self, name: str) -> None:
        """Let a role or node have the other code from its next start on."""
        self.old ^= {name}

    def keep_up(self) -> None:
        super().keep_up()
        if self.media is not None:
            self.media.keep_up()

    def supervised_once(self, process: HeadraceProcess) -> bool:
        """Supervise; return whether a worker has registered its host."""
        self.keep_up()
        return bool(process.events("host_registered"))

    def note_exit(self, name: str, process: HeadraceProcess, code: int) -> None:
        """Accept only 0 as the exit code of a role that was stopped in order."""
        if code != 0:
            text = f"exit code {code}: {process.out[-500:]}{process.err[-900:]}"
            self._ended_alone.append(Finding("ended", name, text))

    def forget(self, process: HeadraceProcess) -> None:
        """Stop tracking a process that ended."""
        self._processes.remove(process)

    @asynccontextmanager
    async def valkey(self) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """Run commands on one connection to Valkey, not through the proxy."""
        path = unquote(urlsplit(self.direct.valkey_url).path)
        client = valkey.asyncio.Valkey(unix_socket_path=path, single_connection_client=True)
        try:
            yield client.execute_command
        finally:
            await client.aclose()

    async def revive_engines(self) -> None:
        """Start the engines that ended."""
        for name in ("postgres", "valkey"):
            if getattr(self.engines, f"{name}_pid") is None:
                await self.engines.restart(name)

    def set_clock(self, offset_s: float) -> None:
        """Step the wall clocks of all roles."""
        set_clock(self.folder, offset_s)

    def set_network(self, mode: Mode) -> None:
        """Change every connection to an engine and to the bucket."""
        proxies = [*self.proxies.values(), *([self.media.proxy] if self.media else [])]
        for proxy in proxies:
            proxy.set(mode)

    async def round_trips_s(self) -> dict[str, float]:
        """Seconds of a round trip of each room while nothing else happens."""
        began_s = time.monotonic()
        trips = await self.supervised(*(self._recovery_s(room, began_s) for room in self.rooms))
        for room in self.rooms:
            # A run skips all that was recorded before it, so that no work may be left.
            found = await self._judged(room)
            assert found == [], f"without a fault: {found}"
            room.tally()
        return {room.name: trip for room, trip in zip(self.rooms, trips, strict=True)}

    async def run(self, apply: Apply, seed: int) -> dict[str, Outcome]:
        """One run with all rooms."""
        self.chance = random.Random(seed)
        self._reader.skip()
        self._ended_alone.clear()
        self.promised_losses = {}
        self.begin_phase()
        try:
            await self.pass_time(self.chance.uniform(0.3, 0.9))
            ended_s = await apply(self) or time.monotonic()
            trips = await self.supervised(*(self._recovery_s(room, ended_s) for room in self.rooms))
            await self._end_workload()
        finally:
            await self.phase.end()
            self.set_network(PASS)
        found = {room.name: await self._judged(room) for room in self.rooms}
        return {
            room.name: Outcome(
                room.tally(),
                min(trip, RECOVERY_MAX_S),
                (*found[room.name], *self._unrecovered(trip)),
                self.promised_losses.get(room.name, 0),
            )
            for room, trip in zip(self.rooms, trips, strict=True)
        }

    def begin_phase(self) -> None:
        """Start the workload of every room."""
        self.phase = Phase()
        self.add_clients()

    def add_clients(self) -> None:
        """Start the clients of every room, once more."""
        functions = [client for room in self.rooms for client in room.clients()]
        self.phase.clients += [asyncio.create_task(client(self.phase.stop)) for client in functions]

    async def _end_workload(self) -> None:
        await self.pass_time(0.2)
        self.phase.stop.set()
        await self.supervised(*self.phase.clients)

    async def supervised(self, *work: Awaitable[Any]) -> list[Any]:
        """The results of all, while roles are supervised; raises the first error."""
        tasks = [asyncio.ensure_future(one) for one in work]

        def have_ended() -> bool:
            self.keep_up()
            for task in tasks:
                if task.done():
                    task.result()
            return all(task.done() for task in tasks)

        try:
            await wait_true(have_ended, what="the run ends", deadline_s=RUN_MAX_S)
        finally:
            for task in tasks:
                task.cancel()
        return [task.result() for task in tasks]

    async def _recovery_s(self, room: Room, ended_s: float) -> float:
        """Seconds from the end of the fault to the first round trip that worked."""
        try:
            async with asyncio.timeout(RECOVERY_MAX_S):
                while True:
                    with suppress(Unavailable, httpx.HTTPError):
                        if await room.round_trip():
                            return time.monotonic() - ended_s
                    await pause(asyncio.Event(), TRIP_EVERY_S)
        except (TimeoutError, AssertionError):
            return float("inf")

    def _unrecovered(self, trip: float) -> list[Finding]:
        text = f"no round trip worked within {RECOVERY_MAX_S:.0f} s"
        return [Finding("not recovered", "room", text)] if trip > RECOVERY_MAX_S else []

    async def _judged(self, room: Room) -> list[Finding]:
        """Broken promises of a room, and roles of it that ended by themselves."""

        async def is_settled() -> bool:
            self.keep_up()
            with suppress(Unavailable):
                return not self._silent and await room.is_settled()
            return False

        ended = [found for found in self._ended_alone if ROLES[str(found.subject)] in room.roles]
        try:
            what = f"the work of {room.name} ended"
            await wait_true(is_settled, what=what, deadline_s=SETTLING_MAX_S)
            return [*ended, *await room.findings()]
        except (AssertionError, Unavailable, httpx.HTTPError) as error:
            text = f"{type(error).__name__}: {error}"[:1500]
            return [*ended, Finding("wrong state", room.name, text)]


class RepeatingTransport(httpx.AsyncHTTPTransport):
    """Sends writing requests twice while the site repeats them, as a retrying proxy does."""

    def __init__(self, site: Site) -> None:
        super().__init__(verify=False)
        self._site = site

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The first answer."""
        first = await super().handle_async_request(request)
        if self._site.is_repeating and request.method != "GET":
            again = httpx.Request(
                request.method, request.url, headers=request.headers, content=request.content
            )
            with suppress(httpx.TransportError):
                second = await super().handle_async_request(again)
                await second.aread()
                await second.aclose()
        return first


@asynccontextmanager
async def open_site(
    folder: Path,
    rooms: Sequence[str],
    needs: Needs,
    *,
    seed: int,
) -> AsyncIterator[Site]:
    """Engines, roles and rooms that are ready for runs."""
    async with AsyncExitStack() as stack:
        disk = folder / "disk"
        if needs.mounted is not None:
            stack.enter_context(needs.mounted(disk))
        if needs.has_stepped_clock:
            install_stepped_clock(folder / "fleet")
        own = own_engines(disk, durable=True, timeout_s=5.0)
        engines, endpoints, postgres = await stack.enter_async_context(own)
        servers = None
        if needs.servers is not None:
            servers = await stack.enter_async_context(needs.servers(folder / "own", endpoints))
            endpoints = servers.endpoints
            postgres = servers.postgres or postgres
        urls = {"postgres": endpoints.postgres_url, "valkey": endpoints.valkey_url}
        proxies = {name: stack.enter_context(ChaosProxy(url)) for name, url in urls.items()}
        seen = replace(
            endpoints,
            postgres_url=proxies["postgres"].socket_url,
            valkey_url=proxies["valkey"].socket_url,
        )
        if servers is not None and servers.is_cluster:
            # Clients of a cluster connect to the addresses that its nodes report.
            seen = replace(seen, valkey_url=endpoints.valkey_url)
        if servers is not None and servers.is_encrypted:
            seen = replace(seen, postgres_url=endpoints.postgres_url)
        chance = random.Random(seed)
        parts = {"endpoints": seen, "postgres": postgres, "chance": chance, "direct": endpoints}
        site = Site(folder / "fleet", engines, proxies, **parts)
        site.servers = servers
        if needs.has_old_code:
            site.old_code = extract_old_code(folder / "old")
            site.old = set(list(ROLES)[::2])
        stack.callback(site.end)
        for name in rooms:
            room = ROOMS[name]()
            stack.push_async_callback(room.close)
            site.rooms.append(room)
        await site.begin(site.rooms)
        yield site
