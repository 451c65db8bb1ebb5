"""The jobs room in a storm: clients enqueue in every way, handlers record what they did.

Enqueues through Python with and without unique keys, groups, and HTTP requests that are repeated
with one Idempotency-Key until they are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import combinations
from random import Random

import httpx
from tests.kit.checkers import (
    Finding,
    counted_twice,
    doubled,
    over_concurrency,
    over_limit,
    overlapping,
)
from tests.kit.history import History
from tests.kit.storm.storm import Storm, Tally, pause
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.jobs import NewGroup, NewJob
from headrace.kernel.errors import Unavailable

STARTS_MAX, WINDOW_S, CONCURRENCY = 5, 0.5, 3
LANES = "abcd"
UNIQUE_KEYS = 12
STOPPED = 3
COUNTED = ("noted", "batched", "fenced", "laned", "narrow")
OURS = (
    "(SELECT id FROM headrace.queue WHERE name IN"
    " ('noted', 'laned', 'called_back', 'fenced', 'batched', 'fails', 'narrow'))"
)
PLACES = compile_query(
    "places",
    "-- The state of every job.\n"
    "SELECT 'waiting' AS place, id FROM headrace.job_ready"
    " UNION ALL SELECT 'waiting', id FROM headrace.lane_job"
    " UNION ALL SELECT 'leased', u.id FROM headrace.job_lease l, unnest(l.ids) AS u(id)"
    " WHERE u.id <> ALL(l.settled)"
    " UNION ALL SELECT 'done', id FROM headrace.job_done"
    " UNION ALL SELECT state, id FROM headrace.job_failed",
)
LEFT = compile_query(
    "left",
    "-- Jobs and groups that have not ended.\n"
    f"SELECT (SELECT count(*) FROM headrace.job_ready WHERE queue IN {OURS})"
    f" + (SELECT count(*) FROM headrace.lane_job WHERE queue IN {OURS})"
    f" + (SELECT count(*) FROM headrace.job_lease WHERE queue IN {OURS})"
    " + (SELECT count(*) FROM headrace.job_group)",
)


class JobsRoom:
    """See the module."""

    name = "jobs"
    roles = ("agent", "work", "scheduler", "api")

    def __init__(self, *, has_killer: bool = True) -> None:
        self._has_killer = has_killer
        self.killers: set[int] = set()
        self._posted = 0
        self._done: dict[str, set[int]] = {queue: set() for queue in COUNTED}

    async def begin(self, storm: Storm) -> None:
        """Set the lanes, and enqueue jobs of a stopped queue."""
        self.storm = storm
        # Rows of counts begin at full minutes.
        self._began_at = datetime.now(UTC).replace(second=0, microsecond=0)
        config = PostgresConfig(connect_timeout_s=0.5, statement_timeout_s=5)
        self._pool = Postgres(storm.endpoints.postgres_url, config)
        self._service = storm.jobs_on(self._pool)
        await storm.begin_effects()
        for lane in LANES:
            await storm.jobs.lanes.set(
                "laned", lane, starts_max=STARTS_MAX, window_s=WINDOW_S, concurrency=CONCURRENCY
            )
        await storm.jobs.enqueue_many([NewJob(queue="stopped", payload={})] * STOPPED)

    def clients(self) -> list[Callable[[asyncio.Event], Awaitable[None]]]:
        draws = [Random(self.storm.chance.random()) for _ in range(2)]
        return [
            *(lambda stop, d=draw: self._enqueue(stop, d) for draw in draws),
            self._post,
            *([self._kill] if self._has_killer else []),
        ]

    async def _kill(self, _stop: asyncio.Event) -> None:
        """One job kills its process at every run."""
        killer = NewJob(queue="batched", payload={"dies": True})
        self.killers.update(await self.storm.jobs.enqueue_many([killer]))

    async def _enqueue(self, stop: asyncio.Event, draw: Random) -> None:
        while not stop.is_set():
            if draw.random() < 0.1:
                await self._enqueue_group(draw.randint(0, 20))
            elif draw.random() < 0.3:
                key = f"key-{draw.randrange(UNIQUE_KEYS)}"
                rows = [NewJob(queue="noted", payload={"hold_s": 0.02}, unique=key)]
                while not stop.is_set() and not await self._is_enqueued(rows):
                    await pause(stop, 0.05)
            else:
                await self._is_enqueued([_any_job(draw) for _ in range(draw.randint(1, 8))])
            await pause(stop, draw.uniform(0, 0.15))

    async def _is_enqueued(self, rows: list[NewJob]) -> bool:
        facts = {"key": [row.unique for row in rows], "queue": [row.queue for row in rows]}
        with suppress(Unavailable), self.storm.recorder.asking("enqueue", **facts) as asked:
            asked.ok(job=await self._service.enqueue_many(rows))
            return True
        return False

    async def _enqueue_group(self, members: int) -> None:
        """Members with and without lanes, and a callback."""
        rows = [
            NewJob(queue="laned", lane="a", payload={})
            if n % 5 == 0
            else NewJob(queue="batched", payload={"raises": n % 3 == 0})
            for n in range(members)
        ]
        group = NewGroup(members=rows, on_done=NewJob(queue="called_back"))
        with suppress(Unavailable), self.storm.recorder.asking("group", members=members) as asked:
            asked.ok(group=await self._service.enqueue_groups([group]))

    async def _post(self, stop: asyncio.Event) -> None:
        async with self.storm.client() as client:
            while not stop.is_set():
                self._posted += 1
                while not await self._is_posted(client, f"request-{self._posted}"):
                    await pause(asyncio.Event(), 0.05)
                await pause(stop, 0.1)

    async def _is_posted(self, client: httpx.AsyncClient, key: str) -> bool:
        with self.storm.recorder.asking("post", request=key) as asked:
            try:
                answer = await client.post(
                    "/v1/queues/noted/jobs",
                    headers={"idempotency-key": key},
                    json={"payload": {}},
                )
            except httpx.TransportError:
                asked.unknown()
                return False
            if answer.status_code == 202:
                asked.ok(job=answer.json()["ids"])
                return True
            assert answer.status_code in {409, 500, 503}, answer.text
            asked.unknown(status=answer.status_code)
            return False

    async def is_settled(self) -> bool:
        return await self.storm.postgres.value(LEFT) == 0

    async def findings(self) -> list[Finding]:
        history = self.storm.history
        rows = [(row["place"], row["id"]) for row in await self.storm.postgres.all(PLACES)]
        places = {job: place for place, job in rows}
        self._note_done(history)
        quarantined = {job for job, place in places.items() if place == "quarantined"}
        once = {"by": "group", "witness": "job", "kind": "start"}
        limits = {"starts_max": STARTS_MAX, "window_s": WINDOW_S}
        return [
            *_lost(history, places, self.killers),
            *(Finding("quarantined", job, "no killer") for job in quarantined - self.killers),
            *counted_twice("job", [job for _, job in rows]),
            *doubled(history, what="called_back", **once),
            *_incomplete_groups(history),
            *doubled(history, what="post", by="request", witness="job"),
            *shared_keys(history),
            *overlapping(history),
            *(f for lane in LANES for f in over_limit(history, lane=lane, **limits)),
            *(
                f
                for lane in LANES
                for f in over_concurrency(history, concurrency=CONCURRENCY, lane=lane)
            ),
            *over_concurrency(history, concurrency=2, lane="narrow"),
            *(Finding("stopped", job, "it ran") for job, _ in self.storm.noted("started")),
        ]

    def _note_done(self, history: History) -> None:
        """Remember the jobs that were done, for the counts of the minutes."""
        for queue, done in self._done.items():
            for event in history.of("end", what=queue):
                if "error" not in event.facts:
                    done.update(_listed(event.facts["job"]))

    async def last_findings(self) -> list[Finding]:
        """Queues whose counts per minute differ from all jobs that were done."""
        await self.storm.jobs.sweep()
        found = []
        for queue, done in self._done.items():
            minutes = await self.storm.jobs.queues.minutes(queue, from_at=self._began_at)
            counted = sum(minute.done for minute in minutes)
            if counted != len(done):
                found.append(Finding("minutes", queue, f"{counted} counted, {len(done)} done"))
        return found

    def tally(self) -> Tally:
        history = self.storm.history
        counts = [
            sum(len(history.of(kind, what=what)) for what in ("enqueue", "group", "post"))
            for kind in ("invoke", "ok", "unknown")
        ]
        return Tally(*counts)

    def require_work(self) -> None:
        history = self.storm.history
        assert history.of("ok", what="post")
        assert history.of("end", what="called_back")

    async def round_trip(self) -> bool:
        """Enqueue a job over HTTP and wait until a handler finished it."""
        async with self.storm.client() as client:
            self._posted += 1
            while not await self._is_posted(client, f"request-{self._posted}"):
                await pause(asyncio.Event(), 0.05)
        [event] = self.storm.history.of("ok", what="post")[-1:]
        job = event.facts["job"][0]

        def has_ended() -> bool:
            ends = self.storm.history.of("end", what="noted")
            return any(end.facts["job"] == job for end in ends)

        await wait_true(has_ended, what="the job of a round trip ends")
        return True

    async def close(self) -> None:
        await self._pool.close()


def _any_job(draw: Random) -> NewJob:
    after_s = draw.choice((None, None, draw.uniform(0, 1)))
    rest = {"after_s": after_s, "priority": draw.randint(0, 9)}
    match draw.randrange(9):
        case 0:
            return NewJob(queue="fails", payload={}, **rest)
        case 1 | 2:
            return NewJob(queue="fenced", payload={}, **rest)
        case 3:
            payload = {"hold_s": draw.uniform(0, 0.1)}
            return NewJob(queue="laned", lane=draw.choice(LANES), payload=payload, **rest)
        case 4 | 5:
            return NewJob(queue="noted", payload={"hold_s": draw.uniform(0, 0.1)}, **rest)
        case 6:
            return NewJob(queue="narrow", payload={"hold_s": draw.uniform(0, 0.05)}, **rest)
        case _:
            payload = {"raises": draw.choice((0, 0, 0, 1)), "hold_s": 0.002}
            return NewJob(queue="batched", payload=payload, **rest)


def _lost(history: History, places: dict[int, str], killers: set[int]):
    """Acknowledged jobs that did not end as jobs of their queue must."""
    ended = {
        job
        for event in history.of("end")
        if "error" not in event.facts and "job" in event.facts
        for job in _listed(event.facts["job"])
    }
    queues = dict.fromkeys(killers, "killer")
    for event in history.of("ok", what="enqueue"):
        queues.update(zip(event.facts["job"], event.facts["queue"], strict=True))
    queues.update(dict.fromkeys(history.reported("ok", "post", "job"), "noted"))
    expected = {"fails": "failed", "batched": "done", "fenced": "done", "killer": "quarantined"}
    for job, queue in queues.items():
        if places.get(job) != expected.get(queue):
            yield Finding("lost", job, f"of {queue}: its state is {places.get(job)}")
        elif queue not in ("fails", "killer") and job not in ended:
            yield Finding("lost", job, f"of {queue}: no handler finished it")


def _incomplete_groups(history: History):
    """Acknowledged groups without a callback, and callbacks whose counts do not add up."""
    done = {
        event.facts["group"]: event.facts["done"] for event in history.of("end", what="called_back")
    }
    for event in history.of("ok", what="group"):
        for group in event.facts["group"]:
            if group not in done:
                yield Finding("lost", group, "the group's callback never ended")
            elif done[group] != event.facts["members"]:
                text = f"of {event.facts['members']} members it counted {done[group]}"
                yield Finding("doubled", group, text)


def shared_keys(history: History):
    """Unique keys of two unfinished jobs: neither ended before the other's enqueue was answered."""
    finished: dict[int, int] = {}
    for event in history.of("end"):
        if "error" not in event.facts and "job" in event.facts:
            for job in _listed(event.facts["job"]):
                finished.setdefault(job, event.at_ns)
    users: dict[str, dict[int, object]] = {}
    for event in history.of("ok", what="enqueue"):
        for key, job in zip(event.facts["key"], event.facts["job"], strict=True):
            if key is not None:
                users.setdefault(key, {}).setdefault(job, event)
    never = float("inf")
    for key, jobs in users.items():
        for first, second in combinations(jobs, 2):
            answers = (jobs[second], jobs[first])
            ends = (finished.get(first, never), finished.get(second, never))
            if all(end > answer.at_ns for end, answer in zip(ends, answers, strict=True)):
                text = f"jobs {first} and {second} shared it"
                yield Finding("shared key", key, text, answers)


def _listed(value):
    return value if isinstance(value, list) else [value]
