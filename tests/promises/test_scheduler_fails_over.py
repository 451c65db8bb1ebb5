"""When the leader is killed or stopped another leads, and plans, within two periods.

Plans never go back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, Registry, store

PROGRAM = Path(__file__).with_name("scheduler_process.py")
PERIOD_S = 1.0
MACHINE_S = 3
"""What a busy machine may add."""
DATABASE_TIME = compile_query(
    "time", "-- The clock.\nSELECT extract(epoch FROM clock_timestamp())::double precision"
)
PLAN = compile_query(
    "plan",
    "-- The plan's head.\nSELECT leader, term, version,"
    " extract(epoch FROM planned_at)::double precision AS planned_s FROM headrace.fleet_plan",
)


@pytest.fixture
async def host_id(postgres):
    """A host with room, whose code knows one queue with a minimum."""
    registry = Registry()

    @registry.task("mail")
    async def mail(job: dict | None): ...

    queues = await Jobs(postgres, JobsConfig(), registry).queues.declare()
    await postgres.run(
        compile_query("least", "-- Needs slots.\nUPDATE headrace.queue SET slots_min = 2")
    )
    host_id = await store.leases.add_host(postgres, "a", [queues["mail"].id], 3600)
    await report(postgres, host_id, capacity=10)
    return host_id


@pytest.fixture
def start_scheduler(database_url, tmp_path):
    """Start scheduler processes by name; the ones left are killed at the end."""
    started = []

    def start(name):
        with (tmp_path / "err.txt").open("a") as err:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, database_url, name, str(PERIOD_S)],
                stderr=err,
                stdout=err,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(60)


async def report(postgres, host_id, *, capacity):
    await store.fleet.report_host(postgres, host_id, capacity=capacity, load_per_core=0.0, slots=[])


def led_by(postgres, name):
    async def ask():
        row = await postgres.one(PLAN)
        return row if (row["leader"] or "").startswith(f"{name}:") else None

    return ask


def planned_by(postgres, name, after_s):
    async def ask():
        row = await led_by(postgres, name)()
        return row if row and row["planned_s"] and row["planned_s"] > after_s else None

    return ask


@pytest.mark.slow
async def test_a_stopped_leader_is_replaced_and_refused_when_it_wakes(
    postgres, host_id, start_scheduler
):
    old = start_scheduler("old")
    first = await wait_true(planned_by(postgres, "old", 0.0))
    assert (first["term"], first["version"]) == (1, 1)
    start_scheduler("heir")
    os.kill(old.pid, signal.SIGSTOP)
    second = await wait_true(led_by(postgres, "heir"))
    assert second["term"] == 2
    os.kill(old.pid, signal.SIGCONT)
    ends_s = await postgres.value(DATABASE_TIME) + 3 * PERIOD_S

    async def has_run_on():
        row = await postgres.one(PLAN)
        assert row["leader"].startswith("heir:"), "two led at once"
        assert (row["term"], row["version"] >= first["version"]) == (2, True)
        return await postgres.value(DATABASE_TIME) > ends_s

    await wait_true(has_run_on)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_another_plans_within_two_periods(postgres, host_id, start_scheduler, number):
    """The heir has stood by for a full window, as it would have in life."""
    old = start_scheduler("old")
    await wait_true(planned_by(postgres, "old", 0.0))
    start_scheduler("heir")
    warm_s = await postgres.value(DATABASE_TIME) + 15

    async def is_warm():
        return await postgres.value(DATABASE_TIME) > warm_s

    await wait_true(is_warm)
    before = await wait_true(planned_by(postgres, "old", warm_s - 2 * PERIOD_S))
    ended_s = await postgres.value(DATABASE_TIME)
    os.kill(old.pid, number)
    await report(postgres, host_id, capacity=1)
    after = await wait_true(planned_by(postgres, "heir", ended_s))
    assert after["planned_s"] - ended_s <= 2 * PERIOD_S + MACHINE_S
    assert after["term"] == before["term"] + 1
    assert after["version"] == before["version"] + 1, "the host shrank: one slot had to go"
    assert await store.fleet.slot_map(postgres) == {"a": {"mail": 1}}
