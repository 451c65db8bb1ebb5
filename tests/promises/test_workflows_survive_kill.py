"""A workflow whose process is killed at every boundary of its steps continues where it was."""

from __future__ import annotations

import pytest
from tests.kit.processes import is_alive
from tests.kit.storm.fleet import LEASED
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, NewJob, Registry

pytestmark = pytest.mark.slow
RESULTS = compile_query("n", "-- Results.\nSELECT count(*) FROM headrace.group_result")
CRASHES = (
    "workflows.step_ran",  # reserve ran, not recorded
    "workflows.step_recorded",  # reserve is recorded
    "workflows.step_ran",  # charge ran in its transaction
    "workflows.step_recorded",  # charge is recorded, the transaction is open
    "workflows.jobs_started",
    "jobs.before_settle",  # of the wait or of a parcel
    "jobs.after_settle",
    "workflows.event_waited",
    "workflows.step_ran",  # thank ran, not recorded
    "workflows.step_recorded",
)


async def has_crashed(process, point):
    try:
        await wait_true(lambda: not is_alive(process.pid))
    except AssertionError as error:
        raise AssertionError(f"no crash at {point}: {process.err}") from error


async def test_a_workflow_survives_kill_9_at_every_step_boundary(fleet):
    await fleet.begin_effects()
    jobs = Jobs(fleet.postgres, JobsConfig(losses_max=50), Registry())
    jobs.registry.queue("workflow.order", keep_result="7d", retries=50)
    order_id = await jobs.enqueue(NewJob(queue="workflow.order", payload={"order_id": 7}))
    for index, crash in enumerate(CRASHES):
        if crash == "workflows.step_ran" and index == len(CRASHES) - 2:
            assert await jobs.workflows.send_event("delivered", 7, "at noon")
        await has_crashed(fleet.start("work", app="workflow_app:app", CRASH_AT=crash), crash)
        await fleet.expire_hosts()

        async def is_returned():
            # The server may still have the transaction of the dead process open.
            await jobs.sweep()
            return await fleet.postgres.value(LEASED) == 0

        await wait_true(is_returned)
    fleet.start("work", app="workflow_app:app")

    async def is_done():
        return (await jobs.job(order_id)).state.value == "done"

    await wait_true(is_done)
    shown = await jobs.workflows.get(order_id)
    assert shown.result == ["reserve", "charge", [1, 2], "at noon", "thank"]
    assert [(step.name, step.state) for step in shown.steps] == [
        ("reserve", "done"), ("charge", "done"), ("parcels", "done"), ("pause", "done"),
        ("delivered 7", "done"), ("thank", "done"),
    ]  # fmt: skip
    assert await fleet.effect_rows() == [order_id], "the effect committed once, with its record"
    notes = (fleet.folder / "notes.txt").read_text().split("\n")
    assert notes.count("reserve") == 2, "its first run was not recorded, the second was"
    assert notes.count("charge") == 3, "two runs were rolled back"
    assert notes.count("thank") == 2
    assert len(shown.steps[2].jobs) == await fleet.postgres.value(RESULTS) == 2, "started once"
