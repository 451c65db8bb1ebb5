"""Why a job is in its state: each reason from real rows, and the order of the checks."""

from __future__ import annotations

import pytest
from lease_steps import claim_lane_jobs, claim_one, settle

from headrace.jobs import NewJob, store
from headrace.jobs.outcomes import Outcome
from headrace.jobs.service import jobs as jobs_service
from headrace.jobs.sql import SQL


@pytest.fixture
async def queue_ids(declare):
    """One queue `q` with a limiter."""
    return await declare(q={"limiter": "lim", "lane": "optional"})


@pytest.fixture
async def host_id(postgres, queue_id):
    """A live host that serves the queue."""
    return await store.leases.add_host(postgres, "one", [queue_id], 30)


async def report(postgres, host_id, *slots):
    named = [{"queue": queue, "pid": 7, "busy_s": busy_s} for queue, busy_s in slots]
    assert await store.fleet.report_host(
        postgres, host_id, capacity=8, load_per_core=0.0, slots=named
    )


async def reason(jobs, job_id):
    return (await jobs.why(job_id)).reason


async def test_code_tags_and_turns(jobs, queue_id, postgres, sql):
    job_id = await jobs.enqueue(NewJob(queue="q"))
    assert await reason(jobs, job_id) == "no_code"
    other_id = await store.leases.add_host(postgres, "other", [queue_id + 1], 30)
    await store.leases.add_host(postgres, "taker", [queue_id], 30, kind="taker")
    assert await reason(jobs, job_id) == "no_code"
    await sql(f"UPDATE headrace.queue SET tag = 'gpu' WHERE id = {queue_id}")
    host_id = await store.leases.add_host(postgres, "one", [queue_id], 30)
    why = await jobs.why(job_id)
    assert why.reason == "no_tag"
    assert "no host with tag gpu" in why.text
    await sql(f"UPDATE headrace.host SET tags = '{{gpu}}' WHERE id = {other_id}")
    assert await reason(jobs, job_id) == "no_tag"
    await sql(f"UPDATE headrace.host SET tags = '{{gpu}}' WHERE id = {host_id}")
    # A host that reports no slots, such as one that runs handlers itself, is trusted to have some.
    assert await reason(jobs, job_id) == "waits_its_turn"
    await sql(f"UPDATE headrace.host SET expires_at = now() WHERE id = {host_id}")
    why = await jobs.why(job_id)
    assert (why.reason, "--tag gpu" in why.text) == ("no_tag", True)


async def test_slots(jobs, host_id, postgres, sql):
    job_id = await jobs.enqueue(NewJob(queue="q"))
    await report(postgres, host_id, ("other", 0.0))
    assert await reason(jobs, job_id) == "no_slot"
    await report(postgres, host_id, ("other", 0.0), ("q", 3.5), (None, 1.0))
    why = await jobs.why(job_id)
    assert (why.reason, "all 2 slots for it are busy" in why.text) == ("waits_its_turn", True)
    await report(postgres, host_id, ("q", 3.5), (None, 0.0))
    assert "the next free slot takes it" in (await jobs.why(job_id)).text
    await postgres.run(SQL.set_draining, host="one", is_draining=True)
    why = await jobs.why(job_id)
    assert (why.reason, "draining" in why.text) == ("no_slot", True)
    await postgres.run(SQL.set_draining, host="one", is_draining=False)
    await jobs.queues.set("q", slots_max=0)
    why = await jobs.why(job_id)
    assert (why.reason, "--slots-max" in why.text) == ("no_slot", True)
    await jobs.queues.pause("q")
    assert await reason(jobs, job_id) == "queue_paused"


async def test_the_number_of_jobs_before_it(jobs, host_id, monkeypatch):
    await jobs.enqueue_many([NewJob(queue="q", priority=0)] * 2)
    await jobs.enqueue_many([NewJob(queue="q", priority=0, after_s=60)] * 2)
    first, job_id = await jobs.enqueue_many([NewJob(queue="q")] * 2)
    await jobs.enqueue_many([NewJob(queue="q"), NewJob(queue="q", priority=9)])
    assert "3 go before it" in (await jobs.why(job_id)).text
    assert "2 go before it" in (await jobs.why(first)).text
    monkeypatch.setattr(jobs_service, "AHEAD_MAX", 2)
    assert "2 or more go before it" in (await jobs.why(job_id)).text


async def test_lanes(jobs, host_id, queue_id, manager):
    ids = await jobs.enqueue_many([NewJob(queue="q", lane="a")] * 4)
    await jobs.lanes.set("lim", "a", starts_max=2, window_s=60, concurrency=1)
    assert "3 go before it in lane 'a'" in (await jobs.why(ids[3])).text
    claim = await claim_lane_jobs(manager, queue_id)
    assert list(claim.ids) == ids[:1]
    assert await reason(jobs, ids[0]) == "running"
    why = await jobs.why(ids[1])
    assert (why.reason, "1 of 1" in why.text) == ("lane_full", True)
    await settle(manager, claim)
    await settle(manager, await claim_lane_jobs(manager, queue_id))
    why = await jobs.why(ids[2])
    assert why.reason == "lane_over_rate"
    assert why.until_at is not None
    await jobs.lanes.set("lim", "a", starts_max=None, window_s=None, concurrency=None, paused=True)
    assert await reason(jobs, ids[2]) == "lane_paused"


async def test_jobs_that_do_not_wait(jobs, host_id, queue_id, manager):
    later = await jobs.enqueue(NewJob(queue="q", after_s=60))
    why = await jobs.why(later)
    assert (why.reason, why.until_at) == ("not_due", (await jobs.job(later)).run_at)
    done, failed = await jobs.enqueue_many([NewJob(queue="q")] * 2)
    claim = await claim_one(manager, queue_id)
    why = await jobs.why(done)
    assert why.text == f"host test runs it under lease {claim.lease_id}"
    no = Outcome("fail", None, "no such peer")
    await settle(manager, claim, {done: Outcome("done"), failed: no})
    why = await jobs.why(done)
    assert (why.reason, "not committed" in why.text) == ("gone", True)
    why = await jobs.why(failed)
    assert why.reason == "failed"
    assert why.text.startswith(
        "no such peer; not retried after run 1 of at most 6: its handler raised `Fail`"
    )
    await jobs.queues.set("q", retries=0)
    assert (await jobs.why(failed)).text == "no such peer; no retry is left after 1 failed run"


async def test_a_kept_job_that_is_done_states_its_end_once(jobs, declare, postgres, manager):
    ids = await declare(kept={"keep_done": "1h"})
    await store.leases.add_host(postgres, "two", [ids["kept"]], 30)
    job_id = await jobs.enqueue(NewJob(queue="kept"))
    claim = await claim_one(manager, ids["kept"])
    await settle(manager, claim, {job_id: Outcome("done")})
    ended = (await jobs.job(job_id)).ended_at
    why = await jobs.why(job_id)
    assert (why.reason, why.text) == ("done", f"it ended at {ended:%Y-%m-%d %H:%M:%S} UTC")


async def test_a_job_that_runs_again_shows_its_last_error(jobs, host_id, queue_id, manager):
    await jobs.queues.set("q", retries=5)
    plain, laned = await jobs.enqueue_many([NewJob(queue="q"), NewJob(queue="q", lane="a")])
    later = Outcome("retry", 60, f"RuntimeError: no peer\n{'x' * 900}")
    await settle(manager, await claim_one(manager, queue_id), {plain: later})
    soon = Outcome("retry", 0, "RuntimeError: laned")
    await settle(manager, await claim_lane_jobs(manager, queue_id), {laned: soon})
    job = await jobs.job(plain)
    assert (job.state, job.attempt) == ("scheduled", 1)
    assert job.error.startswith("RuntimeError: no peer\nxxx")
    assert len(job.error) == 500
    why = await jobs.why(plain)
    due = f"due again at {job.run_at:%Y-%m-%d %H:%M:%S} UTC"
    assert why.text == f"failed 1 of 6 times: RuntimeError: no peer; {due}"
    await jobs.sweep()
    assert (await jobs.job(laned)).error == "RuntimeError: laned", "it moved into its lane"
    assert (await jobs.why(laned)).text.startswith(
        "failed 1 of 6 times: RuntimeError: laned; it is due"
    )
    page = await jobs.find(queue="q")
    assert {found.id: (found.error or "")[:14] for found in page.jobs} == {
        plain: "RuntimeError: ",
        laned: "RuntimeError: ",
    }
    assert not (await jobs.find(queue="q", q="RuntimeError")).jobs, "of those that ended"
