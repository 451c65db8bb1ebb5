"""Fixtures of the jobs room.

A service on a fresh database, and workers that stop with their test.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest
from lane_invariants import broken_books

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
    """Run any statement: `await sql("SELECT ...")` gives its rows."""

    async def run(text):
        return await postgres.all(compile_query("test", f"-- A statement of a test.\n{text}"))

    return run


@pytest.fixture
def working(postgres, jobs, config):
    """`async with working():` a worker runs the tasks; it has stopped when the block ends."""

    @asynccontextmanager
    async def work(config=config):
        stop = asyncio.Event()
        worker = Worker(postgres, jobs, config, host_name="test")
        running = asyncio.create_task(worker.run(stop))
        try:
            yield worker
        finally:
            stop.set()
            await asyncio.wait_for(running, 60)

    return work


@pytest.fixture
def broken_invariants(postgres):
    """What contradicts itself in the lanes' books; empty when all is well."""
    return partial(broken_books, postgres)
