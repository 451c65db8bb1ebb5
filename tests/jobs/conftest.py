"""Fixtures of the jobs room: a service on a fresh database, and workers that stop with their test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.engines.sql import compile_query
from penstock.jobs import Jobs, JobsConfig, Registry
from penstock.jobs.worker import Worker


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
            await asyncio.wait_for(running, 20)

    return work


@pytest.fixture
def broken_invariants(sql):
    """What contradicts itself in the lanes' books; empty when all is well."""

    async def find():
        return await sql("""
            WITH rows AS (SELECT q.limiter, j.lane, j.queue, count(*) AS n FROM penstock.lane_job j
                          JOIN penstock.queue q ON q.id = j.queue GROUP BY 1, 2, 3),
            journal AS (SELECT limiter, lane, queue, sum(k) AS n FROM penstock.lane_event GROUP BY 1, 2, 3),
            leased AS (SELECT l.limiter, u.lane, count(*) AS n FROM penstock.job_lease l,
                       unnest(l.ids, l.lanes) AS u(id, lane)
                       WHERE l.limiter IS NOT NULL AND u.id <> ALL(l.settled) GROUP BY 1, 2)
            SELECT 'waiting' AS what, w.limiter, w.lane, w.waiting::bigint AS n
            FROM penstock.lane_queue w
            LEFT JOIN rows r USING (limiter, lane, queue) LEFT JOIN journal e USING (limiter, lane, queue)
            WHERE w.waiting + coalesce(e.n, 0) <> coalesce(r.n, 0)
            UNION ALL
            SELECT 'in flight', l.limiter, l.name, l.inflight FROM penstock.lane l
            LEFT JOIN leased d ON d.limiter = l.limiter AND d.lane = l.name
            WHERE l.inflight <> coalesce(d.n, 0)
            UNION ALL
            SELECT 'parked with work', w.limiter, w.lane, w.waiting FROM penstock.lane_queue w
            JOIN penstock.lane l ON l.limiter = w.limiter AND l.name = w.lane
            WHERE w.ready_at = 'infinity' AND w.waiting > 0 AND NOT l.paused
              AND coalesce(l.inflight < l.concurrency, true)
            UNION ALL
            SELECT 'armed without work', w.limiter, w.lane, w.waiting FROM penstock.lane_queue w
            WHERE w.ready_at < 'infinity' AND w.waiting <= 0""")

    return find
