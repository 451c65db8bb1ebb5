"""Steering over HTTP and at the terminal, where it is more than the verbs.

Pages, cursors, waiting, what is shown.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from surfaces import client_of

from headrace.jobs import NewJob, cli
from headrace.jobs.errors import InvalidTake
from headrace.jobs.model import TakenOutcome
from headrace.jobs.service import bulk
from headrace.jobs.service import queues as queues_service

STATES = ("scheduled", "ready")
"""What becomes of a snoozed job and one that was sent on."""


@pytest.fixture
async def queue(jobs, registry):
    """A queue `q` by the alias `old`."""

    @registry.task("q", aliases=["old"], slots=(1, 9), batch=7, keep_result=True)
    async def handle(job=None): ...

    await jobs.queues.declare()
    return "q"


@pytest.fixture
async def client(postgres, jobs, queue):
    """A client of the room's routes."""
    async with client_of(postgres, jobs) as client:
        yield client


async def typed(jobs, *words):
    """What a command prints for people."""
    loop, shown = asyncio.get_running_loop(), []
    terminal = SimpleNamespace(
        run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(verb(jobs), loop).result(20),
        show=lambda _value, text: shown.append(text),
        progress=shown.append,
    )
    command = next(one for one in cli.COMMANDS if one.name == words[0])
    ran = await asyncio.to_thread(CliRunner().invoke, command, words[1:], obj=terminal)
    assert ran.exit_code == 0, (ran.output, ran.exception)
    return shown


async def test_pages_are_linked(client, jobs):
    ids = await jobs.enqueue_many([NewJob(queue="q", lane="a b&c")] * 5)
    answer = await client.get("/v1/jobs", params={"lane": "a b&c", "limit": 2})
    seen = [job["id"] for job in answer.json()["jobs"]]
    while "next" in answer.links:
        assert answer.json()["next_cursor"] in answer.links["next"]["url"]
        answer = await client.get(answer.links["next"]["url"])
        assert len(answer.json()["jobs"]) in {1, 2}
        seen += [job["id"] for job in answer.json()["jobs"]]
    assert answer.json()["next_cursor"] is None
    assert seen == ids[::-1]


async def test_a_cursor_belongs_to_its_list_and_filter(client, jobs):
    await jobs.enqueue_many([NewJob(queue="q")] * 3)
    first = {"queue": "q", "limit": 1}
    cursor = (await client.get("/v1/jobs", params=first)).json()["next_cursor"]
    good = await client.get("/v1/jobs", params={**first, "limit": 9, "cursor": cursor})
    assert len(good.json()["jobs"]) == 2
    flipped = ("A" if cursor[0] != "A" else "B") + cursor[1:]
    for asked in ({"cursor": cursor}, {**first, "cursor": flipped}, {**first, "cursor": ""}):
        answer = await client.get("/v1/jobs", params=asked)
        assert (answer.status_code, answer.json()["code"]) == (400, "cursor.invalid"), asked
    body = {"action": "cancel", "filter": {"queue": "q"}, "cursor": cursor}
    answer = await client.post("/v1/jobs/bulk", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "cursor.invalid")
    assert (await jobs.queues.get("q")).ready == 3


async def test_a_bulk_action_goes_on_over_http(client, jobs, monkeypatch):
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
    assert (await jobs.find()).jobs == []


async def test_the_command_goes_on_by_itself(jobs, queue, monkeypatch):
    monkeypatch.setattr(bulk, "JOBS_PER_STEP", 2)
    monkeypatch.setattr(bulk, "BULK_S", 0.0)
    await jobs.enqueue_many([NewJob(queue="q")] * 5)
    shown = await typed(jobs, "jobs", "bulk", "cancel", "--queue", "q")
    assert shown == ["2 of 2 jobs", "4 of 4 jobs", "cancel: 5 jobs"]
    assert await typed(jobs, "jobs", "bulk", "retry", "--queue", "q", "--dry-run") == ["5 jobs fit"]
    [told] = await typed(jobs, "jobs", "bulk", "cancel", "--id", "1", "--queue", "q", "--dry-run")
    assert told == "0 jobs fit"
    [told] = await typed(jobs, "jobs", "bulk", "retry", "--id", "1", "--queue", "q", "--dry-run")
    assert told == "1 job fits"
    [listed] = await typed(jobs, "jobs", "ls", "--queue", "q", "--max", "3")
    assert listed.endswith("more: --before 3")
    assert listed.count("cancelled") == 6


async def test_a_job_is_removed_over_http(client, jobs):
    job_id = await jobs.enqueue(NewJob(queue="q"))
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 409
    assert (await client.delete(f"/v1/jobs/{job_id}?keep=false")).status_code == 204
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["state"] == "gone"
    assert (await client.delete(f"/v1/jobs/{job_id}?keep=false")).status_code == 409
    assert (await client.post(f"/v1/jobs/{job_id}/retry")).status_code == 409


@pytest.mark.slow
async def test_a_take_waits_for_a_job(client, jobs):
    began_s = time.monotonic()
    nothing = await client.post("/v1/queues/q/take?wait=100ms")
    assert nothing.json() == {"lease_id": None, "jobs": [], "expires_at": None}
    assert time.monotonic() - began_s >= 0.1
    waiting = asyncio.create_task(client.post("/v1/queues/old/take?n=5&wait=20s&lease=1h"))
    ids = await jobs.enqueue_many([NewJob(queue="q", payload=n) for n in range(2)])
    taken = (await waiting).json()
    assert [job["id"] for job in taken["jobs"]] == ids
    for query in ("wait=31s", "wait=-1s", "wait=soon", "lease=0s", "lease=x", "n=0", "n=1001"):
        answer = await client.post(f"/v1/queues/q/take?{query}")
        assert (answer.status_code, answer.json()["code"]) == (422, "jobs.invalid_take"), query


async def test_the_rest_of_a_lease(client, jobs):
    ids = await jobs.enqueue_many([NewJob(queue="q", payload=n) for n in range(3)])
    lease_id = (await client.post("/v1/queues/q/take?n=3")).json()["lease_id"]
    assert lease_id is not None
    empty = await client.post(f"/v1/leases/{lease_id}/ack", json={})
    assert (empty.status_code, empty.json()["code"]) == (422, "jobs.invalid_take")
    said = {
        "outcomes": {str(ids[1]): {"outcome": "fail", "why": "blurred"}},
        "rest": {"outcome": "done", "result": {"ok": 1}},
    }
    assert (await client.post(f"/v1/leases/{lease_id}/ack", json=said)).status_code == 204
    answer = await client.post(f"/v1/leases/{lease_id}/ack", json=said)
    assert (answer.status_code, answer.json()["code"]) == (409, "jobs.lease_lost")
    for name in ("x", "+1", "9223372036854775808"):
        answer = await client.post(f"/v1/leases/{name}/extend")
        assert (answer.status_code, answer.json()["code"]) == (409, "jobs.lease_lost")
    assert [(await jobs.job(i)).state.value for i in ids] == ["done", "failed", "done"]
    assert (await jobs.job(ids[0])).result == {"ok": 1}
    assert (await jobs.job(ids[1])).error == "blurred"


async def test_taking_by_hand(jobs, queue):
    [job_id] = await jobs.enqueue_many([NewJob(queue="q", payload={"n": 1})])
    [shown] = await typed(jobs, "jobs", "take", "q", "--lease", "10m")
    assert '{"n":1}' in shown
    lease = shown.split()[1]
    assert "until" in (await typed(jobs, "jobs", "extend", lease, "--lease", "1h"))[0]
    told = await typed(jobs, "jobs", "ack", lease, "--retry", str(job_id), "--after", "1m")
    assert told == [f"job {job_id}: retry"]
    assert (await jobs.job(job_id)).state.value == "scheduled"
    assert await typed(jobs, "jobs", "take", "q") == ["nothing is due"]
    with pytest.raises(InvalidTake):
        await jobs.takes.take("q", wait_s=float("nan"))
    taken = await jobs.takes.take("q")
    assert taken.lease_id is None


async def test_every_word_can_be_typed(jobs, queue):
    people = await jobs.queues.set("people", create=True)
    for n in range(5):
        await jobs.enqueue(NewJob(queue="q", payload=n, priority=n))
    [shown] = await typed(jobs, "jobs", "take", "q", "-n", "5")
    lease, ids = shown.split()[1], [line.split()[0] for line in shown.splitlines()[2:]]
    words = ["--cancel", ids[0], "--fail", ids[1], "--why", "no", "--done", ids[2]]
    await typed(jobs, "jobs", "ack", lease, *words)
    words = ["--snooze", ids[3], "--after", "1h", "--send-to", ids[4], "people"]
    [told] = await typed(jobs, "jobs", "ack", lease, *words)
    assert told == f"job {ids[3]}: snooze, job {ids[4]}: send_to"
    found = [await jobs.job(int(job_id)) for job_id in ids]
    assert [job.state.value for job in found] == ["cancelled", "failed", "done", *STATES]
    assert (found[0].error, found[3].attempt, found[4].queue) == ("no", 0, people.queue)


async def test_lanes_are_paused_and_spent_from_at_the_terminal(jobs, queue):
    await jobs.lanes.set("q", "x", starts_max=1, window_s=60, concurrency=2)
    assert "(paused)" in (await typed(jobs, "lanes", "pause", "q", "x"))[0]
    [shown] = await typed(jobs, "lanes", "resume", "q", "x")
    assert "paused" not in shown
    assert "1 in 60 s" in shown
    assert await typed(jobs, "lanes", "spend", "q", "x") == ["begin in 0.000 s"]
    [told] = await typed(jobs, "lanes", "spend", "q", "x", "--wait", "1s")
    assert told == "refused: nothing was consumed"
    await typed(jobs, "lanes", "limiter", "q", "--concurrency", "3")
    assert "by code" in (await typed(jobs, "lanes", "limiter", "q", "--as-declared"))[0]


async def test_outcomes_win_over_the_rest(jobs, queue):
    ids = await jobs.enqueue_many([NewJob(queue="q", payload=n) for n in range(2)])
    taken = await jobs.takes.take("q", 2)
    back = TakenOutcome(outcome="return")
    await jobs.takes.ack(taken.lease_id, {ids[0]: back}, rest=TakenOutcome(outcome="fail"))
    assert [(await jobs.job(i)).state.value for i in ids] == ["ready", "failed"]


async def test_a_queue_shows_what_holds(client, jobs, sql):
    put = await client.put("/v1/queues/q", json={"importance": 9, "retries": 0})
    assert put.json()["overridden"] == {"importance": 9, "retries": 0}
    put = await client.put("/v1/queues/q", json={"importance": None})
    shown = put.json()
    assert (shown["importance"], shown["overridden"]) == (5, {"retries": 0})
    assert (shown["slots_min"], shown["slots_max"], shown["batch"]) == (1, 9, 7)
    assert (await client.get("/v1/queues/old")).json() == (await client.get("/v1/queues/q")).json()
    assert shown["is_known"] is False
    await sql(
        "INSERT INTO headrace.host (name, queues, slots, expires_at) SELECT 'h', ARRAY[id],"
        """ '[{"queue": "q"}, {"queue": "q"}, {"queue": null}]', now() + interval '1 min'"""
        " FROM headrace.queue"
    )
    shown = (await client.get("/v1/queues/q")).json()
    assert (shown["is_known"], shown["slots"]) == (True, 2)
    [text] = await typed(jobs, "queues", "show", "q")
    assert "2 (1-9)" in text
    assert "retries     0 (by hand)" in text
    [text] = await typed(jobs, "queues", "set", "q", "--retries", "none")
    assert "by hand" not in text


async def test_counts_stop_at_a_bound(jobs, queue, monkeypatch):
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
    assert " 4+ " in (await typed(jobs, "queues", "show", "q"))[0]
