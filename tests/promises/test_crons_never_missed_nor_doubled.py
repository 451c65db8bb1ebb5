"""Each moment of a cron has exactly one job, whichever scheduler dies at which line.

Missed ones have one together.

Real schedulers, killed at the named points around the transaction and at random; moments come by
setting `next_at` back.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, Registry, store
from headrace.jobs.crons import NewCron

PROGRAM = Path(__file__).with_name("scheduler_process.py")
NAMES = [f"cron-{n}" for n in range(12)]
pytestmark = pytest.mark.slow


@pytest.fixture
async def jobs(postgres):
    """The service, with twelve crons that come by themselves on New Year's Day only."""
    registry = Registry()

    @registry.task("reports")
    async def reports(job: dict | None): ...

    jobs = Jobs(postgres, JobsConfig(), registry)
    for name in NAMES:
        cron = NewCron(name=name, spec="0 0 1 1 *", queue="reports", payload={"cron": name})
        await jobs.crons.add(cron)
    return jobs


@pytest.fixture
def start_scheduler(database_url, tmp_path):
    """Start scheduler processes; the ones left are killed at the end."""
    started = []

    def start(crash_at=""):
        env = {**os.environ, "HEADRACE_CRASH_AT": crash_at}
        with (tmp_path / "err.txt").open("a") as err:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, database_url, f"s{len(started)}", "5"],
                stderr=err,
                stdout=err,
                env=env,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(60)


async def run_sql(postgres, text):
    return await postgres.all(compile_query("test", f"-- A statement of a test.\n{text}"))


async def make_due(postgres, since="1 s"):
    await run_sql(postgres, f"UPDATE headrace.cron SET next_at = now() - interval '{since}'")


async def none_is_due(postgres):
    rows = await run_sql(postgres, "SELECT FROM headrace.cron WHERE next_at <= now()")
    return not rows


async def jobs_by_cron(postgres):
    rows = await run_sql(
        postgres,
        "SELECT convert_from(payload, 'UTF8')::json ->> 'cron' AS cron FROM headrace.job_ready",
    )
    return Counter(row["cron"] for row in rows)


@pytest.mark.parametrize("point", ["jobs.cron_enqueued", "jobs.cron_moved", "jobs.cron_committed"])
async def test_a_scheduler_killed_around_the_transaction(jobs, postgres, start_scheduler, point):
    doomed = start_scheduler(crash_at=f"{point}:3")
    await make_due(postgres)
    await asyncio.to_thread(doomed.wait, 30)
    assert doomed.returncode == -signal.SIGKILL
    before = await jobs_by_cron(postgres)
    assert sum(before.values()) == (3 if point == "jobs.cron_committed" else 2)
    start_scheduler()
    await wait_true(lambda: none_is_due(postgres))
    assert await jobs_by_cron(postgres) == dict.fromkeys(NAMES, 1)


async def test_schedulers_killed_at_random_over_many_moments(jobs, postgres, start_scheduler):
    """Four moments of twelve crons; of two schedulers one is killed in the middle of each."""
    draw = random.Random(7)
    living = [start_scheduler(), start_scheduler()]
    for moment in range(1, 5):
        await make_due(postgres)
        least = (moment - 1) * len(NAMES) + draw.randint(1, 10)

        async def has_begun(least=least):
            return sum((await jobs_by_cron(postgres)).values()) >= least

        await wait_true(has_begun)
        living.pop(draw.randint(0, 1)).kill()
        living.append(start_scheduler())
        await wait_true(lambda: none_is_due(postgres))
        assert await jobs_by_cron(postgres) == dict.fromkeys(NAMES, moment)


async def test_what_was_missed_for_days_comes_once(jobs, postgres, start_scheduler):
    await make_due(postgres, since="9 d")
    start_scheduler()
    await wait_true(lambda: none_is_due(postgres))
    assert await jobs_by_cron(postgres) == dict.fromkeys(NAMES, 1)


async def test_one_that_is_stopped_with_a_cron_in_hand_holds_it_up_for_seconds_only(
    jobs, postgres, start_scheduler
):
    """A transaction that locked a cron and then fell silent, as that of a stopped process does."""
    await make_due(postgres)
    silent = await postgres.connect_unpooled()
    transaction = silent.transaction()
    await transaction.start()
    await silent.execute("SELECT set_config('idle_in_transaction_session_timeout', '1500', true)")
    held = await silent.fetchval(
        "SELECT name FROM headrace.cron ORDER BY next_at LIMIT 1 FOR UPDATE"
    )
    start_scheduler()

    async def others_came():
        return len(await jobs_by_cron(postgres)) >= len(NAMES) - 1

    await wait_true(others_came)
    await wait_true(lambda: none_is_due(postgres))
    assert (await jobs_by_cron(postgres))[held] == 1
    silent.terminate()


async def test_the_server_ends_a_silent_transaction_of_ours(jobs, postgres):
    """The bound that the test above sets by hand is set where a cron is locked."""
    await make_due(postgres)
    async with postgres.transaction() as tx:
        assert await store.queues.lock_due_cron(tx, forgotten_s=60, idle_s_max=5)
        show = compile_query("show", "-- The bound.\nSHOW idle_in_transaction_session_timeout")
        assert await tx.value(show) == "5s"
    assert await postgres.value(show) != "5s", "of this transaction alone"
