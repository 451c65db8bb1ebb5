"""Groups: the callback is enqueued once, after the block and the last member, with exact counts."""

from __future__ import annotations

import asyncio

import pytest
from lease_steps import claim_one
from tests.kit.waiting import wait_true

from headrace.jobs import NewGroup, NewJob, QueueUnknown, store
from headrace.jobs.errors import GroupClosed, InvalidJob, InvalidTask
from headrace.jobs.service.fleet import Sweeper


@pytest.fixture
def tasks(registry):
    """A member's task, what ran of it, the callback's task and what it received."""
    runs, received = [], []

    @registry.task("member", concurrency=5, retries=0)
    async def member(n: int):
        runs.append(n)
        if n < 0:
            raise ValueError

    @registry.task("report")
    async def report(job: dict):
        received.append(job)

    return member, runs, report, received


async def test_settlements_at_once_enqueue_each_callback_once(jobs, manager, queue_id, sql):
    """Leases of 7 jobs cut across 60 groups of 5, so that settlements meet on the same groups."""
    member = NewJob(queue="q")
    on_done = NewJob(queue="far", payload={"text": "\\u0000"})
    groups = [NewGroup(members=[member] * 5, on_done=on_done)] * 60
    ids = await jobs.enqueue_groups(groups)
    leases = []
    while lease := await claim_one(manager, queue_id, 7):
        leases.append(lease)

    async def settled(lease):
        return await store.leases.settle(manager._postgres, whole=[lease.lease_id], losses_max=3)

    results = await asyncio.gather(*map(settled, leases * 2))
    assert sum(bool(result.lost or result.busy) for result in results) == len(leases) == 43
    rows = await sql(
        "SELECT convert_from(payload, 'UTF8') AS payload FROM headrace.job_ready r"
        " JOIN headrace.queue q ON q.id = r.queue WHERE q.name = 'far'"
    )
    assert len(rows) == len(set(ids)) == 60
    assert all('"done":5' in row["payload"] and "\\\\u0000" in row["payload"] for row in rows)
    assert await sql("SELECT id FROM headrace.job_group") == []


async def test_the_callback_waits_for_the_end_of_the_block(jobs, tasks, working, sql, wait_state):
    member, runs, report, received = tasks
    async with working():
        async with jobs.group(on_done=report.job({"day": "today"})) as group:
            first = await member.enqueue(n=1, group=group)
            await wait_state(first, "gone")
            await member.enqueue_many([{"n": n} for n in (-2, 3, 4)], group=group)
            cancelled = await member.enqueue(n=5, after_s=3600, group=group)
            await jobs.cancel(cancelled)
            assert received == []
        await wait_true(lambda: received)
    counts = {"id": group.id, "done": 3, "failed": 1, "cancelled": 1, "quarantined": 0}
    assert received == [{"day": "today", "group": counts}]
    assert runs[0] == 1
    assert await sql("SELECT id FROM headrace.job_group") == []


async def test_empty_groups_and_blocks_that_raise(jobs, tasks, working, sql):
    member, runs, report, received = tasks
    async with jobs.group(on_done=report.job({})):
        assert await sql("SELECT id FROM headrace.job_ready") == []
    await jobs.enqueue_groups([NewGroup(members=[], on_done=report.job({"item": 1}))])
    assert len(await sql("SELECT id FROM headrace.job_ready")) == 2

    async def fill():
        async with jobs.group(on_done=report.job({"never": True})) as group:
            await member.enqueue(n=1, group=group)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fill()
    assert await sql("SELECT id FROM headrace.job_group") == []
    async with working():
        await wait_true(lambda: runs == [1] and len(received) == 2)
    assert not any("never" in payload for payload in received)


async def test_a_closed_group_refuses_members(jobs, tasks, sql):
    member, _, report, _ = tasks
    async with jobs.group(on_done=report.job({})) as group:
        pass
    with pytest.raises(GroupClosed):
        await member.enqueue(n=1, group=group)
    block = jobs.group(on_done=report.job({}))
    group = await block.__aenter__()
    await sql(f"DELETE FROM headrace.job_group WHERE id = {group.id} RETURNING id")
    with pytest.raises(GroupClosed):
        await member.enqueue(n=1, group=group)
    with pytest.raises(GroupClosed):
        await block.__aexit__(None, None, None)
    with pytest.raises(QueueUnknown):
        async with jobs.group(on_done=NewJob(queue="nobody")):
            pass


async def test_a_job_whose_key_is_taken_is_no_member(jobs, tasks, working, sql, broken_invariants):
    """Neither the job outside nor one that is a member already is counted."""
    member, runs, report, received = tasks
    outside = await member.enqueue(n=1, unique="a", after_s=3600)
    async with jobs.group(on_done=report.job({})) as group:
        assert await member.enqueue(n=2, unique="a", group=group) == outside
        new = [member.job(n=n, unique=key) for n, key in ((3, "b"), (4, "b"), (5, "a"), (6, None))]
        ids = await member.enqueue_many(new, group=group)
        assert (ids[0], ids[2]) == (ids[1], outside)
        assert await member.enqueue(n=7, unique="b", group=group) == ids[0]
        await member.enqueue(n=8, lane="x", unique="c", group=group)
    (row,) = await sql("SELECT pending FROM headrace.job_group")
    assert row["pending"] == 3
    groups = [
        NewGroup(
            members=[member.job(n=n, unique=key) for n, key in members],
            on_done=report.job({"of": of}),
        )
        for of, members in enumerate([[(11, "a"), (12, "y")], [(13, "y")], [(14, None)]])
    ]
    await jobs.enqueue_groups(groups)
    async with working():
        await wait_true(lambda: len(received) == 4)
    assert {p.get("of"): p["group"]["done"] for p in received} == {None: 3, 0: 1, 1: 0, 2: 1}
    assert sorted(runs) == [3, 6, 8, 12, 14]
    assert await broken_invariants() == []


async def test_a_group_inside_a_transaction_is_all_or_nothing(jobs, tasks, postgres, sql):
    member, _, report, _ = tasks

    async def fill(*, is_kept):
        async with postgres.transaction() as tx:
            async with jobs.group(on_done=report.job({}), tx=tx) as group:
                await member.enqueue(n=1, group=group, tx=tx)
                with pytest.raises(GroupClosed):
                    await member.enqueue(n=2, group=group)
            if not is_kept:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fill(is_kept=False)
    assert await sql("SELECT id FROM headrace.job_ready") == []
    await fill(is_kept=True)
    (row,) = await sql(
        "SELECT g.pending FROM headrace.job_ready r JOIN headrace.job_group g ON g.id = r.group_id"
    )
    assert row["pending"] == 1


async def test_many_enqueue_into_one_group_at_once(jobs, tasks, working):
    member, runs, report, received = tasks

    async def fill(group, start):
        for n in range(start, start + 5):
            await member.enqueue(n=n, unique=f"k{n % 7}", group=group)
            await member.enqueue(n=n, group=group)

    async with working():
        async with jobs.group(on_done=report.job({})) as group:
            await asyncio.gather(*(fill(group, start) for start in range(8)))
        await wait_true(lambda: received)
    assert received[0]["group"]["done"] == len(runs)


@pytest.mark.usefixtures("tasks")
async def test_a_callback_is_checked_against_its_task_before_any_member(jobs, registry, sql):
    @registry.task("total")
    async def total(album: int, at_all: int = 0): ...

    @registry.task("publish")
    async def publish(album: int, group: dict[str, int]): ...

    for payload in (3, [1], "text", {"group": 1}):
        with pytest.raises(InvalidJob):
            await jobs.enqueue_groups(
                [NewGroup(members=[], on_done=NewJob(queue="report", payload=payload))]
            )
    for on_done, text in (
        (
            total.job(album=1),
            "/0/payload/group: on_done: queue 'total': the callback gets the field `group`: add",
        ),
        (
            publish.job({"album": "one"}),
            "/0/payload/album: on_done: queue 'publish': expected int, got str 'one'",
        ),
    ):
        with pytest.raises(InvalidJob, match=text):
            async with jobs.group(on_done=on_done):
                pass
        with pytest.raises(InvalidJob, match=text):
            await jobs.enqueue_groups([NewGroup(members=[], on_done=on_done)])
    members = [publish.job({"album": 1, "group": {"done": "all"}})]
    with pytest.raises(InvalidJob, match="/0/payload/group/done: queue 'publish': expected int"):
        await jobs.enqueue_groups([NewGroup(members=members, on_done=publish.job(album=1))])
    assert await sql("SELECT id FROM headrace.job_group") == []
    for call in (publish.enqueue, lambda payload: publish.enqueue_many([payload])):
        with pytest.raises(InvalidTask, match="group"):
            await call({"album": 1})
    with pytest.raises(InvalidTask, match="album"):
        publish.job()


async def test_a_callback_may_take_the_counts_as_a_field(jobs, registry, tasks, working):
    member, *_ = tasks
    received = []

    @registry.task("publish")
    async def publish(album: int, group: dict[str, int]):
        received.append((album, group["done"]))

    async with working():
        async with jobs.group(on_done=publish.job(album=1)) as group:
            await member.enqueue(n=1, group=group)
        await wait_true(lambda: received)
    assert received == [(1, 1)]


async def test_a_group_whose_process_died_in_its_block_is_deleted(jobs, tasks, postgres, sql):
    member, _, report, _ = tasks

    async def groups():
        return [row["id"] for row in await sql("SELECT id FROM headrace.job_group ORDER BY id")]

    dead = jobs.group(on_done=report.job({}))
    group = await dead.__aenter__()
    await member.enqueue(n=1, group=group)
    new = NewGroup(members=[member.job(n=2)], on_done=report.job())
    [sealed] = await jobs.enqueue_groups([new])
    async with jobs.group(on_done=report.job({})) as ended:
        await member.enqueue(n=3, group=ended)
    await jobs.sweep()
    assert await groups() == [group.id, sealed, ended.id]
    await sql("UPDATE headrace.job_group SET opened_at = opened_at - interval '8 d'")
    await Sweeper(postgres, jobs.config, jobs.lanes).run_once()
    assert await groups() == [sealed, ended.id]
    with pytest.raises(GroupClosed):
        await member.enqueue(n=4, group=group)
    with pytest.raises(GroupClosed):
        await dead.__aexit__(None, None, None)
