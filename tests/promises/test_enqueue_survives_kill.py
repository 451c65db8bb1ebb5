"""PostgreSQL is killed while many callers enqueue single jobs, which share statements.

No acknowledged job is lost and none is stored twice. A caller whose statement was cut off gets
`PostgresDown`: its job is stored or not.
"""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from tests.kit.own_postgres import OwnPostgres
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, NewJob, Registry

pytestmark = pytest.mark.slow
CALLERS = 32
KILLS = 2
STORED = compile_query(
    "stored",
    "-- Jobs.\nSELECT id, convert_from(payload, 'UTF8')::int AS n FROM headrace.job_ready",
)


async def test_acknowledged_single_jobs_survive_kill_9_of_postgres(servers_folder):
    server = OwnPostgres(servers_folder / "server", "18")
    await server.make()
    await server.start()
    postgres = Postgres(server.url, PostgresConfig())
    await apply_migrations(postgres, PACKAGES)
    jobs = Jobs(postgres, JobsConfig(), Registry())
    await jobs.queues.create("q")
    numbers, acknowledged, unknown = count(), {}, set()
    is_over = asyncio.Event()

    async def enqueue():
        while not is_over.is_set():
            number = next(numbers)
            try:
                acknowledged[number] = await jobs.enqueue(NewJob(queue="q", payload=number))
            except PostgresDown:
                unknown.add(number)
                await asyncio.sleep(0)

    callers = [asyncio.create_task(enqueue()) for _ in range(CALLERS)]
    try:
        for _ in range(KILLS):
            enough = len(acknowledged) + 500
            await wait_true(lambda least=enough: len(acknowledged) > least, what="jobs")
            failed = len(unknown)
            server.kill()
            await wait_true(lambda least=failed: len(unknown) > least, what="errors")
            await server.start()
        last = len(acknowledged)
        await wait_true(lambda: len(acknowledged) > last, what="jobs after the last start")
        is_over.set()
        await asyncio.gather(*callers)
        rows = await postgres.all(STORED)
    finally:
        is_over.set()
        await jobs.close()
        await postgres.close()
        server.end()
    stored = {row["n"]: row["id"] for row in rows}
    assert len(stored) == len(rows), "a job is stored twice"
    assert {number: stored.get(number) for number in acknowledged} == acknowledged
    assert stored.keys() - acknowledged.keys() <= unknown
