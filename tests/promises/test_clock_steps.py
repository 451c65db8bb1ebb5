"""Wall clocks of workers and clients step by hours: no job starts early, lanes keep their rate.

Only the database's clock decides. The wall clock of Python in the child processes is the real one
plus the number in a file, read at each call; monotonic clocks are unchanged, as on a machine whose
time is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from tests.kit.checkers import over_limit
from tests.kit.processes import HeadraceProcess
from tests.kit.stepped_clock import install_stepped_clock
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import JobState, NewJob

pytestmark = pytest.mark.slow
HOUR_S = 3600.0
STARTS_MAX, WINDOW_S = 3, 0.4
DUE_IN = compile_query(
    "due_in",
    "-- Seconds until a job is due.\n"
    "SELECT extract(epoch FROM run_at - now())::float FROM headrace.job_ready WHERE id = :job",
)
MAKE_DUE = compile_query(
    "make_due", "-- It is due now.\nUPDATE headrace.job_ready SET run_at = now() WHERE id = :job"
)


@pytest.fixture
def clock(fleet):
    """`clock.write_text("3600")` steps the wall clock of every child process."""
    return install_stepped_clock(fleet.folder)


@pytest.mark.parametrize("role", ["agent", pytest.param("work", marks=pytest.mark.soak)])
async def test_a_worker_whose_clock_steps_loses_nothing_and_starts_nothing_early(
    fleet, clock, role
):
    await fleet.jobs.lanes.set(
        "laned", "a", starts_max=STARTS_MAX, window_s=WINDOW_S, concurrency=None
    )
    process = fleet.start(role)
    [later] = await fleet.enqueue([NewJob(queue="noted", after_s=HOUR_S, payload={})])
    for offset_s in (0, 2 * HOUR_S, -2 * HOUR_S, 0):
        clock.write_text(str(offset_s))
        ids = await fleet.enqueue(
            [
                NewJob(queue="noted", payload={"offset_s": offset_s}),
                *[NewJob(queue="laned", lane="a", payload={"offset_s": offset_s})] * 5,
            ]
        )
        await wait_true(lambda ids=ids: fleet.ended(ids))
    assert later not in fleet.started()
    assert await fleet.state(later) is JobState.SCHEDULED
    await fleet.postgres.run(MAKE_DUE, job=later)
    await wait_true(lambda: fleet.ended([later]))
    assert set(fleet.started().values()) == {1}
    assert process.events("host_lost") == [], "no lease was lost to a step"
    assert over_limit(fleet.history, starts_max=STARTS_MAX, window_s=WINDOW_S) == []
    assert fleet.findings() == []
    for event in fleet.history.of("start"):
        seen_s = event.facts["wall_s"] - event.facts.get("offset_s", 0) - time.time()
        assert abs(seen_s) < HOUR_S / 2, "the clock was stepped where the handler ran"


@pytest.mark.parametrize("offset_s", [2 * HOUR_S, -2 * HOUR_S])
async def test_a_client_whose_clock_is_wrong_delays_by_the_databases_clock(fleet, clock, offset_s):
    clock.write_text(str(offset_s))
    await fleet.jobs.queues.declare()
    command = HeadraceProcess(
        ["jobs", "add", "noted", "{}", "--after", "1h", "--json"],
        folder=fleet.folder,
        env=fleet.environment(),
    )
    assert command.wait_exit() == 0, command.err
    job = json.loads(command.out)["id"]
    assert abs(await fleet.postgres.value(DUE_IN, job=job) - HOUR_S) < 60


def test_both_of_pythons_wall_clocks_are_stepped_in_a_child(fleet, clock):
    clock.write_text(str(HOUR_S))
    reported = subprocess.run(
        [
            sys.executable,
            "-c",
            "import datetime as d, time; print(time.time(), d.datetime.now(d.UTC).timestamp())",
        ],
        env={**os.environ, **fleet.environment()},
        capture_output=True,
        check=True,
    )
    for seen_s in reported.stdout.split():
        assert float(seen_s) == pytest.approx(time.time() + HOUR_S, abs=30)
