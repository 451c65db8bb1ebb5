"""Waiting for a job's result: given once it is there, and a typed error where it never will be."""

from __future__ import annotations

import asyncio

import pytest

from headrace.jobs import Batch, JobUnknown
from headrace.jobs.errors import JobFailed, NoResultKept, ResultGone, ResultLate


@pytest.fixture
def task(jobs, registry):
    @registry.task("q", keep_result=True)
    async def handle(n: int): ...

    return handle


@pytest.fixture
def end(sql):
    """End a waiting job as its worker would."""

    async def move(job_id, result=None):
        kept = "NULL" if result is None else f"convert_to('{result}', 'UTF8')"
        await sql(f"""
            WITH ended AS (DELETE FROM headrace.job_ready WHERE id = {job_id} RETURNING *)
            INSERT INTO headrace.job_done
                (id, queue, run_at, ended_at, drop_at, priority, attempt, losses, version,
                 payload, result)
            SELECT id, queue, run_at, now(), now() + interval '1 h', priority, attempt, losses,
                   version, payload, {kept} FROM ended RETURNING id""")

    return move


async def test_what_handlers_return_is_waited_for_and_given(registry, jobs, working):
    @registry.task("single", keep_result="2h", concurrency=10, retries=0)
    async def single(n: int):
        if n == 3:
            raise ValueError("no")
        return {"half": n / 2}

    @registry.task("sync", keep_result=True)
    def sync(n: int):
        return None if n == 0 else [n]

    @registry.task("batch", keep_result=True, batch=10)
    async def batch(given: Batch[int]):
        for job in given:
            job.done(job.payload * 2)

    async with working():
        refs = await single.enqueue_many([{"n": n} for n in range(3)])
        assert [await ref.result(timeout_s=20) for ref in refs] == [
            {"half": n / 2} for n in range(3)
        ]
        assert await (await sync.enqueue(n=0)).result(timeout_s=20) is None
        assert await (await sync.enqueue(n=5)).result(timeout_s=20) == [5]
        assert await (await batch.enqueue(21)).result(timeout_s=20) == 42
        failed = await single.enqueue(n=3)
        with pytest.raises(JobFailed, match="ended failed: ValueError: no"):
            await failed.result(timeout_s=20)


async def test_a_handler_may_enqueue_and_wait_for_another_job(registry, working):
    @registry.task("child", keep_result=True)
    async def child(n: int):
        return n + 1

    @registry.task("parent", keep_result=True)
    async def parent(n: int):
        return await (await child.enqueue(n=n)).result(timeout_s=20)

    job = await parent.enqueue(n=1)
    async with working():
        assert await job.result(timeout_s=20) == 2


async def test_a_result_that_is_there_is_given_at_once(task, end):
    job = await task.enqueue(n=1)
    await end(job, '{"n":1}')
    assert await job.result(timeout_s=0) == {"n": 1}
    nothing = await task.enqueue(n=2)
    await end(nothing)
    assert await nothing.result() is None


async def test_a_result_is_waited_for(task, end):
    job = await task.enqueue(n=1)
    waiting = asyncio.create_task(job.result(timeout_s=20))
    with pytest.raises(ResultLate, match="did not end within"):
        await job.result(timeout_s=0.05)
    await end(job, "[1]")
    assert await waiting == [1]


async def test_a_late_result_is_a_timeout(task):
    job = await task.enqueue(n=1)
    with pytest.raises(TimeoutError):
        await job.result(timeout_s=0)


async def test_a_job_that_ended_otherwise_is_told(task, jobs):
    job = await task.enqueue(n=1)
    await job.cancel()
    with pytest.raises(JobFailed, match=f"job {job.id} ended cancelled"):
        await job.result(timeout_s=5)


async def test_a_result_that_never_comes_is_told(task, jobs, registry, sql):
    gone = await task.enqueue(n=1)
    await sql(f"DELETE FROM headrace.job_ready WHERE id = {gone} RETURNING id")
    with pytest.raises(ResultGone):
        await gone.result(timeout_s=5)
    with pytest.raises(JobUnknown):
        await jobs.result(10**12, timeout_s=5)

    @registry.task("plain")
    async def plain(): ...

    with pytest.raises(NoResultKept):
        await (await plain.enqueue()).result()
