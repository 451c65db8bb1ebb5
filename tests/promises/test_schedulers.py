"""Schedulers that die or stop: crons run once, another leads and plans, dead hosts are swept.

Real schedulers in forked processes, killed at named points around the transaction and at random;
cron times are moved in SQL.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import pytest
from children import schedule
from tests.kit.forked import ended, start_forked
from tests.kit.storm.fleet import LEASE_S
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, Registry, store
from headrace.jobs.crons import NewCron

NAMES = [f"cron-{n}" for n in range(12)]
SWEEP_S, MACHINE_S = 3.0, 10
"""The contract's period, and what a busy machine may add."""
PERIOD_S = 1.0
pytestmark = pytest.mark.slow


def sql(text):
    return compile_query("test", f"-- A statement of a test.\n{text}")


NOW = sql("SELECT extract(epoch FROM clock_timestamp())::double precision")
PLAN = sql(
    "SELECT leader, term, version,"
    " extract(epoch FROM planned_at)::double precision AS planned_s FROM headrace.fleet_plan"
)
BY_CRON = sql(
    "SELECT convert_from(payload, 'UTF8')::json ->> 'cron' AS cron FROM headrace.job_ready"
)
DUE = sql("SELECT count(*) FROM headrace.cron WHERE next_at <= now()")
MAKE_DUE = sql("UPDATE headrace.cron SET next_at = now() - interval '2 d'")
SHOW = sql("SHOW idle_in_transaction_session_timeout")


@pytest.fixture
def start(database_url):
    """Start schedulers; those that are left are killed at the end."""
    started = []

    def run(name, *, crash_at="", period_s=5.0):
        started.append(start_forked(schedule, database_url, name, period_s, crash_at=crash_at))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join(60)


@pytest.fixture
async def crons(postgres):
    """Twelve crons that are due on New Year's Day only."""
    registry = Registry()

    @registry.task("reports")
    async def reports(job: dict | None): ...

    jobs = Jobs(postgres, JobsConfig(), registry)
    for name in NAMES:
        cron = NewCron(name=name, spec="0 0 1 1 *", queue="reports", payload={"cron": name})
        await jobs.crons.add(cron)


async def jobs_by_cron(postgres):
    return Counter(row["cron"] for row in await postgres.all(BY_CRON))


async def none_is_due(postgres):
    return not await postgres.value(DUE)


async def test_each_cron_time_has_one_job_whichever_scheduler_dies(crons, postgres, start):
    """Missed times of two days run once, together."""
    expected = 0
    for point in ("jobs.cron_enqueued", "jobs.cron_moved", "jobs.cron_committed"):
        await postgres.run(MAKE_DUE)
        before = (await jobs_by_cron(postgres)).total()
        assert await ended(start("doomed", crash_at=f"{point}:3")) == -signal.SIGKILL
        done = (await jobs_by_cron(postgres)).total() - before
        assert done == (3 if point == "jobs.cron_committed" else 2)
        heir = start("heir")
        await wait_true(lambda: none_is_due(postgres))
        expected += 1
        assert await jobs_by_cron(postgres) == dict.fromkeys(NAMES, expected)
        heir.kill()

    draw = random.Random(7)
    living = [start("a"), start("b")]
    for _ in range(4):
        await postgres.run(MAKE_DUE)
        least = expected * len(NAMES) + draw.randint(1, 10)

        async def has_begun(least=least):
            return (await jobs_by_cron(postgres)).total() >= least

        await wait_true(has_begun)
        living.pop(draw.randint(0, 1)).kill()
        living.append(start("next"))
        await wait_true(lambda: none_is_due(postgres))
        expected += 1
        assert await jobs_by_cron(postgres) == dict.fromkeys(NAMES, expected)


async def test_a_stopped_process_delays_the_cron_that_it_locked_by_seconds(crons, postgres, start):
    """Its transaction is ended by the server, with a bound that is set where a cron is locked."""
    await postgres.run(MAKE_DUE)
    async with postgres.transaction() as tx:
        assert await store.queues.lock_due_cron(tx, forgotten_s=60, idle_s_max=5)
        assert await tx.value(SHOW) == "5s"
    assert await postgres.value(SHOW) != "5s", "of this transaction alone"

    silent = await postgres.connect_unpooled()
    await silent.transaction().start()
    await silent.execute("SELECT set_config('idle_in_transaction_session_timeout', '1500', true)")
    held = await silent.fetchval(
        "SELECT name FROM headrace.cron ORDER BY next_at LIMIT 1 FOR UPDATE"
    )
    start("other")

    async def others_have_run():
        return len(await jobs_by_cron(postgres)) >= len(NAMES) - 1

    await wait_true(others_have_run)
    await wait_true(lambda: none_is_due(postgres))
    assert (await jobs_by_cron(postgres))[held] == 1
    silent.terminate()


@pytest.fixture
async def host_id(postgres):
    """A host with room, whose code has one queue with a minimum."""
    registry = Registry()

    @registry.task("mail")
    async def mail(job: dict | None): ...

    queues = await Jobs(postgres, JobsConfig(), registry).queues.declare()
    await postgres.run(sql("UPDATE headrace.queue SET slots_min = 2"))
    host_id = await store.leases.add_host(postgres, "a", [queues["mail"].id], 3600)
    await report(postgres, host_id, capacity=10)
    return host_id


async def report(postgres, host_id, *, capacity):
    await store.fleet.report_host(postgres, host_id, capacity=capacity, load_per_core=0.0, slots=[])


def led_by(postgres, name, *, planned_after_s=None):
    """For `wait_true`: the plan, once it is this leader's, and newer than the moment."""

    async def ask():
        row = await postgres.one(PLAN)
        is_new = planned_after_s is None or (row["planned_s"] or 0) > planned_after_s
        return row if (row["leader"] or "").startswith(f"{name}:") and is_new else None

    return ask


async def test_a_stopped_leader_is_replaced_and_refused_when_it_wakes(postgres, host_id, start):
    old = start("old", period_s=PERIOD_S)
    first = await wait_true(led_by(postgres, "old", planned_after_s=0.0))
    assert (first["term"], first["version"]) == (1, 1)
    start("heir", period_s=PERIOD_S)
    os.kill(old.pid, signal.SIGSTOP)
    second = await wait_true(led_by(postgres, "heir"))
    assert second["term"] == 2
    os.kill(old.pid, signal.SIGCONT)
    ends_s = await postgres.value(NOW) + 3 * PERIOD_S

    async def has_continued():
        row = await postgres.one(PLAN)
        assert row["leader"].startswith("heir:"), "two led at once"
        assert (row["term"], row["version"] >= first["version"]) == (2, True)
        return await postgres.value(NOW) > ends_s

    await wait_true(has_continued)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_another_plans_within_two_periods(postgres, host_id, start, number):
    """The standby has waited for a full window, as in production."""
    old = start("old", period_s=PERIOD_S)
    await wait_true(led_by(postgres, "old", planned_after_s=0.0))
    start("heir", period_s=PERIOD_S)
    warm_s = await postgres.value(NOW) + 15

    async def is_warm():
        return await postgres.value(NOW) > warm_s

    await wait_true(is_warm)
    before = await wait_true(led_by(postgres, "old", planned_after_s=warm_s - 2 * PERIOD_S))
    ended_s = await postgres.value(NOW)
    os.kill(old.pid, number)
    await report(postgres, host_id, capacity=1)
    after = await wait_true(led_by(postgres, "heir", planned_after_s=ended_s))
    assert after["planned_s"] - ended_s <= 2 * PERIOD_S + 3
    assert (after["term"], after["version"]) == (before["term"] + 1, before["version"] + 1)
    assert await store.fleet.slot_map(postgres) == {"a": {"mail": 1}}


async def hold(fleet, role, host, **settings):
    """A process of that role that has begun five jobs."""
    await fleet.add("gated", 5 - (await fleet.counts("gated"))[0])
    seen = sum(fleet.started().values())
    process = fleet.start(role, host=host, JOBS_FLOATS="1", **settings)
    await wait_true(lambda: sum(fleet.started().values()) > seen)
    return process


async def seconds_until_ready(fleet, doomed):
    """Kill a process; seconds until all its jobs are ready again."""
    fleet.kill(doomed)
    killed_s = time.monotonic()

    async def are_ready():
        return await fleet.counts("gated") == (5, 0, 0)

    await wait_true(are_ready)
    return time.monotonic() - killed_s


async def test_a_dead_hosts_jobs_are_ready_after_its_lease_and_a_sweep_whoever_leads(fleet):
    """Only schedulers sweep here, and one of them dies, too."""
    leader = fleet.start("scheduler", JOBS_PLAN_EVERY="1s")
    await wait_true(lambda: leader.events("lead_taken"))
    for role in ("agent", "work"):
        doomed = await hold(fleet, role, role)
        if role == "work":
            fleet.start("scheduler", JOBS_PLAN_EVERY="1s")
            fleet.kill(leader)
        assert await seconds_until_ready(fleet, doomed) <= LEASE_S + SWEEP_S + MACHINE_S


@pytest.mark.soak
async def test_a_dead_hosts_jobs_are_ready_within_35_s(fleet):
    """With the default settings. A host that has just renewed is the worst case."""
    leader = fleet.start("scheduler", JOBS_PLAN_EVERY="1s")
    await wait_true(lambda: leader.events("lead_taken"))
    doomed = await hold(fleet, "agent", "a", JOBS_LEASE="30s", JOBS_HEARTBEAT="10s")
    assert 15 < await seconds_until_ready(fleet, doomed) <= 35
