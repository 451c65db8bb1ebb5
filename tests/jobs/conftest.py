"""Fixtures of the jobs room: a service on a fresh database, queues, hosts and workers."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from functools import partial

import pytest
from lease_steps import broken_books, live_manager
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.jobs.worker import Worker


@pytest.fixture
def config():
    """Short waits, since tests wait for them."""
    return JobsConfig(poll_s=0.2, grace_s=2.0, retry_first_s=0.01, retry_max_s=0.02)


@pytest.fixture
def registry():
    """Tasks of this test."""
    return Registry()


@pytest.fixture
def jobs(postgres, registry, config):
    """The service."""
    jobs = Jobs(postgres, config, registry)
    registry.bind(lambda: jobs)
    return jobs


@pytest.fixture
def sql(postgres):
    """Run any statement: `await sql("SELECT ...")` returns its rows."""

    async def run(text):
        return await postgres.all(compile_query("test", f"-- A statement of a test.\n{text}"))

    return run


@pytest.fixture
def declare(jobs, registry):
    """`await declare(q={"batch": 5})`: declare queues with handlers never called; ids by name."""

    async def declared(**queues):
        for name, options in queues.items():

            @registry.task(name, **options)
            async def never_called(job: dict | None): ...

        return {name: row.id for name, row in (await jobs.queues.declare()).items()}

    return declared


@pytest.fixture
async def queue_ids(declare):
    """Ids by name: `q` and `next` share the limiter `l`, `far` has another."""
    options = {"limiter": "l", "lane": "optional"}
    return await declare(q=options, next=options, far={**options, "limiter": "other"})


@pytest.fixture
def queue_id(queue_ids):
    """The id of queue `q`."""
    return queue_ids["q"]


@pytest.fixture
async def manager(postgres, config, queue_ids):
    """The lease manager of a live host of all queues."""
    return await live_manager(postgres, config, queue_ids.values())


@pytest.fixture
def working(postgres, jobs, config):
    """`async with working():` a worker runs the tasks; it has stopped when the block ends."""

    @asynccontextmanager
    async def work(**changes):
        stop = asyncio.Event()
        changed = dataclasses.replace(config, **changes)
        worker = Worker(postgres, jobs, changed, host_name="test")
        running = asyncio.create_task(worker.run(stop))
        try:
            yield worker
        finally:
            stop.set()
            await asyncio.wait_for(running, 60)

    return work


@pytest.fixture
def wait_state(jobs):
    """`await wait_state(job_id, "gone")`: wait until a job is in that state."""

    async def wait(job_id, state):
        async def is_reached():
            return (await jobs.job(job_id)).state.value == state

        await wait_true(is_reached, what=f"job {job_id} is {state}")
        return await jobs.job(job_id)

    return wait


@pytest.fixture
def broken_invariants(postgres):
    """Contradictions between the counts of lanes; none is expected."""
    return partial(broken_books, postgres)
