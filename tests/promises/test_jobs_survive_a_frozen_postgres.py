"""PostgreSQL stands still for longer than a lease: the worker gives its host up and goes on after."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.engines.embedded import EmbeddedEngines
from penstock.engines.migrate import apply_migrations
from penstock.engines.postgres import Postgres, PostgresConfig, PostgresDown
from penstock.engines.sql import compile_query
from penstock.jobs import Jobs, JobsConfig, Registry
from penstock.jobs.worker import Worker
from penstock.testing.waiting import wait_true

pytestmark = pytest.mark.slow
CONFIG = JobsConfig(lease_s=1.5, heartbeat_s=0.3, poll_s=0.05, grace_s=2.0)
TIMEOUT_S = 1.0
FROZEN_S = CONFIG.lease_s + 4 * TIMEOUT_S


@pytest.fixture
async def engines(tmp_path):
    """A PostgreSQL of this test's own, to be frozen."""
    engines = EmbeddedEngines(tmp_path / "data", durable=False)
    await engines.start()
    yield engines
    await engines.stop()


@pytest.fixture
async def own_postgres(engines):
    """A pool with short timeouts on it."""
    config = PostgresConfig(connect_timeout_s=TIMEOUT_S, statement_timeout_s=TIMEOUT_S)
    postgres = Postgres((await engines.start()).postgres_url, config)
    await apply_migrations(postgres, ("penstock.jobs",))
    yield postgres
    await postgres.close()


async def test_the_same_worker_runs_jobs_after_the_thaw(engines, own_postgres):
    registry, runs = Registry(), []
    jobs = Jobs(own_postgres, CONFIG, registry)
    registry.bind(lambda: jobs)

    for queue in ("one", "two", "three"):
        registry.task(queue)(_note_runs(runs, queue))

    stop = asyncio.Event()
    worker = Worker(own_postgres, jobs, CONFIG, host_name="test")
    working = asyncio.create_task(worker.run(stop))
    await registry.get("one").enqueue({})
    await wait_true(lambda: runs == ["one"])
    with _frozen(engines.postgres_pid):
        frozen_s = time.monotonic()
        await wait_true(lambda: time.monotonic() - frozen_s > FROZEN_S)
    for queue in ("one", "two", "three"):
        await registry.get(queue).enqueue({})
    await wait_true(lambda: sorted(runs) == ["one", "one", "three", "two"], deadline_s=15)
    assert worker.statistics()["hosts_lost"] >= 1
    stop.set()
    await asyncio.wait_for(working, 15)


async def test_a_cancelled_statement_on_a_silent_server_ends_as_cancelled(engines, own_postgres):
    asked = compile_query("asked", "-- Any statement.\nSELECT 1")
    assert await own_postgres.value(asked) == 1
    with _frozen(engines.postgres_pid):
        asking = asyncio.create_task(own_postgres.value(asked))
        done, _ = await asyncio.wait([asking], timeout=TIMEOUT_S / 4)
        assert not done
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 10)
        with pytest.raises(PostgresDown):
            async with asyncio.timeout(10):
                await own_postgres.connect_alone()


def _note_runs(runs, queue):
    async def handle(job: dict):
        runs.append(queue)

    return handle


@contextmanager
def _frozen(postmaster):
    """The postmaster and every child of it stand still inside the block."""
    stopped = []
    try:
        # The postmaster first, so that no child is added behind our back.
        for find in (lambda: [postmaster], lambda: _children(postmaster)):
            for pid in find():
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def _children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
