"""PostgreSQL is killed under running workers: what was acknowledged is done, and no worker ends."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from penstock.engines.embedded import EmbeddedEngines
from penstock.engines.migrate import apply_migrations
from penstock.engines.postgres import Postgres, PostgresConfig
from penstock.jobs import Jobs, JobsConfig, JobState, NewJob, Registry
from penstock.jobs.worker import Worker
from penstock.kernel.errors import Unavailable
from penstock.testing.waiting import wait_true

pytestmark = pytest.mark.slow
CONFIG = JobsConfig(poll_s=0.1, heartbeat_s=0.5, retry_first_s=0.01, retry_max_s=0.02)


async def test_an_acknowledged_enqueue_survives_and_the_worker_goes_on(tmp_path):
    engines = EmbeddedEngines(tmp_path / "data")
    endpoints = await engines.start()
    postgres = Postgres(endpoints.postgres_url, PostgresConfig())
    try:
        await apply_migrations(postgres, ("penstock.jobs",))
        await _kill_twice(engines, postgres)
    finally:
        await postgres.close()
        await engines.stop()


async def _kill_twice(engines, postgres):
    registry, runs = Registry(), []
    jobs = Jobs(postgres, CONFIG, registry)
    registry.bind(lambda: jobs)

    @registry.task("counted", concurrency=5)
    async def counted(number: int):
        runs.append(number)

    stop, acknowledged = asyncio.Event(), {}
    worker = Worker(postgres, jobs, CONFIG, host_name="test")
    working = asyncio.create_task(worker.run(stop))
    producing = asyncio.create_task(_produce(jobs, acknowledged, stop))
    for _ in range(2):
        enough = len(acknowledged) + 50
        await wait_true(lambda enough=enough: len(acknowledged) > enough, deadline_s=30)
        os.kill(engines.postgres_pid, signal.SIGKILL)
        await engines.restart("postgres")
    enough = len(acknowledged) + 50
    await wait_true(lambda: len(acknowledged) > enough, deadline_s=30)
    stop.set()
    await asyncio.wait_for(asyncio.gather(producing, working), 30)

    stop.clear()
    working = asyncio.create_task(worker.run(stop))
    # A claim whose answer was lost with the server is found at the second heartbeat.
    await wait_true(lambda: _is_empty(jobs), deadline_s=30)
    stop.set()
    await asyncio.wait_for(working, 30)
    assert set(acknowledged.values()) <= set(runs)
    states = {(await jobs.job(job_id)).state for job_id in acknowledged}
    assert states == {JobState.GONE}


async def _produce(jobs, acknowledged, stop):
    """Enqueue until `stop`; note what was acknowledged."""
    number = 0
    while not stop.is_set():
        number += 1
        try:
            job_id = await jobs.enqueue(NewJob(queue="counted", payload={"number": number}))
            acknowledged[job_id] = number
        except Unavailable:
            await asyncio.sleep(0)


async def _is_empty(jobs):
    await jobs.sweep()
    status = await jobs.queue("counted")
    return (status.ready, status.scheduled, status.leased, status.failed) == (0, 0, 0, 0)
