"""Bad input: the exact error, no stored change, and the next good call works.

`bad_calls` is the corpus for every surface; this file adds what only Python can pass.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from bad_calls import CALLS, COMMANDS, REQUESTS
from surfaces import SURFACES, PythonSurface, Refused, surface_on

from headrace.__main__ import main
from headrace.jobs import NewJob
from headrace.jobs.errors import (
    BatchTooLarge,
    InvalidJob,
    InvalidSetting,
    LeaseLost,
    PayloadTooLarge,
    QueueUnknown,
)
from headrace.jobs.model import AT_AWAY_S_MAX
from headrace.kernel.errors import HeadraceError

NOW = datetime.now(UTC)
FAR = NOW + timedelta(days=400)
YEAR = NOW + timedelta(days=365)
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001
BEFORE_ALL = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
NAN, INFINITE = float("nan"), float("inf")
BAD_JOBS = [
    *(({"queue": queue}, QueueUnknown) for queue in ("nobody", "a\0")),
    *(({"priority": priority}, InvalidJob) for priority in (-1, 10, "5", True)),
    *(({"at": at}, InvalidJob) for at in (FAR, NAIVE, BEFORE_ALL, "noon")),
    ({"at": NOW, "after_s": 1}, InvalidJob),
    *(({"after_s": after_s}, InvalidJob) for after_s in (-1, NAN, 4e7, 10**400)),
    *(
        ({"spread_s": s}, InvalidJob)
        for s in (-1.0, NAN, INFINITE, "2h", AT_AWAY_S_MAX + 1, 10**400)
    ),
    *(
        ({"spread_s": 2 * 86_400.0, **due}, InvalidJob)
        for due in ({"at": YEAR}, {"after_s": 3.1536e7})
    ),
    *(({"lane": lane}, InvalidJob) for lane in ("", "x" * 129, "a\0b", "\ud800")),
    *(({"unique": key}, InvalidJob) for key in ("x" * 129, "a\n")),
    *(({"version": version}, InvalidJob) for version in (0, 32_768, True, "1")),
    *(({"payload": value}, InvalidJob) for value in (object(), "\ud800", {"a": NAN}, "text")),
    ({"payload": "x" * 65_536}, PayloadTooLarge),
]


async def test_one_bad_job_refuses_the_whole_call(jobs, registry, sql):
    @registry.task("q")
    async def handle(job: dict | None): ...

    await jobs.queues.declare()
    calls = [([NewJob(queue="q"), NewJob(**{"queue": "q", **fault})], e) for fault, e in BAD_JOBS]
    calls.append(([NewJob(queue="q")] * 10_001, BatchTooLarge))
    calls.append(([NewJob(queue="q", payload="x" * 65_000)] * 260, BatchTooLarge))
    calls.append(([NewJob(queue="q", priority=11, lane="") for _ in range(70)], InvalidJob))
    for given, error in calls:
        with pytest.raises(error) as raised:
            await jobs.enqueue_many(given)
        assert isinstance(raised.value, HeadraceError)
        if error is InvalidJob and len(given) == 2 and raised.value.problems:
            assert raised.value.problems[0].pointer.startswith("/1/"), given
    assert len(raised.value.problems) == 100, "every fault up to a bound"
    with pytest.raises(InvalidJob):
        await jobs.enqueue_many([NewJob(queue="q")], group=5)
    good = await handle.enqueue({})
    rows = await sql("SELECT id FROM headrace.job_ready UNION SELECT id FROM headrace.lane_job")
    assert [row["id"] for row in rows] == [good]


async def test_what_is_no_job_is_refused_with_the_call_that_was_meant(jobs, registry):
    @registry.task("mail")
    async def mail(to: str): ...

    calls = {
        "expected a job such as task.job(field=value), got 'nope'": lambda: jobs.enqueue("nope"),
        "jobs.enqueue(NewJob(queue='nope', payload=...))": lambda: jobs.enqueue("nope", {"a": 1}),
        "got 'task mail': enqueue into a task by `await task.enqueue(": lambda: jobs.enqueue(mail),
        "/1: expected a job": lambda: jobs.enqueue_many([mail.job(to="a"), {"to": "b"}]),
        "expected a list, each of them a job": lambda: jobs.enqueue_many("mail"),
        "expected a list, each of them a job such as task.job(field=value), got 5": (
            lambda: jobs.enqueue_many(5)
        ),
        "task 'mail': enqueue_many: expected a list of payloads, got None": (
            lambda: mail.enqueue_many(None)
        ),
        "job x does not exist": lambda: jobs.result("x"),
    }
    for text, call in calls.items():
        with pytest.raises(HeadraceError, match=re.escape(text)):
            await call()


async def test_the_largest_call_and_any_json_are_stored(jobs, registry):
    registry.queue("q")
    ids = await jobs.enqueue_many([NewJob(queue="q", payload={"x": "x" * 1000})] * 10_000)
    assert ids == sorted(set(ids))
    assert len(ids) == 10_000
    assert await jobs.enqueue_many([]) == []
    payload = {"nul": "\\u0000", "emoji": "\N{PILE OF POO}", "deep": [[[1.5, None, True]]], "": ""}
    job_id = await jobs.enqueue(
        NewJob(queue="q", payload=payload, lane="ж" * 128, unique="🦭" * 128)
    )
    assert json.dumps((await jobs.job(job_id)).payload) == json.dumps(payload)


class Photo(msgspec.Struct):
    """A payload with a shape."""

    n: int
    size: float | None = None


async def test_values_that_cannot_be_stored_are_refused_with_their_place(jobs, registry):
    registry.queue("people")
    for payload, place in (
        ({"n": 1, "size": INFINITE}, "/size"),
        ({"n": None, "all": [1.5, {"a/b~": NAN}]}, "/all/1/a~1b~0"),
        (Photo(1, -INFINITE), "/size"),
        (NAN, ""),
        ({"to": ["ann", "b\0b"]}, "/to/1"),
        ({"a\0": 1}, ""),
        (msgspec.Raw(b'{"to": "\\u0000"}'), "/to"),
    ):
        given = [NewJob(queue="people"), NewJob(queue="people", payload=payload)]
        with pytest.raises(InvalidJob, match=r"neither NaN nor Infinity|NUL") as raised:
            await jobs.enqueue_many(given)
        assert raised.value.problems[0].pointer == f"/1/payload{place}"
    fine = {"a": "null", "b": None, "c": [1.5], "raw": msgspec.Raw(b"null")}
    job_id = await jobs.enqueue(NewJob(queue="people", payload=fine))
    assert (await jobs.job(job_id)).payload == fine | {"raw": None}


async def test_a_refused_value_is_shown(jobs, registry):
    registry.queue("q")
    for given, shown in (
        ({"priority": 11}, "/0/priority: expected a whole number 0 to 9, got 11"),
        ({"after_s": -5}, "got -5"),
        ({"lane": "a\n"}, r"got 'a\n'"),
        ({"unique": "x" * 129}, f"got '{'x' * 40}'"),
    ):
        with pytest.raises(InvalidJob) as raised:
            await jobs.enqueue(NewJob(queue="q", **given))
        assert shown in raised.value.text
    with pytest.raises(InvalidSetting, match="0 to 1000, or none for what code declares, got -1"):
        await jobs.queues.set("q", retries=-1)


class OnlyInSlots(msgspec.Struct):
    """A payload that only a slot can read."""

    def __post_init__(self):
        raise RuntimeError("no connection here")


async def test_a_payload_of_the_wrong_shape_is_refused_at_enqueue(jobs, registry, sql):
    @registry.task("photos", version=2, upgrade={1: lambda old: old})
    async def handle(photo: Photo): ...

    @registry.task("mail")
    async def mail(to: str): ...

    @registry.task("odd")
    async def odd(payload: OnlyInSlots): ...

    bad = [{"n": 1}, {"n": "x"}, None]
    for call in (
        lambda: jobs.enqueue_many([NewJob(queue="photos", payload=p, version=2) for p in bad]),
        lambda: handle.enqueue_many(bad),
    ):
        text = r"/1/payload/n: queue 'photos': expected int, got str 'x'"
        with pytest.raises(InvalidJob, match=text) as raised:
            await call()
        assert [p.pointer for p in raised.value.problems] == ["/1/payload/n", "/2/payload"]
    with pytest.raises(InvalidJob, match="/0/payload/cc: queue 'mail': no such field"):
        await jobs.enqueue(NewJob(queue="mail", payload={"to": "ann", "cc": 1}))
    assert await sql("SELECT id FROM headrace.job_ready") == []
    # Other versions are for other code or for an upgrade, and code of a type runs in slots only.
    for version in (1, 3):
        await jobs.enqueue(NewJob(queue="photos", payload={"n": "x"}, version=version))
    assert await jobs.enqueue(NewJob(queue="odd", payload={}))


@dataclasses.dataclass
class Order:
    """A payload of another kind of record."""

    lines: list[int]


async def test_a_refused_payload_is_named_with_queue_field_value_and_expectation(jobs, registry):
    @registry.task("orders")
    async def orders(order: Order): ...

    @registry.task("by-number")
    async def by_number(prices: dict[int, float], name: str): ...

    for queue, payload, faults in (
        ("orders", {"lines": [1, "x"]}, ["/0/payload/lines/1: {} expected int, got str 'x'"]),
        (
            "by-number",
            {"prices": {"7": 1.5, "8": "much"}, "nam": 1},
            [
                "/0/payload/prices/8: {} expected float, got str 'much'",
                "/0/payload/name: {} the field is missing",
                "/0/payload/nam: {} no such field, did you mean name?",
            ],
        ),
    ):
        with pytest.raises(InvalidJob) as raised:
            await jobs.enqueue(NewJob(queue=queue, payload=payload))
        expected = [fault.format(f"queue {queue!r}:") for fault in faults]
        assert [f"{p.pointer}: {p.text}" for p in raised.value.problems] == expected
        assert raised.value.text == f"nothing was enqueued: {'; '.join(expected)}"


SHOP = """
from headrace import Headrace

app = Headrace()


@app.task("photos", version=2, upgrade={1: lambda old: old})
async def show(n: int) -> None: ...


@app.task("mail", limiter="smtp")
async def send(n: int) -> None: ...
"""


async def test_the_command_checks_a_payload_by_the_application_that_it_names(
    database_url, tmp_path, monkeypatch, capfd, sql
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "payload_shop.py").write_text(SHOP)
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", database_url)
    monkeypatch.setenv("HEADRACE_VALKEY_URL", "valkey://127.0.0.1:1")

    async def run(*words):
        sys.modules.pop("payload_shop", None)
        code = await asyncio.to_thread(main, ["jobs", *words])
        return code, capfd.readouterr()

    app = ("--app", "payload_shop:app")
    code, printed = await run("add", "photos", '{"n": 1}', *app)
    assert code == 0, printed.err
    code, printed = await run("add", "photos", '{"n": "x"}', *app)
    assert code == InvalidJob.exit_code
    assert "enqueued: /payload/n: queue 'photos': expected int, got str 'x'" in printed.err
    assert "/0/" not in printed.err
    code, printed = await run("add", "mail", '{"n": 1}', *app)
    assert code == InvalidJob.exit_code
    assert "enqueued: /lane: queue 'mail' has limiter 'smtp'" in printed.err
    assert "--lane NAME" in printed.err
    [row] = await sql("SELECT id, version FROM headrace.job_ready")
    assert row["version"] == 2, "without --version the job has the version of the task"
    code, printed = await run("edit", str(row["id"]), "--payload", '{"n": "x"}', *app)
    assert code == InvalidJob.exit_code
    assert "expected int, got str 'x'" in printed.err
    code, printed = await run("add", "photos", '{"n": "x"}')
    assert (code, printed.err) == (0, ""), "no code, no check"
    assert "null" not in printed.out
    for words in (("add", "photos"), ("add", "photos", "null")):
        code, printed = await run(*words)
        assert (code, printed.out.endswith(", with the empty payload null\n")) == (0, True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for words, note in (
        (("add", "photos", "{}"), "headrace: the payload was not checked: --app MODULE:APP"),
        (("add", "photos", "{}", "--json"), ""),
        (("add", "photos", '{"n": 1}', *app), ""),
        (("edit", str(row["id"]), "--priority", "3"), ""),
    ):
        code, printed = await run(*words)
        assert code == 0, printed.err
        assert printed.err.startswith(note), words
        assert bool(printed.err) == bool(note), words


async def test_ids_and_names_that_were_never_given(jobs):
    for job_id in (0, -1, 2**62, 2**63, -(2**70), "x", 1.5, None, True):
        for verb in (jobs.job, jobs.why, jobs.cancel, jobs.retry):
            with pytest.raises(HeadraceError) as raised:
                await verb(job_id)
            assert raised.value.code == "jobs.job_unknown"
    for lease_id in (0, -1, "x", 1.5, None, 12345, 2**63, 2**80):
        for call in (jobs.takes.ack(lease_id, {}), jobs.takes.extend(lease_id)):
            with pytest.raises(LeaseLost):
                await call
    for name in ("nobody", "", "\0", "\ud800"):
        for verb in (jobs.queues.get, jobs.queues.pause, jobs.queues.resume, jobs.takes.take):
            with pytest.raises(QueueUnknown):
                await verb(name)
        with pytest.raises(QueueUnknown):
            await jobs.find(queue=name)
    assert (await jobs.find(cursor=-1)).jobs == (await jobs.find(cursor=2**70)).jobs == []


async def test_numbers_that_only_python_can_pass(jobs, registry):
    registry.queue("q")
    await jobs.queues.declare()
    for count, lease_s in ((True, 1), ("3", 1), (1, NAN), (1, INFINITE), (1, "1h"), (1, None)):
        with pytest.raises(HeadraceError) as raised:
            await jobs.takes.take("q", count, lease_s=lease_s)
        assert raised.value.code == "jobs.invalid_take"
    with pytest.raises(HeadraceError):
        await jobs.takes.take("q", wait_s=NAN)
    for jobs_max in (-5, True, 1.5):
        with pytest.raises(HeadraceError):
            await jobs.find(jobs_max=jobs_max)
    for starts, wait_max_s in ((-1, 0), (True, 0), (1, -1), (1, NAN), (1, 1e9)):
        with pytest.raises(InvalidJob):
            await jobs.lanes.spend("l", "x", starts, wait_max_s=wait_max_s)
    for limits in ((5, NAN, None, 1), (2.5, 60, None, 1), (None, None, 2.5, 1), (5, 60, None, 1.5)):
        names = ("starts_max", "window_s", "concurrency", "weight")
        with pytest.raises(InvalidJob):
            await jobs.lanes.set("l", "x", **dict(zip(names, limits, strict=True)))
    for number in (2**31, 10**400):
        limits = {"starts_max": number, "window_s": 60, "concurrency": number}
        with pytest.raises(InvalidJob) as raised:
            await jobs.lanes.set("l", "x", **limits)
        bounds = {problem.pointer: problem.text for problem in raised.value.problems}
        assert bounds["/starts_max"].startswith("expected 1 to 1000000000, got ")
        assert bounds["/concurrency"].startswith("expected 1 to 1000000000")


class Place:
    """Jobs in every state, with their ids in `names`; `pictured` is all that is stored."""

    def __init__(self, jobs, sql) -> None:
        self._do = PythonSurface(jobs).do
        self._sql = sql
        self.names = {}

    async def furnish(self):
        """Store jobs in every state, a lease and a cron."""
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
                given = {"lease": taken["lease_id"], "outcomes": {self.names[name]: outcome}}
                await self._do("ack", given)
                self.names["over"] = taken["lease_id"]
            if name == "failed":
                await self._sql("UPDATE headrace.queue SET keep_done_s = 3600")
        self.names["ready"] = await self._add()
        self.names["later"] = await self._add(after_s=3600)
        for name in ("nightly", "declared"):
            await self._do("add_cron", {"name": name, "spec": "0 4 * * *", "queue": "mail"})
        await self._sql("UPDATE headrace.cron SET source = 'code' WHERE name = 'declared'")

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
        """Every row of every table except tokens, as digests."""
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


async def bad_calls_of(name, surface, place):
    """Description, expected refusal and call of each bad input of one surface."""
    for verb, given, refusal in CALLS:
        expected = refusal.get(name, refusal["else"]) if isinstance(refusal, dict) else refusal
        if expected is not None:
            yield f"{verb} {given!r:.120}", expected, surface.do(verb, place.filled(given))
    if name == "http":
        for method, path, body, refusal in REQUESTS:
            found = re.sub(r"\$(\w+)", lambda match: str(place.names[match[1]]), path)
            headers = {} if body is None else {"content-type": "application/json"}
            call = surface.ask(method, found, content=body, headers=headers)
            yield f"{method} {path:.80} {body!r:.80}", refusal, call
    if name == "commands":
        for words, refusal in COMMANDS:
            yield " ".join(words), refusal, surface.run(*map(str, place.filled(words)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_the_corpus_is_refused_and_stores_no_change(postgres, jobs, sql, name):
    place, faults, count = Place(jobs, sql), [], 0
    await place.furnish()
    async with surface_on(name, postgres, jobs) as surface:
        before = await place.pictured()
        async for what, expected, call in bad_calls_of(name, surface, place):
            try:
                found = f"answered {await call!r:.200}"
            except Refused as refused:
                found = refused.told
            count += 1
            if found != expected:
                faults.append(f"{what}: expected {expected}, {found}")
            if count % 4:
                continue
            after = await place.pictured()
            changed = [table for table in before if before[table] != after[table]]
            if changed:
                faults.append(f"{what} or one of the 3 calls before changed {changed}")
            good = (await surface.do("enqueue", {"queue": "mail", "payload": what}))["ids"]
            assert (await surface.do("job", {"job": good[0]}))["payload"] == what
            await surface.do("delete", {"job": good[0]})
            before = await place.pictured()
        assert await place.pictured() == before
    assert not faults, "\n" + "\n".join(faults)
