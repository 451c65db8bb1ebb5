"""Options of single jobs: retries, timeout, expiry, keys that are kept for a time, and chains."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.kit.waiting import wait_true

from headrace.console.screens.jobs import moments_of
from headrace.jobs import Batch, NewGroup, NewJob
from headrace.jobs.cli.jobs import describe_job
from headrace.jobs.errors import InvalidJob, JobNotWaiting
from headrace.jobs.headers import OwnOptions, options_of, traceparent_of, with_options
from headrace.kernel.logs import new_traceparent

OVER = "it ran over its timeout of 0.2 s"


@pytest.fixture
async def ran(registry, jobs):
    """What ran: queue `mail` with one job a call, `bulk` with batches, both with 3 retries."""
    ran = []

    @registry.task("mail", retries=3)
    async def mail(what: str):
        ran.append(what)
        if what == "endless":
            await asyncio.Event().wait()
        if what.startswith("bad"):
            raise ValueError(what)

    @registry.task("bulk", batch=10, retries=3)
    async def bulk(batch: Batch[dict[str, Any]]):
        ran.extend(payload["what"] for payload in batch.payloads)
        if "endless" in ran:
            await asyncio.Event().wait()

    await jobs.queues.declare()
    return ran


def test_headers_are_read_as_written():
    trace = new_traceparent()
    for options in (
        OwnOptions(),
        OwnOptions(retries=0),
        OwnOptions(retries=7, timeout_s=0.25, expires_s=1790000000.123),
    ):
        headers = with_options(trace, options)
        assert (traceparent_of(headers), options_of(headers)) == (trace, options)
    assert options_of(f"{trace} later=1 retries=2").retries == 2
    assert options_of(None) == OwnOptions()


async def test_a_job_has_its_own_retries_and_timeout(jobs, registry, ran, working, wait_state):
    mail, bulk = registry.get("mail"), registry.get("bulk")
    none = await mail.enqueue(what="bad none", retries=0)
    one = await mail.enqueue(what="bad one", retries=1)
    usual = await mail.enqueue(what="bad usual")
    short = await mail.enqueue(what="endless", retries=0, timeout="200ms")
    batched = await bulk.enqueue_many([{"what": "endless"}] * 2, retries=0, timeout="200ms")
    shown = await jobs.job(short)
    assert (shown.retries, shown.timeout_s, shown.expires_at) == (0, 0.2, None)
    async with working():
        for job_id in (none, one, usual, short, *batched):
            await wait_state(job_id, "failed")
    counts = [ran.count(f"bad {name}") for name in ("none", "one", "usual")]
    assert counts == [1, 2, 4]
    assert {(await jobs.job(job_id)).error for job_id in (short, *batched)} == {OVER}


async def test_an_expired_job_is_cancelled_at_its_start(
    jobs, registry, ran, *, working, wait_state, sql
):
    mail = registry.get("mail")
    late = await mail.enqueue(what="late", expires="1ms")
    later = await mail.enqueue(what="later", after_s=0.2, expires="10m")
    batched = await registry.get("bulk").enqueue_many([{"what": "batched"}], expires="1ms")
    again = await mail.enqueue(what="bad again", expires="2s")
    assert (await jobs.job(late)).expires_at is not None
    async with working(retry_first_s=2.5, retry_max_s=2.5):
        await wait_state(later, "gone")
        for job_id in (late, *batched):
            assert "it expired" in (await wait_state(job_id, "cancelled")).error
        await jobs.retry(late)
        await wait_state(late, "gone")
    assert sorted(set(ran)) == ["bad again", "late", "later"]
    assert (await jobs.job(again)).expires_at is None, "a job that started does not expire"


async def test_a_key_stays_taken_for_a_time(jobs, registry, ran, *, working, wait_state, sql):
    mail = registry.get("mail")
    first = await mail.enqueue(what="news", unique="ann", unique_for="1h")
    bad = await mail.enqueue(what="bad", unique="bob", unique_for="1h", retries=0)
    plain = await mail.enqueue(what="plain", unique="joe")
    async with working():
        await wait_state(first, "gone")
        await wait_state(bad, "failed")
        await wait_state(plain, "gone")
        assert await mail.enqueue(what="again", unique="ann", unique_for="1h") == first
        assert await mail.enqueue(what="again", unique="ann") == first
        assert await mail.enqueue(what="again", unique="bob") != bad, "a failure releases the key"
        assert await mail.enqueue(what="again", unique="joe") != plain
        await sql("UPDATE headrace.job_unique SET kept_until = now() WHERE key = 'ann'")
        members = [NewJob(queue="mail", payload={"what": "more"}, unique="ann", unique_for_s=60)]
        [group] = await jobs.enqueue_groups(
            [NewGroup(members=members, on_done=NewJob(queue="bulk", payload={"what": "end"}))]
        )
        assert group

        async def has_run():
            rows = await sql("SELECT FROM headrace.job_unique WHERE NOT is_done")
            return ran.count("again") == 2 and "more" in ran and not rows

        await wait_true(has_run, what="all jobs have ended")
        await sql("UPDATE headrace.job_unique SET kept_until = now() WHERE is_done")
        await jobs.sweep()
    assert await sql("SELECT FROM headrace.job_unique") == []


async def test_jobs_of_a_chain_run_one_after_another(
    jobs, registry, ran, *, working, wait_state, sql
):
    mail = registry.get("mail")
    ids = await mail.enqueue_many(({"what": f"a{n}"} for n in range(20)), chain="a ж")
    other = await mail.enqueue(what="b0", chain="b")
    failing = [
        await mail.enqueue(what="bad first", chain="c", retries=2),
        await mail.enqueue(what="c1", chain="c", lane="x"),
    ]
    why = await jobs.why(ids[1])
    assert (why.reason, why.text) == (
        "waits_in_chain",
        "the jobs before it in chain 'a ж' have not ended",
    )
    assert (await jobs.job(ids[1])).run_at is None
    await jobs.cancel(ids[0])
    await jobs.delete(ids[3])
    with pytest.raises(JobNotWaiting):
        await jobs.edit(ids[5], after_s=0)
    assert await jobs.edit(ids[5], payload={"what": "changed"}) is None
    async with working():
        for job_id in (ids[-1], other, failing[1]):
            await wait_state(job_id, "gone")
    chained = [what for what in ran if what[0] == "a" or what == "changed"]
    assert chained == ["a1", "a2", "a4", "changed", *(f"a{n}" for n in range(6, 20))]
    assert [what for what in ran if what in ("bad first", "c1")] == ["bad first"] * 3 + ["c1"]
    assert await sql("SELECT FROM headrace.job_chain") == []
    await jobs.retry(failing[0])
    assert (await jobs.job(failing[0])).chain is None


async def test_a_retried_job_keeps_its_last_failure(jobs, registry, *, working, wait_state):
    broken = ["ж" * 300]

    @registry.task("flaky", retries=0, keep_done="1h")
    async def flaky():
        if broken:
            raise ValueError(broken[0])

    await jobs.queues.declare()
    job_id = await flaky.enqueue(timeout="30s")
    assert (await jobs.job(job_id)).failure is None
    async with working():
        failed = await wait_state(job_id, "failed")
        broken[0] = "again"
        await jobs.retry(job_id)
        again = await wait_state(job_id, "failed")
        assert again.failure.at == failed.ended_at
        assert again.failure.error == failed.error[:200]
        assert (again.error, again.attempt) == ("ValueError: again", 1)
        broken.clear()
        await jobs.retry(job_id)
        done = await wait_state(job_id, "done")
    assert (done.failure.at, done.failure.error) == (again.ended_at, "ValueError: again")
    assert (done.attempt, done.timeout_s) == (0, 30.0)
    assert "failed, then retried: ValueError: again" in [one.text for one in moments_of(done)]
    assert "then retried: ValueError: again" in describe_job(done)
    waiting = await flaky.enqueue(after_s=3600)
    await jobs.cancel(waiting)
    await jobs.retry(waiting)
    assert (await jobs.job(waiting)).failure is None, "it was cancelled, and did not fail"


async def test_chains_keep_their_order_among_concurrent_callers(jobs, registry, ran, working, sql):
    """Each job reads what the chain has done so far; no two of them run at once."""
    running, order = [], []

    @registry.task("steps", concurrency=50)
    async def steps(chain_name: str):
        running.append(chain_name)
        order.append(running.count(chain_name))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.remove(chain_name)

    await jobs.queues.declare()

    async def add(name):
        for _ in range(20):
            await steps.enqueue(chain_name=name, chain=name)

    async with working():
        await asyncio.gather(*(add(name) for name in "ababab"))

        async def all_ended():
            return len(order) == 120 and not await sql("SELECT FROM headrace.job_chain")

        await wait_true(all_ended, what="all jobs of both chains have ended")
    assert set(order) == {1}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"retries": -1}, "retries"),
        ({"retries": 1001}, "retries"),
        ({"retries": True}, "retries"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": 604_801}, "timeout_s"),
        ({"expires_s": -1.0}, "expires_s"),
        ({"unique_for_s": 60.0}, "unique_for_s"),
        ({"chain": ""}, "chain"),
        ({"chain": "x" * 129}, "chain"),
        ({"unique": "k", "unique_for_s": 10**9}, "unique_for_s"),
    ],
)
async def test_bad_options_are_refused(jobs, ran, options, named, sql):
    with pytest.raises(InvalidJob, match=f"/0/{named}: expected"):
        await jobs.enqueue_many([NewJob(queue="mail", payload={"what": "x"}, **options)])
    assert await sql("SELECT FROM headrace.job_ready") == []
