"""Crons: when they fire, how they are changed, and how code declares them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec
import pytest
from surfaces import client_of

from headrace.jobs.crons import NewCron
from headrace.jobs.errors import CronFixed, InvalidCron

YEARLY = "0 4 1 1 *"
"""It becomes due only when a test makes it due: no minute turns during the test."""


@pytest.fixture
async def report(registry, jobs):
    """A cron into queue `reports`, which code declares."""

    @registry.task("reports")
    async def reports(job: dict | None): ...

    cron = NewCron(name="report", spec=YEARLY, queue="reports", payload={"kind": "daily"})
    return await jobs.crons.add(cron)


@pytest.fixture
def make_due(sql):
    """Make crons due since an interval."""

    async def age(interval="1 s"):
        await sql(f"UPDATE headrace.cron SET next_at = now() - interval '{interval}'")

    return age


async def waiting(jobs, queue="reports"):
    return (await jobs.queues.get(queue)).ready


async def test_a_cron_fires_once_also_if_it_was_missed(jobs, report, make_due):
    assert await jobs.crons.fire_due() == 0
    await make_due()
    assert await jobs.crons.fire_due() == 1
    assert await jobs.crons.fire_due() == 0
    found = await jobs.crons.get("report")
    job = await jobs.job(found.last_job)
    assert (job.queue, job.payload, job.priority) == ("reports", {"kind": "daily"}, 5)
    assert found.next_at > found.last_at
    assert found.next_at.second == 0
    await make_due("3 d")
    assert await jobs.crons.fire_due() == 1
    assert await jobs.crons.fire_due() == 0
    assert await waiting(jobs) == 2
    assert (await jobs.crons.get("report")).next_at > datetime.now(UTC)


async def test_a_cron_into_a_queue_whose_jobs_need_a_lane_is_refused(registry, jobs):
    @registry.task("limited", limiter="l")
    async def limited(job: dict | None): ...

    await jobs.queues.declare()
    with pytest.raises(InvalidCron, match="need a lane"):
        await jobs.crons.add(NewCron(name="never", spec=YEARLY, queue="limited"))


async def test_schedulers_at_once_fire_each_once(jobs, report, make_due):
    for name in "abcde":
        await jobs.crons.add(NewCron(name=name, spec=YEARLY, queue="reports"))
    await make_due()
    fired = await asyncio.gather(*(jobs.crons.fire_due() for _ in range(5)))
    assert sum(fired) == 6
    assert await waiting(jobs) == 6


async def test_a_paused_cron_does_not_fire_later(jobs, report, make_due):
    await jobs.crons.pause("report")
    await make_due("1 h")
    assert await jobs.crons.fire_due() == 0
    resumed = await jobs.crons.resume("report")
    assert not resumed.paused
    assert await jobs.crons.fire_due() == 0
    assert await waiting(jobs) == 0


async def test_run_now_leaves_the_next_moment(jobs, report):
    job_id = await jobs.crons.run("report")
    found = await jobs.crons.get("report")
    assert (found.last_job, found.next_at) == (job_id, report.next_at)
    assert await waiting(jobs) == 1


async def test_a_cron_that_became_invalid_is_paused_with_its_error(jobs, report, make_due, sql):
    await jobs.crons.add(NewCron(name="well", spec=YEARLY, queue="reports"))
    await make_due()
    await sql("UPDATE headrace.cron SET tz = 'Mars/Olympus' WHERE name = 'report'")
    await jobs.crons.fire_due()
    found = await jobs.crons.get("report")
    assert found.paused
    assert "Mars/Olympus" in found.error
    assert await waiting(jobs) == 1, "the other fired"


async def test_change_and_remove(jobs, report):
    changed = await jobs.crons.change("report", spec="0 4 * * *", priority=1, payload={"n": 1})
    assert (changed.spec, changed.priority, changed.payload) == ("0 4 * * *", 1, {"n": 1})
    assert (changed.next_at.hour, changed.next_at.minute) == (4, 0)
    assert (await jobs.crons.change("report", paused=True)).paused
    assert (await jobs.crons.change("report", spec="0 5 * * *")).paused
    assert not (await jobs.crons.change("report", paused=False)).paused
    await jobs.crons.remove("report")
    assert await jobs.crons.all() == []


@pytest.fixture
def declared(registry):
    """The crons of code that declares `nightly`."""

    @registry.cron("0 4 * * *")
    async def nightly(): ...

    return registry.crons


async def test_code_declares_and_alone_changes(jobs, declared, make_due):
    assert await jobs.crons.declare() == 1
    found = await jobs.crons.get("nightly")
    assert (found.source, found.spec) == ("code", "0 4 * * *")
    with pytest.raises(CronFixed):
        await jobs.crons.change("nightly", spec="0 5 * * *")
    with pytest.raises(CronFixed):
        await jobs.crons.remove("nightly")
    await jobs.crons.pause("nightly")
    await jobs.crons.declare()
    assert (await jobs.crons.get("nightly")).paused, "the pause of an operator stays"
    await jobs.crons.resume("nightly")
    await make_due("1 h")
    await jobs.crons.declare()
    assert await jobs.crons.fire_due() == 1, "a missed moment fires after code starts"
    declared["nightly"] = msgspec.structs.replace(declared["nightly"], spec="0 5 * * *")
    await make_due("1 h")
    await jobs.crons.declare()
    assert await jobs.crons.fire_due() == 0, "a changed schedule starts from scratch"
    assert (await jobs.crons.get("nightly")).next_at.hour == 5


async def test_a_cron_that_code_no_longer_declares_does_not_fire(jobs, declared, make_due, sql):
    await jobs.crons.declare()
    await make_due()
    await sql("UPDATE headrace.cron SET declared_at = now() - interval '2 h'")
    assert await jobs.crons.fire_due() == 0
    await jobs.crons.declare()
    assert await jobs.crons.fire_due() == 1, "its code runs again"
    await sql("UPDATE headrace.cron SET declared_at = now() - interval '31 d'")
    assert await jobs.crons.forget() == 1


async def test_an_invalid_declaration_leaves_the_others(jobs, declared):
    wrong = msgspec.structs.replace(declared["nightly"], name="wrong", tz="Mars/Olympus")
    declared["wrong"] = wrong
    assert await jobs.crons.declare() == 1


async def test_a_repeated_request_runs_once(postgres, jobs, report):
    cron = {"name": "new", "spec": "0 4 * * *", "queue": "reports"}
    async with client_of(postgres, jobs) as client:
        for path, body, status in (("/v1/crons", cron, 201), ("/v1/crons/report/run", None, 202)):
            headers = {"Idempotency-Key": path}
            first = await client.post(path, json=body, headers=headers)
            again = await client.post(path, json=body, headers=headers)
            assert (first.status_code, again.status_code) == (status, status)
            assert first.json() == again.json()
            assert again.headers["idempotency-replayed"] == "true"
    assert await waiting(jobs) == 1
    assert (await jobs.crons.get("report")).last_job == first.json()["id"]


async def test_a_cron_in_the_callers_transaction(postgres, jobs, report):
    class Undone(Exception):
        pass

    new = NewCron(name="new", spec="0 4 * * *", queue="reports")

    async def change():
        async with postgres.transaction() as tx:
            assert (await jobs.crons.add(new, tx=tx)).name == "new"
            await jobs.crons.run("new", tx=tx)
            raise Undone

    with pytest.raises(Undone):
        await change()
    assert await waiting(jobs) == 0
    assert [cron.name for cron in await jobs.crons.all()] == ["report"]
