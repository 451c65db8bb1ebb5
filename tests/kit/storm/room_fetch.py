"""The fetch room in a storm: catalogues of photos on simulated hosts that keep an access log.

What a host answers to a path is a function of the path (`bench/origins`), so the outcome of each
photo is known. Judged are the database, the object store, the hosts' log and the items that the
application received.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

from bench.origins.log import by_host
from bench.origins.plan import PASSING, HostPlan
from bench.origins.started import origins
from tests.kit.checkers import Finding, over_limit
from tests.kit.history import Event, History
from tests.kit.storm.storm import Storm, Tally, pause
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.engines.sql import compile_query
from headrace.kernel.errors import Unavailable

STARTS_MAX, WINDOW_S, CONNECTIONS = 5, 1.0, 4
PHOTOS_PER_ITEM = 3
HOST = HostPlan(low_s=0.0, high_s=0.15, failing=0.4, redirecting=0.1)
NEEDS = compile_query(
    "needs",
    "-- Every requested photo with its outcome.\n"
    "SELECT r.customer, n.run_id, n.item, n.url, n.outcome FROM headrace.fetch_need n"
    " JOIN headrace.fetch_run r ON r.id = n.run_id",
)
COUNTS = compile_query(
    "counts",
    "-- The counts of the runs but those abandoned for a repeated one.\n"
    "SELECT r.id, r.state, r.photos, c.outcome, c.photos AS counted FROM headrace.fetch_run r"
    " LEFT JOIN headrace.fetch_count c ON c.run_id = r.id"
    " WHERE r.state <> 'abandoned' OR NOT EXISTS (SELECT FROM headrace.fetch_run n"
    "  WHERE n.customer = r.customer AND n.id > r.id)",
)
STORED = compile_query("stored", "-- Stored photos.\nSELECT sha256, key FROM headrace.fetch_photo")
RESULTS = compile_query(
    "results", "-- Every result.\nSELECT customer, item, version FROM headrace.fetch_result"
)
OPEN = compile_query(
    "open",
    "-- Runs and jobs that have not ended; a repeated run abandons the one before.\n"
    "WITH ours AS (SELECT id FROM headrace.queue WHERE name IN ('fetch.publish', 'fetch.item')),"
    " hurried AS (UPDATE headrace.job_ready SET run_at = now()"
    "  WHERE run_at > now() + interval '1 second' AND queue IN (TABLE ours)),"
    " lanes AS (UPDATE headrace.lane_job SET run_at = now()"
    "  WHERE run_at > now() + interval '1 second')"
    "SELECT (SELECT count(*) FROM headrace.fetch_run WHERE state NOT IN ('done', 'abandoned'))"
    " + (SELECT count(*) FROM headrace.job_ready WHERE queue IN (TABLE ours))"
    " + (SELECT count(*) FROM headrace.lane_job WHERE queue IN (TABLE ours))"
    " + (SELECT count(*) FROM headrace.job_lease)",
)

DONE = compile_query(
    "done",
    "-- Runs of a customer that are done.\n"
    "SELECT count(*) FROM headrace.fetch_run WHERE customer = :customer AND state = 'done'",
)
HOSTS_MAX = 400
PathsOf = Callable[[str, int], list[str]]


def usual_paths(_host: str, item: int) -> list[str]:
    """The photos of an item; some fail."""
    return [f"/{item}/{photo}.jpg" for photo in range(PHOTOS_PER_ITEM)]


def passing_path(host: str, item: int) -> list[str]:
    """A photo of an item that the host has."""
    paths = (f"/{item}/probe{number}.jpg" for number in itertools.count())
    return [next(path for path in paths if HOST.answer(host, path, 0)[0] == 200)]


class NameRelay(asyncio.DatagramProtocol):
    """A relay of questions to the name server of the hosts, which can lose them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_lost = False

    async def start(self) -> int:
        """Listen on loopback; return the port."""
        loop = asyncio.get_running_loop()
        made = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        self._transport = made[0]
        return int(self._transport.get_extra_info("sockname")[1])

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if not self.is_lost:
            task = asyncio.create_task(self._relay(data, addr))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, question: bytes, addr: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own, suppress(OSError):
            own.setblocking(False)
            own.connect(("127.0.0.1", self._port))
            await loop.sock_sendall(own, question)
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    self._transport.sendto(await loop.sock_recv(own, 4096), addr)

    def end(self) -> None:
        """Close it."""
        self._transport.close()


class FetchRoom:
    """See the module; `customers` of one host each."""

    name = "fetch"
    roles = ("agent", "scheduler")

    def __init__(self, customers: int = 2, items: int = 4, *, is_repeated: bool = False) -> None:
        self._sizes = (customers, items)
        self._is_repeated = is_repeated
        self._customers = itertools.count()
        self._tally = Tally()
        self._delivered: set[tuple[str, str]] = set()
        self.links: dict[str, tuple[str, str]] = {}
        self._stack = AsyncExitStack()

    async def begin(self, storm: Storm) -> None:
        """Start the hosts and, unless each workload does it, run the catalogues."""
        self.storm = storm
        customers, items = self._sizes
        hosts = HOSTS_MAX if self._is_repeated else customers
        plans = {f"c{n}.test": HOST for n in range(hosts)}
        self.hosts = await self._stack.enter_async_context(origins(storm.folder / "hosts", plans))
        named = {n.removeprefix("HEADRACE_"): v for n, v in self.hosts.settings.items()}
        self.names = NameRelay(self.hosts.names_port)
        port = await self.names.start()
        self._stack.callback(self.names.end)
        storm.settings = {**storm.settings, **named, "FETCH_NAME_SERVERS": f"127.0.0.1:{port}"}
        flags = {"fetch.allow_networks": "127.0.0.0/8", "fetch.allow_ports": str(self.hosts.port)}
        app = Headrace(flags=flags)
        app.use_endpoints(storm.endpoints)
        self._app = app
        self._stack.push_async_callback(app.close)
        if not self._is_repeated:
            for _ in range(customers):
                await self._run_catalogue(items)

    async def _run_catalogue(self, items: int, paths_of: PathsOf = usual_paths) -> str:
        """Send the catalogue of a new customer until it is acknowledged; return its name."""
        customer = f"c{next(self._customers)}"
        lines, host = ["id,name,price,photos"], f"{customer}.test"
        for item in range(items):
            paths = paths_of(host, item)
            urls = [self.hosts.url(host, path) for path in paths]
            self.links |= {url: (host, path) for url, path in zip(urls, paths, strict=True)}
            lines.append(f"i{item},Item {item},5,{'|'.join(urls)}")
        path = self.storm.folder / f"{customer}.csv"
        path.write_text("\n".join([*lines, ""]))
        photos = sum(line.count(".jpg") for line in lines)
        while not await self._is_applied(path, customer):
            self._count(operations=photos, unknown=photos)
            await pause(asyncio.Event(), 0.05)
        self._count(operations=photos, acknowledged=photos)
        return customer

    async def _is_applied(self, path: Path, customer: str) -> bool:
        fetch = self._app.fetch
        with suppress(Unavailable):
            await fetch.customers.set(
                customer, starts_max=STARTS_MAX, window_s=WINDOW_S, connections=CONNECTIONS
            )
            run = await fetch.run_catalogue(path, customer)
            items = path.read_text().count("\n") - 1
            assert items in (run.new, run.unchanged), run
            return True
        return False

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._tally, name) + count for name, count in more.items()}
        self._tally = replace(self._tally, **counts)

    def clients(self) -> list[Callable[[asyncio.Event], Awaitable[None]]]:
        """None if the catalogues that `begin` sent are the work."""
        return [self._send_catalogues] if self._is_repeated else []

    async def _send_catalogues(self, _stop: asyncio.Event) -> None:
        customers, items = self._sizes
        for _ in range(customers):
            await self._run_catalogue(items)

    async def is_settled(self) -> bool:
        return await self.storm.postgres.value(OPEN) == 0

    async def findings(self) -> list[Finding]:
        needs, counts, stored, results = [
            await self.storm.postgres.all(query) for query in (NEEDS, COUNTS, STORED, RESULTS)
        ]
        if not self._is_repeated:
            await self.hosts.end()
        ends = self.storm.history.of("end", what="item")
        self._delivered |= {(event.facts["customer"], event.facts["item"]) for event in ends}
        assert len(needs) == len(self.links)
        return [
            *wrong_outcomes(needs, self.links),
            *wrong_counts(needs, counts),
            *without_bytes(stored, Path(self.storm.endpoints.blobs_url.removeprefix("file://"))),
            *undelivered(needs, results, self._delivered),
            *over_in_logs(by_host(self.hosts.requests())),
        ]

    async def last_findings(self) -> list[Finding]:
        return []

    def tally(self) -> Tally:
        counted, self._tally = self._tally, Tally()
        return counted

    def require_work(self) -> None:
        assert self.links

    async def round_trip(self) -> bool:
        """Send a catalogue of one photo that exists, and wait until its run is done."""
        customer = await self._run_catalogue(1, passing_path)

        async def is_done() -> bool:
            return await self.storm.postgres.value(DONE, customer=customer) == 1

        await wait_true(is_done, what="the run of a round trip is done")
        return True

    async def close(self) -> None:
        await self._stack.aclose()


def wrong_outcomes(needs, links) -> list[Finding]:
    """Photos without an outcome, or with another one than their host's answers make."""
    findings = []
    for row in needs:
        expected = expected_outcomes(*links[row["url"]])
        if row["outcome"] not in expected:
            text = f"its outcome is {row['outcome']}, expected one of {sorted(expected)}"
            findings.append(Finding("wrong outcome", row["url"], text))
    return findings


def expected_outcomes(host: str, path: str) -> set[str]:
    """Possible outcomes of a photo; a temporary fault of its host ends with the second attempt."""
    status, _wait_s = HOST.answer(host, path, 0)
    if status in (200, 302, *PASSING):
        return {"stored", "unchanged"}
    return {f"failed:http_{status}"}


def wrong_counts(needs, counts) -> list[Finding]:
    """Runs whose counts differ from their photos or do not add up, and runs without an end."""
    decided: Counter = Counter((row["run_id"], row["outcome"]) for row in needs)
    findings = []
    for run_id in {row["id"] for row in counts}:
        rows = [row for row in counts if row["id"] == run_id]
        counted = {row["outcome"]: row["counted"] for row in rows if row["outcome"] is not None}
        found = {outcome: n for (run, outcome), n in decided.items() if run == run_id}
        if counted != found or sum(counted.values()) != rows[0]["photos"]:
            text = f"it counts {counted} of {rows[0]['photos']}, its photos are {found}"
            findings.append(Finding("wrong counts", run_id, text))
        if rows[0]["state"] != "done":
            findings.append(Finding("unfinished", run_id, f"it is {rows[0]['state']}"))
    return findings


def without_bytes(stored, folder: Path) -> list[Finding]:
    """Rows whose object is missing or has other bytes."""
    findings = []
    for row in stored:
        path = folder / row["key"]
        if not path.exists():
            findings.append(Finding("without bytes", row["key"], "a row without an object"))
        elif hashlib.sha256(path.read_bytes()).hexdigest() != row["sha256"]:
            findings.append(Finding("without bytes", row["key"], "the object has other bytes"))
    return findings


def undelivered(needs, results, delivered) -> list[Finding]:
    """Items without a result, with two of one version, or that no handler received."""
    versions = Counter((row["customer"], row["item"]) for row in results)
    findings = []
    for item in {(row["customer"], row["item"]) for row in needs}:
        if versions[item] != 1:
            findings.append(Finding("results", item, f"it has {versions[item]}, expected one"))
        if item not in delivered:
            findings.append(Finding("undelivered", item, "no handler received it"))
    return findings


def over_in_logs(moments) -> list[Finding]:
    """Hosts with too many requests in a window, by their own logs."""
    events = [
        Event(kind="start", what="request", at_ns=round(at * 1e9), pid=0, facts=facts)
        for host, own in moments.items()
        for number, at in enumerate(own)
        for facts in [{"job": f"{host} {number}", "lane": host}]
    ]
    history = History(tuple(sorted(events, key=lambda event: event.at_ns)))
    return over_limit(history, starts_max=STARTS_MAX, window_s=WINDOW_S)
