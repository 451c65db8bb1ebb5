"""A whole site under faults while photos come in.

Slots, agents, hosts, schedulers and both engines die.

Its customers' hosts are simulated ones that keep an access log (`bench/origins`); what they answer
to a path is known beforehand, so each photo's outcome is too. In the end the database, the object
store, the log and what the application was told are held against each other.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from bench.origins.log import by_host
from bench.origins.plan import PASSING, HostPlan
from recorded_fleet import SETTINGS, RecordedFleet
from slots_host import slot_pids
from tests.kit.checkers import Finding, over_limit
from tests.kit.history import Event, History
from tests.kit.processes import is_alive

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.engines.sql import compile_query
from headrace.kernel.errors import Unavailable

STARTS_MAX, WINDOW_S, CONNECTIONS = 5, 1.0, 4
PHOTOS_OF_ITEM = 3
HOST = HostPlan(low_s=0.0, high_s=0.15, failing=0.4, redirecting=0.1)
FAULTS = (
    "kill_slot",
    "kill_agent",
    "kill_host",
    "kill_scheduler",
    "kill_postgres",
    "kill_valkey",
)
NEEDS = compile_query(
    "needs",
    "-- Every photo asked for, with its outcome.\n"
    "SELECT r.customer, n.run_id, n.item, n.url, n.outcome FROM headrace.fetch_need n"
    " JOIN headrace.fetch_run r ON r.id = n.run_id",
)
COUNTS = compile_query(
    "counts",
    "-- What the runs say.\n"
    "SELECT r.id, r.state, r.photos, c.outcome, c.photos AS counted FROM headrace.fetch_run r"
    " LEFT JOIN headrace.fetch_count c ON c.run_id = r.id",
)
STORED = compile_query(
    "stored",
    "-- Every content with a row, and every link that names one.\n"
    "SELECT p.sha256, p.key, l.url FROM headrace.fetch_photo p"
    " LEFT JOIN headrace.fetch_link l USING (sha256)",
)
RESULTS = compile_query(
    "results", "-- Every result.\nSELECT customer, item, version FROM headrace.fetch_result"
)
OPEN = compile_query(
    "open",
    "-- Runs that are not done, and jobs that are not over; what waits for backoff is made due.\n"
    "WITH hurried AS ("
    "  UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now() + interval '1 second'"
    "  RETURNING 1"
    "), lanes AS ("
    "  UPDATE headrace.lane_job SET run_at = now() WHERE run_at > now() + interval '1 second'"
    "  RETURNING 1)"
    "SELECT (SELECT count(*) FROM headrace.fetch_run WHERE state <> 'done')"
    " + (SELECT count(*) FROM headrace.job_ready r JOIN headrace.queue q ON q.id = r.queue"
    "    WHERE q.name IN ('fetch.publish', 'fetch.item'))"
    " + (SELECT count(*) FROM headrace.lane_job l JOIN headrace.queue q ON q.id = l.queue"
    "    WHERE q.name IN ('fetch.publish', 'fetch.item'))"
    " + (SELECT count(*) FROM headrace.job_lease)",
)


class FetchStorm(RecordedFleet):
    """Agents and a scheduler that are restarted whenever they end, and the faults that end them."""

    application = "fetch_app:app"
    settings: ClassVar = {
        **SETTINGS,
        "HEADRACE_JOBS_LEASE": "2s",
        "HEADRACE_JOBS_SWEEP_EVERY": "200ms",
        "HEADRACE_JOBS_PLAN_EVERY": "1s",
        "HEADRACE_JOBS_FLOATS": "2",
        "HEADRACE_POSTGRES_STATEMENT_TIMEOUT": "5s",
    }

    def __init__(self, folder, postgres, *, postgres_url: str, valkey_url: str) -> None:
        super().__init__(folder, postgres, postgres_url=postgres_url, valkey_url=valkey_url)
        self.blobs_folder = folder / "blobs"
        self.blobs_folder.mkdir()
        self._endpoints = Endpoints(postgres_url, valkey_url, self.blobs_folder.as_uri())
        self.agents = {}
        self.links = {}
        self.faults = []

    async def begin(self, engines, hosts, chance, *, agents: int) -> None:
        """Start everything."""
        self.engines, self.hosts, self.chance = engines, hosts, chance
        self.settings = {
            **self.settings,
            **hosts.settings,
            "HEADRACE_BLOBS_URL": self._endpoints.blobs_url,
        }
        flags = {
            "fetch.allow_networks": "127.0.0.0/8",
            "fetch.allow_ports": str(hosts.port),
        }
        self.app = Headrace(flags=flags)
        self.app.use_endpoints(self._endpoints)
        self.agents = {f"h{n}": self.start("agent", host=f"h{n}") for n in range(agents)}
        self.scheduler = self.start("scheduler")

    async def offer(self, customer: str, items: int) -> None:
        """A customer, whose host is named like it, and its catalogue."""
        await self.app.fetch.customers.set(
            customer, starts_max=STARTS_MAX, window_s=WINDOW_S, connections=CONNECTIONS
        )
        lines = ["id,name,price,photos"]
        for number in range(items):
            paths = [f"/{number}/{photo}.jpg" for photo in range(PHOTOS_OF_ITEM)]
            urls = [self.hosts.url(f"{customer}.test", path) for path in paths]
            self.links |= {
                url: (f"{customer}.test", path) for url, path in zip(urls, paths, strict=True)
            }
            lines.append(f"i{number},Item {number},5,{'|'.join(urls)}")
        path = self.folder / f"{customer}.csv"
        path.write_text("\n".join([*lines, ""]))
        run = await self.app.fetch.run_catalogue(path, customer)
        assert run.new == items

    def keep_up(self) -> None:
        """Start again what ended, as a supervisor does."""
        for name, process in self.agents.items():
            if not is_alive(process.pid):
                self._forget(process)
                self.agents[name] = self.start("agent", host=name)
        if not is_alive(self.scheduler.pid):
            self._forget(self.scheduler)
            self.scheduler = self.start("scheduler")

    def _forget(self, process) -> None:
        self._processes.remove(process)
        process.kill_all()

    async def suffer(self, fault: str) -> None:
        """Let one happen, to whomever chance picks."""
        self.faults.append(fault)
        agent = self.chance.choice(list(self.agents.values()))
        match fault:
            case "kill_slot":
                for pid in slot_pids(agent)[:1]:
                    _kill(pid)
            case "kill_agent":
                _kill(agent.pid)
            case "kill_host":
                for pid in agent.family():
                    _kill(pid)
            case "kill_scheduler":
                _kill(self.scheduler.pid)
            case "kill_postgres":
                _kill(self.engines.postgres_pid)
                await self.engines.restart("postgres")
            case "kill_valkey":
                _kill(self.engines.valkey_pid)
                await self.engines.restart("valkey")

    async def is_done(self) -> bool:
        """Whether every run is done and every item was delivered."""
        self.keep_up()
        try:
            return await self.postgres.value(OPEN) == 0
        except Unavailable:
            return False

    async def all_findings(self) -> list[Finding]:
        """Every promise that was broken."""
        needs = await self.postgres.all(NEEDS)
        counts = await self.postgres.all(COUNTS)
        stored = await self.postgres.all(STORED)
        results = await self.postgres.all(RESULTS)
        await self.hosts.end()
        log = self.hosts.requests()
        told = {(e.facts["customer"], e.facts["item"]) for e in self.history.of("end", what="item")}
        return [
            *wrong_outcomes(needs, self.links),
            *wrong_counts(needs, counts),
            *without_bytes(stored, self.blobs_folder),
            *untold(needs, results, told),
            *over_in_logs(by_host(log)),
        ]


def wrong_outcomes(needs, links) -> list[Finding]:
    """Photos without an outcome, and those with another one than their host's answers make."""
    findings = []
    for row in needs:
        host, path = links[row["url"]]
        expected = expected_outcomes(host, path)
        if row["outcome"] not in expected:
            text = f"its outcome is {row['outcome']}, expected one of {sorted(expected)}"
            findings.append(Finding("wrong outcome", row["url"], text))
    return findings


def expected_outcomes(host: str, path: str) -> set[str]:
    """What may become of a photo; a fault of the host that passes is over at the second attempt."""
    status, _wait_s = HOST.answer(host, path, 0)
    if status in (200, 302, *PASSING):
        return {"stored", "unchanged"}
    return {f"failed:http_{status}"}


def wrong_counts(needs, counts) -> list[Finding]:
    """Runs with counts that differ from their photos or do not add up, and runs without an end."""
    decided: Counter = Counter((row["run_id"], row["outcome"]) for row in needs)
    findings = []
    for run_id in {row["id"] for row in counts}:
        rows = [row for row in counts if row["id"] == run_id]
        told = {row["outcome"]: row["counted"] for row in rows if row["outcome"] is not None}
        found = {outcome: n for (run, outcome), n in decided.items() if run == run_id}
        if told != found or sum(told.values()) != rows[0]["photos"]:
            text = f"it counts {told} of {rows[0]['photos']}, its photos are {found}"
            findings.append(Finding("wrong counts", run_id, text))
        if rows[0]["state"] != "done":
            findings.append(Finding("unfinished", run_id, f"it is {rows[0]['state']}"))
    return findings


def without_bytes(stored, folder: Path) -> list[Finding]:
    """Rows whose object is missing or holds other bytes."""
    findings = []
    for key, sha256 in {(row["key"], row["sha256"]) for row in stored}:
        path = folder / key
        if not path.exists():
            findings.append(Finding("without bytes", key, "its row stands and no object does"))
        elif hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            findings.append(Finding("without bytes", key, "the object holds other bytes"))
    return findings


def untold(needs, results, told) -> list[Finding]:
    """Items without a result, with two of one version, or that the application was never told."""
    versions = Counter((row["customer"], row["item"]) for row in results)
    findings = []
    for item in {(row["customer"], row["item"]) for row in needs}:
        if versions[item] != 1:
            findings.append(Finding("results", item, f"it has {versions[item]}, expected one"))
        if item not in told:
            findings.append(Finding("untold", item, "no handler was told of it"))
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


def _kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pause_until(storm: FetchStorm, ends_s: float):
    """For `wait_true`: supervise until then."""

    def is_over() -> bool:
        storm.keep_up()
        return time.monotonic() > ends_s

    return is_over
