"""Groups filled while they are open.

The callback comes once, after the block and after the last member.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.waiting import wait_true

from headrace.jobs import NewGroup, NewJob, QueueUnknown
from headrace.jobs.errors import GroupClosed, InvalidJob, InvalidTask
from headrace.jobs.service.fleet import Sweeper


@pytest.fixture
def tasks(registry):
    """A member's task, what ran of it, the callback's task and what it was told."""
    runs, told = [], []

    @registry.task("member", concurrency=5, retries=0)
    async def member(n: int):
        runs.append(n)
        if n < 0:
            raise ValueError

    @registry.task("report")
    async def report(job: dict):
        told.append(job)

    return member, runs, report, told


async def test_the_callback_comes_once_with_the_counts(jobs, tasks, working, sql):
    member, runs, report, told = tasks
    async with working():
        async with jobs.group(on_done=report.job({"day": "today"})) as group:
            first = await member.enqueue(n=1, group=group)
            await wait_true(lambda: runs == [1])
            await wait_true(lambda: _is_gone(jobs, first))
            await member.enqueue_many([{"n": n} for n in (-2, 3, 4)], group=group)
            cancelled = await member.enqueue(n=5, after_s=3600, group=group)
            await jobs.cancel(cancelled)
            assert told == []
        await wait_true(lambda: told)
    (counts,) = told
    assert counts == {
        "day": "today",
        "group": {"id": group.id, "done": 3, "failed": 1, "cancelled": 1, "quarantined": 0},
    }
    assert await sql("SELECT id FROM headrace.job_group") == []


async def test_an_empty_block_calls_back_at_its_end(jobs, tasks, sql):
    *_, report, _ = tasks
    async with jobs.group(on_done=report.job({})):
        assert await sql("SELECT id FROM headrace.job_ready") == []
    assert len(await sql("SELECT id FROM headrace.job_ready")) == 1


async def test_a_block_that_raises_leaves_no_callback(jobs, tasks, working, sql):
    member, runs, report, told = tasks

    async def fill():
        async with jobs.group(on_done=report.job({})) as group:
            await member.enqueue(n=1, group=group)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fill()
    assert await sql("SELECT id FROM headrace.job_group") == []
    async with working():
        await wait_true(lambda: runs == [1])
        await wait_true(lambda: _is_drained(sql))
    assert told == []


async def test_a_closed_group_takes_nobody(jobs, tasks, sql):
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
    with pytest.raises(InvalidJob):
        async with jobs.group(on_done=report.job({"group": 1})):
            pass


async def test_a_taken_key_gives_a_job_that_is_no_member(jobs, tasks, working, sql):
    """Neither the job outside, nor one that is a member already, is counted for it."""
    member, runs, report, told = tasks
    outside = await member.enqueue(n=1, unique="a", after_s=3600)
    async with jobs.group(on_done=report.job({})) as group:
        assert await member.enqueue(n=2, unique="a", group=group) == outside
        new = [member.job(n=n, unique=key) for n, key in ((3, "b"), (4, "b"), (5, "a"), (6, None))]
        ids = await member.enqueue_many(new, group=group)
        assert ids[0] == ids[1]
        assert ids[2] == outside
        assert await member.enqueue(n=7, unique="b", group=group) == ids[0]
    (row,) = await sql("SELECT pending FROM headrace.job_group")
    assert row["pending"] == 2
    async with working():
        await wait_true(lambda: told)
    assert sorted(runs) == [3, 6]
    assert told[0]["group"]["done"] == 2


async def test_lanes_keys_and_groups_meet(jobs, tasks, working, broken_invariants):
    member, _runs, report, told = tasks
    async with working():
        async with jobs.group(on_done=report.job({})) as group:
            for n in range(3):
                await member.enqueue(n=n, lane="a", unique=f"k{n % 2}", group=group)
                await member.enqueue(n=n, lane="b", group=group)
        await wait_true(lambda: told)
    assert told[0]["group"]["done"] in (5, 6)
    assert await broken_invariants() == []


async def test_groups_at_once_may_have_members_with_keys(jobs, tasks, working, sql):
    member, runs, report, told = tasks
    outside = await member.enqueue(n=0, unique="x", after_s=3600)
    groups = [
        NewGroup(
            members=[member.job(n=n, unique=key) for n, key in members],
            on_done=report.job({"of": of}),
        )
        for of, members in enumerate([[(1, "x"), (2, "y")], [(3, "y")], [(4, None), (5, "z")]])
    ]
    await jobs.enqueue_groups(groups)
    async with working():
        await wait_true(lambda: len(told) == 3)
    assert {told["of"]: told["group"]["done"] for told in told} == {0: 1, 1: 0, 2: 2}
    assert sorted(runs) == [2, 4, 5]
    await jobs.cancel(outside)


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
    member, runs, report, told = tasks

    async def fill(group, start):
        for n in range(start, start + 5):
            await member.enqueue(n=n, unique=f"k{n % 7}", group=group)
            await member.enqueue(n=n, group=group)

    async with working():
        async with jobs.group(on_done=report.job({})) as group:
            await asyncio.gather(*(fill(group, start) for start in range(8)))
        await wait_true(lambda: told)
    assert told[0]["group"]["done"] == len(runs)


async def test_a_callback_may_take_the_counts_as_a_field(jobs, registry, tasks, working):
    member, *_ = tasks
    told = []

    @registry.task("publish")
    async def publish(album: int, group: dict[str, int]):
        told.append((album, group["done"]))

    async with working():
        async with jobs.group(on_done=publish.job(album=1)) as group:
            await member.enqueue(n=1, group=group)
        await wait_true(lambda: told)
    assert told == [(1, 1)]
    for faulty in (
        lambda: publish.enqueue({"album": 1}),
        lambda: publish.enqueue_many([{"album": 1}]),
    ):
        with pytest.raises(InvalidTask, match="group"):
            await faulty()
    with pytest.raises(InvalidTask, match="album"):
        publish.job()


async def test_a_callback_that_does_not_fit_is_refused_before_its_members(jobs, registry, sql):
    @registry.task("total")
    async def total(album: int, at_all: int = 0): ...

    @registry.task("publish")
    async def publish(album: int, group: dict[str, int]): ...

    for on_done, told in (
        (total.job(album=1), "on_done: the callback gets the field `group`: add the parameter"),
        (publish.job({"album": "one"}), r"on_done: Expected `int`, got `str` - at `\$.album`"),
    ):
        with pytest.raises(InvalidJob, match=told) as raised:
            async with jobs.group(on_done=on_done):
                pass
        assert raised.value.problems[0].pointer == "/0/payload"
        with pytest.raises(InvalidJob, match=told):
            await jobs.enqueue_groups([NewGroup(members=[], on_done=on_done)])
    members = [publish.job({"album": 1, "group": {"done": "all"}})]
    with pytest.raises(InvalidJob, match="/0/payload: Expected `int`"):
        await jobs.enqueue_groups([NewGroup(members=members, on_done=publish.job(album=1))])
    assert await sql("SELECT id FROM headrace.job_group") == []


async def test_a_group_whose_process_died_in_its_block_is_forgotten(jobs, tasks, postgres, sql):
    member, _, report, _ = tasks
    dead = jobs.group(on_done=report.job({}))
    group = await dead.__aenter__()
    await member.enqueue(n=1, group=group)
    [sealed] = await jobs.enqueue_groups(
        [NewGroup(members=[member.job(n=2)], on_done=report.job())]
    )
    async with jobs.group(on_done=report.job({})) as ended:
        await member.enqueue(n=3, group=ended)
    await jobs.sweep()
    assert await _groups(sql) == [group.id, sealed, ended.id]
    await sql("UPDATE headrace.job_group SET opened_at = opened_at - interval '8 d'")
    await Sweeper(postgres, jobs.config, jobs.lanes).run_once()
    assert await _groups(sql) == [sealed, ended.id]
    with pytest.raises(GroupClosed):
        await member.enqueue(n=4, group=group)
    with pytest.raises(GroupClosed):
        await dead.__aexit__(None, None, None)


async def _groups(sql):
    return [row["id"] for row in await sql("SELECT id FROM headrace.job_group ORDER BY id")]


async def _is_gone(jobs, job_id):
    return (await jobs.job(job_id)).state.value == "gone"


async def _is_drained(sql):
    return await sql("SELECT id FROM headrace.job_lease") == []
