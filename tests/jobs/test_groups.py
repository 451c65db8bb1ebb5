"""Groups.

The callback comes exactly once, with the right counts, however members end and whoever settles.
"""

from __future__ import annotations

import asyncio

import pytest
from lease_steps import claim_one, live_manager, told
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, InvalidJob, NewGroup, NewJob, store
from headrace.jobs.outcomes import DONE, Outcome, outcomes_by_job


@pytest.fixture
def queues(registry):
    """Two queues that no worker runs."""
    for name in ("members", "callbacks"):
        registry.task(name)(_nothing)


async def _nothing(job: dict) -> None:
    """Never called."""


def group(members, **on_done):
    """A group of `members` payloads."""
    return NewGroup(
        members=[NewJob(queue="members", payload={"n": n}) for n in members],
        on_done=NewJob(queue="callbacks", **on_done),
    )


async def callbacks(sql):
    rows = await sql("""
        SELECT convert_from(payload, 'UTF8')::json AS payload FROM headrace.job_ready r
        JOIN headrace.queue q ON q.id = r.queue WHERE q.name = 'callbacks' ORDER BY r.id""")
    import json

    return [json.loads(row["payload"]) for row in rows]


@pytest.mark.usefixtures("queues")
async def test_a_group_without_members_calls_back_at_once(jobs, sql):
    [group_id] = await jobs.enqueue_groups([group([], payload={"item": 1})])
    counts = {"id": group_id, "done": 0, "failed": 0, "cancelled": 0, "quarantined": 0}
    assert await callbacks(sql) == [{"group": counts, "item": 1}]
    assert await sql("SELECT id FROM headrace.job_group") == []


@pytest.mark.usefixtures("queues")
async def test_every_final_state_counts(jobs, sql, postgres):
    [group_id] = await jobs.enqueue_groups([group(range(5))])
    lease = await claim(jobs, postgres, "members", 4)
    [left] = [job_id for job_id in range(1, 6) if job_id not in lease.ids]
    await jobs.cancel(left)
    outcomes = [DONE, Outcome("fail", None, "no"), Outcome("quarantined"), Outcome("retry", 0.0)]
    assert await settle(postgres, lease, dict(zip(lease.ids, outcomes, strict=True)))
    assert await callbacks(sql) == []
    again = await claim(jobs, postgres, "members", 4)
    assert await settle(postgres, again)
    counts = {"id": group_id, "done": 2, "failed": 1, "cancelled": 1, "quarantined": 1}
    assert await callbacks(sql) == [{"group": counts}]


@pytest.mark.usefixtures("queues")
async def test_concurrent_settlers_call_back_exactly_once(jobs, sql, postgres):
    """Leases of 7 jobs cut across 60 groups of 5, so that settlers meet on the same groups."""
    groups = [group(range(5), payload={"text": "\0"}) for _ in range(60)]
    ids = await jobs.enqueue_groups(groups)
    leases = []
    while lease := await claim(jobs, postgres, "members", 7):
        leases.append(lease)
    assert len(leases) == 43
    settled = await asyncio.gather(*(settle(postgres, lease) for lease in leases * 2))
    assert sorted(settled) == [False] * 43 + [True] * 43
    raw = await sql("""
        SELECT convert_from(payload, 'UTF8') AS payload FROM headrace.job_ready r
        JOIN headrace.queue q ON q.id = r.queue WHERE q.name = 'callbacks'""")
    assert len(raw) == 60
    assert all('"done":5' in row["payload"] and "\\u0000" in row["payload"] for row in raw)
    found = await sql("SELECT id FROM headrace.job_group")
    assert found == []
    assert len(ids) == len(set(ids)) == 60


async def test_a_worker_runs_the_callback(registry, jobs, working):
    told = []

    @registry.task("parts", batch=3)
    async def part(batch: Batch[dict]):
        batch[0].fail("always the first")

    @registry.task("whole")
    async def whole(payload: dict):
        told.append(payload)

    await jobs.enqueue_groups(
        [
            NewGroup(
                members=[part.job({"n": n}) for n in range(3)],
                on_done=whole.job({"name": "x"}),
            )
        ]
    )
    async with working():
        await wait_true(lambda: told)
    assert told[0]["name"] == "x"
    assert (told[0]["group"]["done"], told[0]["group"]["failed"]) == (2, 1)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("payload", [3, [1], "text", {"group": 1}])
async def test_a_callback_takes_an_object_without_group(jobs, sql, payload):
    with pytest.raises(InvalidJob):
        await jobs.enqueue_groups([group([1], payload=payload)])
    assert await sql("SELECT id FROM headrace.job_group") == []


async def claim(jobs, postgres, queue, jobs_max):
    """Claim as a host of its own would."""
    queues = await jobs.queues.declare()
    desk = await live_manager(postgres, jobs.config, [queues[queue].id])
    return await claim_one(desk, queues[queue].id, jobs_max)


async def settle(postgres, lease, outcomes=DONE):
    """Settle in one statement; whether the lease was there and nobody held it."""
    if outcomes is DONE:
        fared = await store.leases.settle(postgres, whole=[lease.lease_id], losses_max=3)
    else:
        message = told(lease, outcomes)
        said = {lease.lease_id: outcomes_by_job(message, message.ids)}
        fared = await store.leases.settle(postgres, jobs=said, losses_max=3)
    return not fared.lost and not fared.busy
