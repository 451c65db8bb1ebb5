"""Bad input at the door: the exact error, nothing changed, and the next good call works.

`bad_calls` is the corpus, tried on every way in; the rest here is what only Python can be given.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from bad_calls import CALLS, COMMANDS, REQUESTS
from surfaces import SURFACES, PythonSurface, Refused, surface_on

from headrace.jobs import NewJob
from headrace.jobs.errors import BatchTooLarge, InvalidJob, LeaseLost, PayloadTooLarge, QueueUnknown
from headrace.kernel.errors import HeadraceError

FAR = datetime.now(UTC) + timedelta(days=400)
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001
BEFORE_ALL = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
JOBS = {
    "queue": (QueueUnknown, {"queue": "nobody"}),
    "queue_nul": (QueueUnknown, {"queue": "a\0"}),
    "priority_low": (InvalidJob, {"priority": -1}),
    "priority_high": (InvalidJob, {"priority": 10}),
    "priority_text": (InvalidJob, {"priority": "5"}),
    "priority_bool": (InvalidJob, {"priority": True}),
    "at_far": (InvalidJob, {"at": FAR}),
    "at_naive": (InvalidJob, {"at": NAIVE}),
    "at_before_the_calendar": (InvalidJob, {"at": BEFORE_ALL}),
    "at_text": (InvalidJob, {"at": "noon"}),
    "at_and_after": (InvalidJob, {"at": datetime.now(UTC), "after_s": 1}),
    "after_negative": (InvalidJob, {"after_s": -1}),
    "after_nan": (InvalidJob, {"after_s": float("nan")}),
    "after_far": (InvalidJob, {"after_s": 4e7}),
    "after_beyond_floats": (InvalidJob, {"after_s": 10**400}),
    "spread_beyond_floats": (InvalidJob, {"spread_s": 10**400}),
    "lane_empty": (InvalidJob, {"lane": ""}),
    "lane_long": (InvalidJob, {"lane": "x" * 129}),
    "lane_nul": (InvalidJob, {"lane": "a\0b"}),
    "lane_surrogate": (InvalidJob, {"lane": "\ud800"}),
    "unique_long": (InvalidJob, {"unique": "x" * 129}),
    "unique_newline": (InvalidJob, {"unique": "a\n"}),
    "payload_object": (InvalidJob, {"payload": object()}),
    "payload_surrogate": (InvalidJob, {"payload": "\ud800"}),
    "payload_nan": (InvalidJob, {"payload": {"a": float("nan")}}),
    "payload_of_another_type": (InvalidJob, {"payload": "text"}),
    "payload_huge": (PayloadTooLarge, {"payload": "x" * 65_536}),
}


@pytest.fixture
def door(registry, jobs, sql):
    """A declared queue; ends by checking that a good job still goes in, alone."""

    @registry.task("q")
    async def handle(job: dict | None): ...

    async def check(call, error):
        with pytest.raises(error) as raised:
            await call()
        assert isinstance(raised.value, HeadraceError)
        good = await handle.enqueue({})
        rows = await sql("SELECT id FROM headrace.job_ready UNION SELECT id FROM headrace.lane_job")
        assert [row["id"] for row in rows] == [good]
        return raised.value

    return check


@pytest.mark.parametrize("name", JOBS)
async def test_one_bad_job_stops_the_whole_call(door, jobs, name):
    error, fault = JOBS[name]
    bad = NewJob(**{"queue": "q", **fault})
    raised = await door(lambda: jobs.enqueue_many([NewJob(queue="q"), bad]), error)
    if error is InvalidJob and raised.problems:
        assert raised.problems[0].pointer.startswith("/1/")


async def test_every_fault_of_a_call_is_told(door, jobs):
    bad = [NewJob(queue="q", priority=11, lane="") for _ in range(70)]
    raised = await door(lambda: jobs.enqueue_many(bad), InvalidJob)
    assert len(raised.problems) == 100


async def test_too_many_jobs_and_bytes(door, jobs):
    many = [NewJob(queue="q")] * 10_001
    await door(lambda: jobs.enqueue_many(many), BatchTooLarge)


async def test_too_many_bytes(door, jobs):
    heavy = [NewJob(queue="q", payload="x" * 65_000)] * 260
    await door(lambda: jobs.enqueue_many(heavy), BatchTooLarge)


async def test_the_largest_call_passes(jobs, registry):
    @registry.task("q")
    async def handle(job: dict | None): ...

    ids = await jobs.enqueue_many([NewJob(queue="q", payload={"x": "x" * 1000})] * 10_000)
    assert ids == sorted(set(ids))
    assert len(ids) == 10_000
    assert await jobs.enqueue_many([]) == []


async def test_what_json_can_hold_comes_back(jobs, registry):
    @registry.task("q")
    async def handle(job: dict | None): ...

    payload = {"nul": "\0", "emoji": "\N{PILE OF POO}", "deep": [[[1.5, None, True]]], "": ""}
    job_id = await jobs.enqueue(
        NewJob(queue="q", payload=payload, lane="ж" * 128, unique="🦭" * 128)
    )
    job = await jobs.job(job_id)
    assert job.payload == payload
    assert json.dumps(job.payload) == json.dumps(payload)


class Photo(msgspec.Struct):
    """A payload with a shape."""

    n: int
    size: float | None = None


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"n": 1, "size": float("inf")}, "/size"),
        ({"n": None, "all": [1.5, {"a/b~": float("nan")}]}, "/all/1/a~1b~0"),
        (Photo(1, -float("inf")), "/size"),
        (float("nan"), ""),
    ],
)
async def test_numbers_that_json_has_not_are_refused_where_they_are(jobs, registry, payload, place):
    registry.queue("people")
    with pytest.raises(InvalidJob, match="neither NaN nor Infinity") as raised:
        await jobs.enqueue_many([NewJob(queue="people"), NewJob(queue="people", payload=payload)])
    assert raised.value.problems[0].pointer == f"/1/payload{place}"
    fine = {"a": "null", "b": None, "c": [1.5], "raw": msgspec.Raw(b"null")}
    job_id = await jobs.enqueue(NewJob(queue="people", payload=fine))
    assert (await jobs.job(job_id)).payload == fine | {"raw": None}


async def test_a_payload_of_the_wrong_shape_is_refused_at_the_door(postgres, jobs, registry, sql):
    @registry.task("photos", version=2, upgrade={1: lambda old: old})
    async def handle(photo: Photo): ...

    @registry.task("mail")
    async def mail(to: str): ...

    bad = [{"n": 1}, {"n": "x"}, None]
    for call in (
        lambda: jobs.enqueue_many([NewJob(queue="photos", payload=p, version=2) for p in bad]),
        lambda: handle.enqueue_many(bad),
    ):
        with pytest.raises(InvalidJob, match=r"/1/payload: Expected `int`, got `str`") as raised:
            await call()
        assert [p.pointer for p in raised.value.problems] == ["/1/payload", "/2/payload"]
    with pytest.raises(InvalidJob, match="unknown field `whom`"):
        await jobs.enqueue(NewJob(queue="mail", payload={"to": "ann", "whom": 1}))
    async with surface_on("http", postgres, jobs) as surface:
        with pytest.raises(Refused, match=r"422 jobs.invalid_job"):
            await surface.do("enqueue", {"queue": "mail", "payload": {"to": 5}})
    assert await sql("SELECT id FROM headrace.job_ready") == []
    # Other versions are for other code, or for an upgrade, to judge.
    for version in (1, 3):
        await jobs.enqueue(NewJob(queue="photos", payload={"n": "x"}, version=version))


async def test_a_type_with_code_of_its_own_is_judged_at_the_run(jobs, registry):
    @registry.task("odd")
    async def handle(payload: OnlyInSlots): ...

    assert await jobs.enqueue(NewJob(queue="odd", payload={}))


class OnlyInSlots(msgspec.Struct):
    """A payload that only a slot can read."""

    def __post_init__(self):
        raise RuntimeError("no connection here")


@pytest.mark.parametrize("job_id", [0, -1, 2**62, 2**63, -(2**70), "x", 1.5, None, True])
async def test_ids_never_given(jobs, job_id):
    for verb in (jobs.job, jobs.why, jobs.cancel, jobs.retry):
        with pytest.raises(HeadraceError) as raised:
            await verb(job_id)
        assert raised.value.code == "jobs.job_unknown"


async def test_a_group_that_is_none(door, jobs):
    await door(lambda: jobs.enqueue_many([NewJob(queue="q")], group=5), InvalidJob)


@pytest.mark.parametrize("lease_id", [0, "x", 1.5, None])
async def test_leases_never_given(jobs, lease_id):
    for verb in (jobs.takes.ack(lease_id, {}), jobs.takes.extend(lease_id)):
        with pytest.raises(LeaseLost):
            await verb


@pytest.mark.parametrize("number", [2**31, 10**400])
async def test_a_limit_that_is_too_great_is_told_its_bound(jobs, number):
    limits = {"starts_max": number, "window_s": 60, "concurrency": number}
    with pytest.raises(InvalidJob) as raised:
        await jobs.lanes.set("l", "x", **limits)
    bounds = {problem.pointer: problem.text for problem in raised.value.problems}
    assert bounds["/starts_max"] == "expected 1 to 1000000000"
    assert bounds["/concurrency"].startswith("expected 1 to 1000000000")


async def test_queues_never_declared(jobs):
    for verb in (jobs.queues.get, jobs.queues.pause, jobs.queues.resume):
        with pytest.raises(QueueUnknown):
            await verb("nobody")
        for name in ("\0", "\ud800"):
            with pytest.raises(QueueUnknown):
                await verb(name)


class Place:
    """Jobs in every state, of which `names` tells the ids; `pictured` is all that is stored."""

    def __init__(self, jobs, sql) -> None:
        self._do = PythonSurface(jobs).do
        self._sql = sql
        self.names = {}

    async def furnish(self):
        """Fill it."""
        await self._do("set_queue", {"queue": "mail", "retries": 3})
        self.names["keyed"] = await self._add(unique="k")
        await self._do("cancel", {"job": self.names["keyed"]})
        await self._add(unique="k", lane="x")
        for name in ("gone", "failed", "kept", "leased"):
            self.names[name] = await self._add(priority=0)
            taken = await self._do("take", {"queue": "mail"})
            while [job["id"] for job in taken["jobs"]] != [self.names[name]]:
                taken = await self._do("take", {"queue": "mail"})
            self.names["lease"] = taken["lease_id"]
            if name != "leased":
                outcome = {"outcome": "fail" if name == "failed" else "done", "why": "no"}
                said = {"lease": taken["lease_id"], "outcomes": {self.names[name]: outcome}}
                await self._do("ack", said)
                self.names["over"] = taken["lease_id"]
            if name == "failed":
                await self._sql("UPDATE headrace.queue SET keep_done_s = 3600")
        self.names["ready"] = await self._add()
        self.names["later"] = await self._add(after_s=3600)
        cron = {"name": "nightly", "spec": "0 4 * * *", "queue": "mail"}
        await self._do("add_cron", cron)

    def filled(self, value):
        """`value` with ids in the place of names."""
        if isinstance(value, dict):
            return {self.filled(k): self.filled(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.filled(one) for one in value]
        if isinstance(value, str) and value.startswith("$"):
            return self.names[value[1:]]
        return value

    async def pictured(self):
        """Every row of every table but the tokens', as digests."""
        tables = await self._sql(
            "SELECT c.relname AS name FROM pg_class c WHERE c.relkind = 'r'"
            " AND c.relnamespace = 'headrace'::regnamespace AND c.relname <> 'token' ORDER BY 1"
        )
        parts = " UNION ALL ".join(
            f"SELECT '{table['name']}' AS name,"
            " md5(string_agg(t::text, ',' ORDER BY t::text)) AS sum"
            f" FROM headrace.{table['name']} t"
            for table in tables
        )
        return {row["name"]: row["sum"] for row in await self._sql(parts)}

    async def _add(self, **job):
        return (await self._do("enqueue", {"queue": "mail", **job}))["ids"][0]


async def tries_of(name, surface, place):
    """(what is tried, how it is to be refused, the call) of one surface."""
    for verb, given, told in CALLS:
        expected = told.get(name, told["else"]) if isinstance(told, dict) else told
        if expected is not None:
            shown = f"{verb} {given!r:.120}"
            yield shown, expected, surface.do(verb, place.filled(given))
    if name == "http":
        for method, path, body, told in REQUESTS:
            found = re.sub(r"\$(\w+)", lambda match: str(place.names[match[1]]), path)
            headers = {} if body is None else {"content-type": "application/json"}
            call = surface.ask(method, found, content=body, headers=headers)
            yield f"{method} {path:.80} {body!r:.80}", told, call
    if name == "commands":
        for words, told in COMMANDS:
            yield " ".join(words), told, surface.run(*map(str, place.filled(words)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_the_corpus_is_refused_and_changes_nothing(postgres, jobs, sql, name):
    place, faults = Place(jobs, sql), []
    await place.furnish()
    async with surface_on(name, postgres, jobs) as surface:
        before = await place.pictured()
        async for what, expected, call in tries_of(name, surface, place):
            try:
                told = f"answered {await call!r:.200}"
            except Refused as refused:
                told = refused.told
            after = await place.pictured()
            changed = [table for table in before if before[table] != after[table]]
            if told != expected or changed:
                faults.append(f"{what}: expected {expected}, {told}; changed {changed}")
            before = after
            good = (await surface.do("enqueue", {"queue": "mail", "payload": what}))["ids"]
            assert (await surface.do("job", {"job": good[0]}))["payload"] == what
            await surface.do("delete", {"job": good[0]})
            assert await place.pictured() == before, what
    assert not faults, "\n" + "\n".join(faults)
