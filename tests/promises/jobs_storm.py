"""A whole installation under faults.

Agents, schedulers, an API and a PostgreSQL that die at random moments.

Clients go on enqueueing in every way there is and write down what they were told; handlers write
down what they did. In the end `findings` compares both with what the database holds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import suppress
from itertools import combinations
from typing import ClassVar

import httpx
from recorded_fleet import HEARTBEAT_S, QUEUES, SETTINGS, RecordedFleet
from slots_host import slot_pids, zygote_pid
from tests.kit.checkers import (
    Finding,
    counted_twice,
    doubled,
    over_concurrency,
    over_limit,
    overlapping,
)
from tests.kit.processes import is_alive
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, NewGroup, NewJob, Registry
from headrace.kernel.errors import Unavailable
from headrace.web.tokens import Tokens

LEASE_S = 2.0
STARTS_MAX, WINDOW_S, CONCURRENCY = 5, 0.5, 3
LANES = "abcd"
KEYS = 12
KEPT = {"retries": 50, "keep_done": "1h"}
DECLARED = {
    **{queue: {"retries": 50} for queue in QUEUES},
    "batched": {"batch": 10, **KEPT},
    "fails": {"retries": 1},
    "fenced": KEPT,
}
"""As `storm_app` says it: whoever declares a queue last says what it is."""
LOST_AFTER_S = LEASE_S - HEARTBEAT_S - 0.3
PLACES = compile_query(
    "places",
    "-- Where every job is.\n"
    "SELECT 'waiting' AS place, id FROM headrace.job_ready"
    " UNION ALL SELECT 'waiting', id FROM headrace.lane_job"
    " UNION ALL SELECT 'leased', u.id FROM headrace.job_lease l, unnest(l.ids) AS u(id)"
    " WHERE u.id <> ALL(l.settled)"
    " UNION ALL SELECT 'done', id FROM headrace.job_done"
    " UNION ALL SELECT state, id FROM headrace.job_failed",
)
LEFT = compile_query(
    "left",
    "-- What is not over.\n"
    "SELECT (SELECT count(*) FROM headrace.job_ready) + (SELECT count(*) FROM headrace.lane_job)"
    " + (SELECT count(*) FROM headrace.job_lease) + (SELECT count(*) FROM headrace.job_group)",
)


class Storm(RecordedFleet):
    """Agents and schedulers that are restarted whenever they end, and the faults that end them."""

    application = "storm_app:app"
    settings: ClassVar = {
        **SETTINGS,
        "HEADRACE_JOBS_LEASE": f"{LEASE_S}s",
        "HEADRACE_JOBS_SWEEP_EVERY": "200ms",
        "HEADRACE_JOBS_PLAN_EVERY": "1s",
        "HEADRACE_JOBS_FLOATS": "3",
        "HEADRACE_JOBS_LOSSES_MAX": "12",
        "HEADRACE_POSTGRES_STATEMENT_TIMEOUT": "5s",
    }

    def __init__(self, folder, postgres, *, postgres_url: str, valkey_url: str) -> None:
        super().__init__(folder, postgres, postgres_url=postgres_url, valkey_url=valkey_url)
        self.postgres_url = postgres_url
        self.agents = {}
        self.schedulers = {}
        self.stopped = {}
        self.faults = []
        self._doubtful_until_s = 0.0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    async def begin(self, engines, chance, *, agents: int, schedulers: int) -> None:
        """Start everything and wait until it serves."""
        self.engines, self.chance = engines, chance
        await self.begin_effects()
        await self.jobs.queues.declare()
        token = await Tokens(self.postgres).create("caller", ("jobs:read", "jobs:write"))
        self.headers = {"authorization": f"Bearer {token.text}"}
        for lane in LANES:
            await self.jobs.lanes.set(
                "laned", lane, starts_max=STARTS_MAX, window_s=WINDOW_S, concurrency=CONCURRENCY
            )
        self.agents = {f"h{n}": self.start("agent", host=f"h{n}") for n in range(agents)}
        self.schedulers = {f"s{n}": self.start("scheduler") for n in range(schedulers)}
        self.api = self.start("api", HEADRACE_WEB_LISTEN=self.address)
        await wait_true(lambda: self.has_hosts(agents))

    def jobs_on(self, postgres):
        """See `RecordedFleet`."""
        registry = Registry()
        for queue, options in DECLARED.items():
            registry.queue(queue, **options)
        return Jobs(postgres, JobsConfig(), registry)

    def keep_up(self) -> None:
        """Start again what ended, as a supervisor does; note whose jobs may have others by now."""
        for name, process in self.agents.items():
            if not is_alive(process.pid):
                self.note_lost(process)
                self.forget(process)
                self.agents[name] = self.start("agent", host=name)
        for name, process in self.schedulers.items():
            if not is_alive(process.pid):
                self.forget(process)
                self.schedulers[name] = self.start("scheduler")
        now_s = time.monotonic()
        for name, since_s in self.stopped.items():
            if now_s - since_s > LOST_AFTER_S:
                self.note_lost(self.agents[name])
        if now_s < self._doubtful_until_s:
            for process in self.agents.values():
                self.note_lost(process)

    def forget(self, process) -> None:
        """It ended; another takes its place."""
        self._processes.remove(process)
        process.kill_all()

    # Faults

    async def suffer(self, fault: str) -> None:
        """Let one happen, to whomever chance picks."""
        self.faults.append(fault)
        running = [name for name in self.agents if name not in self.stopped]
        name = self.chance.choice(running)
        await getattr(self, f"_{fault}")(name)

    async def _kill_slot(self, name: str) -> None:
        pids = slot_pids(self.agents[name])
        if pids:
            pid = self.chance.choice(pids)
            self.recorder.note("lost", "process", pid=pid)
            _send(pid, signal.SIGKILL)

    async def _kill_agent(self, name: str) -> None:
        self.note_lost(self.agents[name])
        _send(self.agents[name].pid, signal.SIGKILL)

    async def _kill_host(self, name: str) -> None:
        self.note_lost(self.agents[name])
        for pid in self.agents[name].family():
            _send(pid, signal.SIGKILL)

    async def _kill_zygote(self, name: str) -> None:
        pid = zygote_pid(self.agents[name])
        if pid is not None:
            _send(pid, signal.SIGKILL)

    async def _kill_scheduler(self, _name: str) -> None:
        _send(self.chance.choice(list(self.schedulers.values())).pid, signal.SIGKILL)

    async def _kill_postgres(self, _name: str) -> None:
        began_s = time.monotonic()
        os.kill(self.engines.postgres_pid, signal.SIGKILL)
        await self.engines.restart("postgres")
        if time.monotonic() - began_s > LOST_AFTER_S:
            self._doubtful_until_s = time.monotonic() + 2.0

    async def _stop_agent(self, name: str) -> None:
        """Past its lease; its slots go on."""
        if len(self.stopped) < len(self.agents) - 1:
            _send(self.agents[name].pid, signal.SIGSTOP)
            self.stopped[name] = time.monotonic()

    async def _stop_host(self, name: str) -> None:
        """Past its lease, with its slots."""
        if len(self.stopped) < len(self.agents) - 1:
            for pid in self.agents[name].family():
                _send(pid, signal.SIGSTOP)
            self.stopped[name] = time.monotonic()

    def wake(self, *, least_s: float = LEASE_S + 0.5) -> None:
        """Let go on who was stopped for so long."""
        now_s = time.monotonic()
        for name, since_s in list(self.stopped.items()):
            if now_s - since_s > least_s:
                del self.stopped[name]
                self.note_lost(self.agents[name])
                self._doubtful_until_s = max(self._doubtful_until_s, now_s + 1.0)
                for pid in reversed(self.agents[name].family()):
                    _send(pid, signal.SIGCONT)

    # What is asked of it

    async def enqueue_noting(self, rows: list[NewJob], service) -> None:
        """Enqueue; where the answer is lost, rows with unique keys are asked for again."""
        facts = {"key": [row.unique for row in rows], "queue": [row.queue for row in rows]}
        while True:
            with suppress(Unavailable), self.recorder.asking("enqueue", **facts) as asked:
                asked.ok(job=await service.enqueue_many(rows))
                return
            if any(row.unique is None for row in rows):
                return
            await pass_moment(0.05)

    async def enqueue_group(self, service, members: int) -> None:
        """A group of jobs with and without lanes, and its callback."""
        rows = [
            NewJob(queue="laned", lane="a", payload={})
            if n % 5 == 0
            else NewJob(queue="batched", payload={"raises": n % 3 == 0})
            for n in range(members)
        ]
        group = NewGroup(members=rows, on_done=NewJob(queue="told"))
        with suppress(Unavailable), self.recorder.asking("group", members=members) as asked:
            asked.ok(group=await service.enqueue_groups([group]))

    async def post(self, client: httpx.AsyncClient, key: str) -> None:
        """Enqueue over HTTP, again and again with one Idempotency-Key until it is answered."""
        headers = {**self.headers, "idempotency-key": key}
        while True:
            with self.recorder.asking("post", request=key) as asked:
                try:
                    answer = await client.post(
                        "/v1/queues/noted/jobs", headers=headers, json={"payload": {}}
                    )
                except httpx.TransportError:
                    asked.unknown()
                else:
                    if answer.status_code == 202:
                        asked.ok(job=answer.json()["ids"])
                        return
                    assert answer.status_code in {409, 500, 503}, answer.text
                    asked.unknown(status=answer.status_code)
            await pass_moment(0.05)

    # What came of it

    async def is_drained(self) -> bool:
        """Whether every job is over."""
        self.keep_up()
        self.wake()
        try:
            return await self.postgres.value(LEFT) == 0
        except Unavailable:
            return False

    async def all_findings(self, *, killers: set[int]) -> list[Finding]:
        """Every promise that was broken."""
        history = self.history
        rows = [(row["place"], row["id"]) for row in await self.postgres.all(PLACES)]
        places = {job: place for place, job in rows}
        quarantined = {job for job, place in places.items() if place == "quarantined"}
        blamed = [
            Finding("quarantined", job, "it never killed a process")
            for job in quarantined - killers
        ]
        once = {"by": "group", "witness": "job", "kind": "start"}
        return [
            *_lost(history, places, killers),
            *blamed,
            *counted_twice("job", [job for _, job in rows]),
            *doubled(history, what="told", **once),
            *_untold_groups(history),
            *doubled(history, what="post", by="request", witness="job"),
            *shared_keys(history),
            *overlapping(history),
            *over_limit(history, starts_max=STARTS_MAX, window_s=WINDOW_S),
            *over_concurrency(history, concurrency=CONCURRENCY),
        ]


def _lost(history, places, killers):
    """Acknowledged jobs that did not end as their queue's jobs must."""
    ended = {
        job
        for event in history.of("end")
        if "error" not in event.facts
        for job in _listed(event.facts["job"])
    }
    queues = {}
    for event in history.of("ok", what="enqueue"):
        queues.update(zip(event.facts["job"], event.facts["queue"], strict=True))
    queues.update(dict.fromkeys(history.told("ok", "post", "job"), "noted"))
    expected = {"fails": "failed", "batched": "done", "fenced": "done"}
    for job, queue in queues.items():
        wanted = "quarantined" if job in killers else expected.get(queue)
        found = places.get(job)
        if found != wanted:
            yield Finding("lost", job, f"of {queue}: its place is {found}, expected {wanted}")
        elif queue != "fails" and job not in killers and job not in ended:
            yield Finding("lost", job, f"of {queue}: no handler finished it")


def _untold_groups(history):
    """Acknowledged groups without a callback, and callbacks whose counts do not add up."""
    told = {event.facts["group"]: event.facts for event in history.of("end", what="told")}
    for event in history.of("ok", what="group"):
        for group in event.facts["group"]:
            members = event.facts["members"]
            if group not in told:
                yield Finding("lost", group, "the group's callback never ended")
            elif told[group]["done"] != members:
                yield Finding("doubled", group, f"of {members} members it counted {told[group]}")


def shared_keys(history):
    """Unique keys that two unfinished jobs had.

    Neither was finished when the other's enqueue was answered.
    """
    finished = {}
    for event in history.of("end"):
        if "error" not in event.facts:
            for job in _listed(event.facts["job"]):
                finished.setdefault(job, event.at_ns)
    told = {}
    for event in history.of("ok", what="enqueue"):
        for key, job in zip(event.facts["key"], event.facts["job"], strict=True):
            if key is not None:
                told.setdefault(key, {}).setdefault(job, event)
    never = float("inf")
    for key, jobs in told.items():
        for first, second in combinations(jobs, 2):
            answers = (jobs[second], jobs[first])
            ends = (finished.get(first, never), finished.get(second, never))
            if all(end > answer.at_ns for end, answer in zip(ends, answers, strict=True)):
                text = f"jobs {first} and {second} had it at once"
                yield Finding("shared key", key, text, answers)


def _listed(value):
    return value if isinstance(value, list) else [value]


def _send(pid, number):
    with suppress(ProcessLookupError):
        os.kill(pid, number)


async def pass_moment(seconds):
    """Let others ask meanwhile."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


def impatient_pool(url):
    """Connections of a client that does not wait long for a dead server."""
    return Postgres(url, PostgresConfig(connect_timeout_s=0.5, statement_timeout_s=5))
