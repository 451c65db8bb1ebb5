"""Python, HTTP and commands return the same: `scenario.toml`, and what only one of them shows."""

from __future__ import annotations

import asyncio
import re
import tomllib
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from surfaces import SURFACES, Refused, client_of, run_command, surface_on
from tests.kit.queue_counts import add_counts

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, NewJob, Registry, TakenOutcome, cli, store
from headrace.jobs.errors import LimiterUnknown
from headrace.jobs.fleet.scheduler import Planner
from headrace.jobs.service import bulk
from headrace.jobs.service import queues as queues_service

STEPS = tomllib.loads(Path(__file__).with_name("scenario.toml").read_text())["step"]
END_LEASES = compile_query(
    "end", "-- Leases end.\nUPDATE headrace.host SET expires_at = now() WHERE kind = 'taker'"
)
AGE_MINUTES = compile_query(
    "age", "-- A day passes.\nUPDATE headrace.queue_minute SET minute = minute - interval '1 d'"
)


class Events:
    """Events of the scenario that are no verbs."""

    def __init__(self, postgres, jobs) -> None:
        self._postgres = postgres
        self._jobs = jobs

    async def host_registers(self, *, host, queues, capacity, slots):
        known = await store.queues.find_queues(self._postgres, queues)
        host_id = await store.leases.add_host(self._postgres, host, [q.id for q in known], 3600)
        report = {"capacity": capacity, "load_per_core": 0.5, "slots": slots}
        await store.fleet.report_host(self._postgres, host_id, **report)

    async def leases_expire(self):
        await self._postgres.run(END_LEASES)
        await self._jobs.sweep()

    async def counts_arrive(self, *, queue, **counted):
        [known] = await store.queues.find_queues(self._postgres, [queue])
        await self._jobs.sweep()
        await self._postgres.run(AGE_MINUTES)
        await add_counts(self._postgres, known.id, **counted)


class ScenarioRun:
    """One run of the scenario on one surface."""

    def __init__(self, surface, events) -> None:
        self._surface = surface
        self._events = events
        in_two_hours = datetime.now(UTC) + timedelta(hours=2)
        self._kept = {"in_two_hours": in_two_hours.isoformat(timespec="seconds")}

    async def step(self, step):
        """Do a step and compare its answer; return the whole answer, or its refusal."""
        given = self._filled(step.get("with", {}))
        event = getattr(self._events, step["do"], None)
        if event is not None:
            return await event(**given)
        if "refused" in step:
            with pytest.raises(Refused) as raised:
                await self._surface.do(step["do"], given)
            assert raised.value.told == step["refused"]
            return step["refused"]
        answer = await self._surface.do(step["do"], given)
        require_part(answer, self._filled(step.get("gives", {})) if "gives" in step else answer)
        for name, path in step.get("keep", {}).items():
            value = answer
            for part in path.split("."):
                value = value[int(part) if part.isdigit() else part]
            self._kept[name] = value
        return answer

    def _filled(self, value):
        """`value` with kept values in the place of their names."""
        if isinstance(value, dict):
            return {str(self._filled(k)): self._filled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        if isinstance(value, str) and value.startswith("$"):
            return self._kept[value[1:]]
        return value


def require_part(answer, expected, path="answer"):
    """Fail unless `expected` is a part of the answer; lists must have the same length."""
    if isinstance(expected, dict):
        assert isinstance(answer, dict), f"{path}: {answer!r}"
        for name, value in expected.items():
            require_part(answer.get(name), value, f"{path}.{name}")
    elif isinstance(expected, list):
        assert isinstance(answer, list), f"{path}: {answer!r}"
        assert len(answer) == len(expected), f"{path}: {answer!r}"
        for index, value in enumerate(expected):
            require_part(answer[index], value, f"{path}.{index}")
    elif expected in {"<some>", "<none>"}:
        assert (answer is None) is (expected == "<none>"), f"{path}: {answer!r}"
    else:
        assert answer == expected, path


def without_chance(value, name=""):
    """An answer without what differs from run to run: moments, ages, cursors, numbers in texts."""
    if isinstance(value, dict):
        return {k: without_chance(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [without_chance(one, name) for one in value]
    if value is None:
        return None
    if name.endswith(("_at", "_age_s")) or name in {
        "next",
        "minute",
        "at",
        "traceparent",
        "span_s",
    }:
        return f"<{name}>"
    return re.sub(r"\d+", "N", value) if name == "text" else value


@asynccontextmanager
async def fresh_service(running_engines, config):
    """A service on a separate database."""
    async with running_engines.database() as url:
        postgres = Postgres(url, PostgresConfig())
        jobs = Jobs(postgres, config, Registry())
        yield postgres, jobs
        await jobs.close()
        await postgres.close()


@pytest.mark.slow
async def test_every_surface_returns_the_same(running_engines, config):
    answers = {}
    for name in SURFACES:
        async with (
            fresh_service(running_engines, config) as (postgres, jobs),
            surface_on(name, postgres, jobs) as surface,
        ):
            run, answers[name] = ScenarioRun(surface, Events(postgres, jobs)), []
            for number, step in enumerate(STEPS):
                try:
                    answer = without_chance(await run.step(step))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"{name}, step {number}: {step}")
                    raise
                answers[name].append((number, step["do"], answer))
    for name in SURFACES[1:]:
        for ours, theirs in zip(answers["python"], answers[name], strict=True):
            assert ours == theirs, f"python and {name}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"id": 1}, {"id": 2}),
        ({}, {"id": 1}),
        ({"id": 1}, {"id": "<none>"}),
        ({"id": None}, {"id": "<some>"}),
        ({"jobs": [{"id": 1}, {"id": 2}]}, {"jobs": [{"id": 1}]}),
        (None, {"id": 1}),
    ],
)
def test_a_different_answer_is_detected(answer, expected):
    with pytest.raises(AssertionError):
        require_part(answer, expected)


@pytest.fixture
async def queue(jobs, registry):
    """A queue `q` with the alias `old`."""

    @registry.task("q", aliases=["old"], slots=(1, 9), batch=7, keep_result=True)
    async def handle(job=None): ...

    await jobs.queues.declare()
    return "q"


@pytest.fixture
async def client(postgres, jobs, queue):
    """A client of the room's routes."""
    async with client_of(postgres, jobs) as client:
        yield client


async def shown_by(jobs, *words):
    """The text that a command shows."""
    return (await run_command(jobs, *words))[1]


async def test_names_of_lanes_with_slashes_are_reached(postgres, jobs):
    async with surface_on("http", postgres, jobs) as surface:
        for lane in ("a/b", "https://shop.example/x?y=1", "a%2Fb", "/", "ж/\N{SEAL}"):
            place = {"limiter": "hosts/of us", "lane": lane}
            await jobs.lanes.set(**place, starts_max=1, window_s=60, concurrency=None)
            found = await surface.do("set_lane", {**place, "starts_max": 5, "window_s": 60.0})
            assert (found["lane"], found["starts_max"]) == (lane, 5)
            assert await surface.do("lane", place) == found
            limiter, name = (quote(place[part], safe="") for part in ("limiter", "lane"))
            path = f"/v1/limiters/{limiter}/lanes/{name}/spend"
            spent = [await surface.ask("POST", path, json={"starts": 3}) for _ in range(2)]
            assert spent == [{"wait_s": 0.0}, {"wait_s": None}]
            await surface.do("reset_lane", place)
            assert (await jobs.lanes.get(**place)).follows_limiter
        with pytest.raises(Refused, match=r"web\.not_found"):
            await surface.ask("GET", "/v1%2Flimiters")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("{to:x}",), "PAYLOAD: expected JSON with its quotes (JSON is malformed"),
        (("[" * 9000 + "]" * 9000,), "PAYLOAD: expected JSON that is nested less deeply"),
        (("{}", "--after", "2y"), "--after: expected a duration such as 30s, 10m or 2h, got '2y'"),
        (("{}", "--spread", "x"), "--spread: expected a duration such as 30s, 10m or 2h, got 'x'"),
    ],
)
def test_an_error_of_a_command_names_the_option(words, text):
    add = next(command for command in cli.COMMANDS if command.name == "jobs")
    ran = CliRunner().invoke(add, ["add", "mail", *words])
    assert ran.exception.text.startswith(text)


async def test_pages_are_linked_and_a_cursor_belongs_to_its_filter(client, jobs):
    ids = await jobs.enqueue_many([NewJob(queue="q", lane="a b&c")] * 5)
    first = {"lane": "a b&c", "limit": 2}
    answer = await client.get("/v1/jobs", params=first)
    cursor = answer.json()["next_cursor"]
    seen = [job["id"] for job in answer.json()["jobs"]]
    while "next" in answer.links:
        assert answer.json()["next_cursor"] in answer.links["next"]["url"]
        answer = await client.get(answer.links["next"]["url"])
        seen += [job["id"] for job in answer.json()["jobs"]]
    assert answer.json()["next_cursor"] is None
    assert seen == ids[::-1]
    flipped = ("A" if cursor[0] != "A" else "B") + cursor[1:]
    for params in ({"cursor": cursor}, {**first, "cursor": flipped}):
        answer = await client.get("/v1/jobs", params=params)
        assert (answer.status_code, answer.json()["code"]) == (400, "cursor.invalid"), params
    body = {"action": "cancel", "filter": {"queue": "q"}, "cursor": cursor}
    assert (await client.post("/v1/jobs/bulk", json=body)).json()["code"] == "cursor.invalid"
    assert (await jobs.queues.get("q")).ready == 5


async def test_the_command_says_that_the_end_of_a_running_job_is_requested(client, jobs):
    runs, waits = await jobs.enqueue_many([NewJob(queue="q")] * 2)
    assert [job.id for job in (await jobs.takes.take("q", 1)).jobs] == [runs]
    shown = await shown_by(jobs, "jobs", "cancel", str(runs), "--running")
    assert shown.startswith(f"cancellation of job {runs} is requested")
    shown = await shown_by(jobs, "jobs", "cancel", str(waits), "--running")
    assert shown == f"job {waits} is cancelled"


async def test_a_bulk_action_continues_over_http_and_by_itself_as_a_command(
    client, jobs, monkeypatch
):
    monkeypatch.setattr(bulk, "JOBS_PER_STEP", 2)
    monkeypatch.setattr(bulk, "BULK_S", 0.0)
    await jobs.enqueue_many([NewJob(queue="q")] * 5)
    body = {"action": "delete", "filter": {"queue": "q"}}
    changed = []
    for _ in range(3):
        done = (await client.post("/v1/jobs/bulk", json=body)).json()
        changed.append(done["changed"])
        body["cursor"] = done["next_cursor"]
    assert (changed, done["more"], done["next_cursor"]) == ([2, 2, 1], False, None)
    [*_, last] = await jobs.enqueue_many([NewJob(queue="q")] * 5)
    assert await shown_by(jobs, "jobs", "bulk", "cancel", "--queue", "q") == "cancel: 5 jobs"
    again = ("jobs", "bulk", "retry", "--queue", "q", "--dry-run")
    assert await shown_by(jobs, *again) == "5 jobs match"
    assert await shown_by(jobs, *again, "--id", str(last)) == "1 job matches"
    listed = await shown_by(jobs, "jobs", "ls", "--queue", "q", "--max", "3")
    assert listed.endswith(f"more: --cursor {last - 2}")
    assert listed.count("cancelled") == 6


async def test_a_page_of_lanes_names_the_next_one(jobs):
    for lane in ("-ann", "bob ross"):
        await jobs.lanes.set("smtp", lane, starts_max=1, window_s=1.0, concurrency=None)
    # A value that begins with - would be read as an option after a space.
    for after, hint in (("", "more: --after=-ann"), ("-ann", "more: --after 'bob ross'")):
        page = ("lanes", "ls", "smtp", "--limit", "1", f"--after={after}")
        assert (await shown_by(jobs, *page)).endswith(hint)
    assert "more" not in await shown_by(jobs, "lanes", "ls", "smtp")


@pytest.mark.slow
async def test_a_take_waits_for_a_job_and_its_rest_is_acked(client, jobs):
    nothing = await client.post("/v1/queues/q/take?wait=100ms")
    assert nothing.json() == {"lease_id": None, "jobs": [], "expires_at": None}
    waiting = asyncio.create_task(client.post("/v1/queues/old/take?n=5&wait=20s&lease=1h"))
    ids = await jobs.enqueue_many([NewJob(queue="q", payload=n) for n in range(3)])
    taken = (await waiting).json()
    assert [job["id"] for job in taken["jobs"]] == ids
    body = {
        "outcomes": {str(ids[1]): {"outcome": "fail", "why": "blurred"}},
        "rest": {"outcome": "done", "result": {"ok": 1}},
    }
    path = f"/v1/leases/{taken['lease_id']}/ack"
    assert (await client.post(path, json=body)).status_code == 204
    assert (await client.post(path, json=body)).json()["code"] == "jobs.lease_lost"
    assert [(await jobs.job(i)).state.value for i in ids] == ["done", "failed", "done"]
    assert (await jobs.job(ids[0])).result == {"ok": 1}


async def test_a_second_outcome_of_a_settled_job_is_refused(client, jobs):
    ids = await jobs.enqueue_many([NewJob(queue="q", payload=n) for n in range(3)])
    lease = (await jobs.takes.take("q", 3)).lease_id
    path, first = f"/v1/leases/{lease}/ack", {"outcome": "fail", "why": "blurred"}
    for _ in range(2):
        body = {"outcomes": {str(ids[0]): first}}
        assert (await client.post(path, json=body)).status_code == 204
    for other in ({"outcome": "done"}, {"outcome": "fail", "why": "dark"}):
        body = {"outcomes": {str(ids[0]): other, str(ids[1]): {"outcome": "done"}}}
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["code"]) == (422, "jobs.invalid_take")
        assert f"{ids[0]}: is settled" in refused.json()["detail"]
    found = [(await jobs.job(id_)).state.value for id_ in ids[:2]]
    assert found == ["failed", "leased"], "nothing of a refused ack is recorded"
    body = {"outcomes": {str(ids[0]): first}, "rest": {"outcome": "cancel"}}
    assert (await client.post(path, json=body)).status_code == 204
    found = [(await jobs.job(id_)).state.value for id_ in ids]
    assert found == ["failed", "cancelled", "cancelled"]


async def test_of_concurrent_outcomes_of_a_job_one_is_recorded(jobs, queue):
    ids = await jobs.enqueue_many([NewJob(queue="q", payload=n) for n in range(2)])
    lease = (await jobs.takes.take("q", 2)).lease_id
    given = [{ids[0]: TakenOutcome(outcome="fail", why=f"{n}")} for n in range(5)]
    acks = (jobs.takes.ack(lease, one) for one in given)
    answers = await asyncio.gather(*acks, return_exceptions=True)
    assert sorted(type(one).__name__ for one in answers) == [*["InvalidTake"] * 4, "NoneType"]
    assert (await jobs.job(ids[0])).error == str(answers.index(None))


async def test_every_outcome_can_be_typed(jobs, queue):
    people = await jobs.queues.set("people", create=True)
    for n in range(5):
        await jobs.enqueue(NewJob(queue="q", payload=n, priority=n))
    shown = await shown_by(jobs, "jobs", "take", "q", "-n", "5", "--lease", "10m")
    lease, ids = shown.split()[1], [line.split()[0] for line in shown.splitlines()[2:]]
    assert "until" in await shown_by(jobs, "jobs", "extend", lease, "--lease", "1h")
    words = ["--cancel", ids[0], "--fail", ids[1], "--why", "no", "--done", ids[2]]
    await shown_by(jobs, "jobs", "ack", lease, *words)
    words = ["--snooze", ids[3], "--after", "1h", "--send-to", ids[4], "people"]
    shown = await shown_by(jobs, "jobs", "ack", lease, *words)
    assert shown == f"job {ids[3]}: snooze, job {ids[4]}: send_to"
    found = [await jobs.job(int(job_id)) for job_id in ids]
    states = ["cancelled", "failed", "done", "scheduled", "ready"]
    assert [job.state.value for job in found] == states
    assert (found[0].error, found[3].attempt, found[4].queue) == ("no", 0, people.queue)
    assert await shown_by(jobs, "jobs", "take", "q") == "no job is due"


async def test_a_decision_moves_the_job_or_is_its_result(client, jobs, queue):
    path, decisions = "/v1/queues/people", {"ok": "q", "no": None}
    put = await client.put(f"{path}?create=true", json={"decisions": {"later": None}})
    assert put.json()["decisions"] == {"later": None}
    shown = await shown_by(jobs, "queues", "set", "people", "--decisions", "ok=q,no")
    assert "decisions   ok=q, no" in shown
    status = (await client.get(path)).json()
    assert list(status["decisions"].items()) == list(decisions.items()), "in their order"
    assert status["overridden"] == {"decisions": decisions}
    callback = NewJob(queue="q", payload={})
    async with jobs.group(on_done=callback, keep_results=True) as group:
        jobs_of_people = [NewJob(queue="people", payload={"n": n}) for n in range(3)]
        ids = await jobs.enqueue_many(jobs_of_people, group=group)
    lease = (await jobs.takes.take("people", 3)).lease_id
    ack, wrong = f"/v1/leases/{lease}/ack", {str(ids[0]): {"decision": "perhaps"}}
    refused = (await client.post(ack, json={"outcomes": wrong})).json()
    assert refused["code"] == "jobs.invalid_take"
    assert "expected one of ok, no, got 'perhaps'" in refused["detail"]
    for by in ("a\n", "\x1b[2J"):
        wrong = {str(ids[0]): {"decision": "no", "by": by}}
        refused = await client.post(ack, json={"outcomes": wrong})
        assert (refused.status_code, refused.json()["code"]) == (422, "jobs.invalid_take")
    decided = {str(ids[0]): {"decision": "ok"}, str(ids[1]): {"decision": "no", "by": "ann"}}
    assert (await client.post(ack, json={"outcomes": decided})).status_code == 204
    typed = ["jobs", "ack", str(lease), "--decide", str(ids[2]), "no", "--by", "bob"]
    assert await shown_by(jobs, *typed) == f"job {ids[2]}: no"
    moved = await jobs.job(ids[0])
    assert (moved.state.value, moved.queue, moved.payload) == ("ready", "q", {"n": 0})
    results = [one.result for one in await jobs.group_results(group.id)]
    assert results == [{"decision": "no", "by": by} for by in ("ann", "bob")]
    assert (await client.put(path, json={"decisions": None})).json()["decisions"] == {}


async def test_a_queue_shows_its_settings_slots_and_bounded_counts(client, jobs, sql, monkeypatch):
    put = await client.put("/v1/queues/q", json={"importance": 9, "retries": 0})
    assert put.json()["overridden"] == {"importance": 9, "retries": 0}
    shown = (await client.put("/v1/queues/q", json={"importance": None})).json()
    assert (shown["importance"], shown["overridden"]) == (5, {"retries": 0})
    assert (shown["slots_min"], shown["slots_max"], shown["batch"]) == (1, 9, 7)
    assert (await client.get("/v1/queues/old")).json() == (await client.get("/v1/queues/q")).json()
    assert shown["is_known"] is False
    await sql(
        "INSERT INTO headrace.host (name, queues, slots, expires_at) SELECT 'h', ARRAY[id],"
        """ '[{"queue": "q"}, {"queue": "q"}, {"queue": null}]', now() + interval '1 h'"""
        " FROM headrace.queue"
    )
    shown = (await client.get("/v1/queues/q")).json()
    assert (shown["is_known"], shown["slots"]) == (True, 2)
    text = await shown_by(jobs, "queues", "show", "q")
    assert "2 (1-9)" in text
    assert "retries     0 (override)" in text
    assert "override" not in await shown_by(jobs, "queues", "set", "q", "--retries", "none")
    monkeypatch.setattr(queues_service, "COUNT_MAX", 4)
    for count, lane, after_s in ((2, None, None), (1, "x", None), (5, None, 60)):
        await jobs.enqueue_many([NewJob(queue="q", lane=lane, after_s=after_s)] * count)
    status = await jobs.queues.get("q")
    assert (status.ready, status.ready_is_capped) == (3, False)
    assert (status.scheduled, status.scheduled_is_capped) == (4, True)
    await jobs.enqueue(NewJob(queue="q", lane="x"))
    assert (await jobs.queues.get("q")).ready_is_capped
    [status] = await jobs.queues.all()
    assert (status.ready, status.scheduled, status.ready_is_capped) == (4, 5, False)
    assert " 4+ " in await shown_by(jobs, "queues", "show", "q")


async def test_lanes_and_the_fleet_at_the_terminal(client, postgres, jobs, sql):
    await jobs.lanes.set("q", "x", starts_max=1, window_s=60, concurrency=2)
    assert "(paused)" in await shown_by(jobs, "lanes", "pause", "q", "x")
    shown = await shown_by(jobs, "lanes", "resume", "q", "x")
    assert "paused" not in shown
    assert "1 in 60 s" in shown
    assert await shown_by(jobs, "lanes", "spend", "q", "x") == "begin in 0.000 s"
    refused = await shown_by(jobs, "lanes", "spend", "q", "x", "--wait", "1s")
    assert refused == "refused: nothing was consumed"
    with pytest.raises(LimiterUnknown, match=r"known: q\)"):
        await jobs.lanes.spend("qq", "x")
    assert [limiter.limiter for limiter in await jobs.lanes.limiters()] == ["q"]
    await shown_by(jobs, "lanes", "limiter", "q", "--concurrency", "3")
    assert " code " in await shown_by(jobs, "lanes", "limiter", "q", "--as-declared")
    slots = [{"queue": "q", "pid": 7, "busy_s": 1.0}]
    await Events(postgres, jobs).host_registers(host="a:1", queues=["q"], capacity=5, slots=slots)
    await Events(postgres, jobs).counts_arrive(queue="q", done=8, claimed=10, wait_s=5.0)
    await store.fleet.raise_alert(postgres, "at_max", "q", "it needs more")
    await Planner(postgres, jobs, "me").run_once()
    await sql("UPDATE headrace.fleet_plan SET leads_until = now() + interval '1 h'")
    shown = await shown_by(jobs, "fleet", "show")
    for word in ("plan 1, led by me", "a:1", "q 1", "at_max", "below_min", "1 of at most 5"):
        assert word in shown
    state = (await client.get("/v1/fleet")).json()
    assert (state["hosts"][0]["planned"], state["plan"]["is_led"]) == ({"q": 1}, True)
    assert [alert["rule"] for alert in state["alerts"]] == ["at_max"]
    assert state["decisions"] == (await client.get("/v1/fleet/decisions")).json()
    first = state["decisions"][0]["id"]
    assert (await client.get(f"/v1/fleet/decisions?before={first}")).json() == []
    for before in ("9223372036854775808", "-1"):
        assert (await client.get(f"/v1/fleet/decisions?before={before}")).status_code == 200
    assert len((await client.get("/v1/fleet/alerts?open=true")).json()) == 1
    await jobs.fleet.drain("a:1")
    assert "draining" in await shown_by(jobs, "fleet", "show")
    assert "0 -> 1" in await shown_by(jobs, "fleet", "decisions", "--max", "5")
    assert "open" in await shown_by(jobs, "fleet", "alerts", "--open")
    assert "0.500" in await shown_by(jobs, "fleet", "minutes", "q"), "the mean wait"
    span = ("--from", "2026-01-01T00:00:00+0000", "--to", "2026-01-01T01:00:00+0000")
    assert (await run_command(jobs, "fleet", "minutes", "q", *span))[0] == {"items": []}


async def test_a_cron_is_changed_over_http_and_shown_at_the_terminal(client, jobs):
    words = ("nightly", "0 4 * * *", "q", '{"a": 1}', "--tz", "Europe/Moscow", "--priority", "1")
    added, text = await run_command(jobs, "crons", "add", *words)
    assert (added["payload"], added["priority"]) == ({"a": 1}, 1)
    assert "01:00:00" in text
    assert (await client.get("/v1/crons/nightly")).json() == added
    assert (await client.put("/v1/crons/nightly", json={"paused": True})).json()["paused"]
    changed = (await client.put("/v1/crons/nightly", json={"tz": "UTC", "payload": None})).json()
    assert changed["next_at"].endswith("T04:00:00Z")
    assert (changed["payload"], changed["paused"]) == (None, True)
    ran = (await client.post("/v1/crons/nightly/run")).json()
    assert str(ran["id"]) in await shown_by(jobs, "crons", "ls")
