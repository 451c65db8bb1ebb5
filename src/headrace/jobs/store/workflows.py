"""Workflows in PostgreSQL: their steps, events, groups of jobs and cancellation.

Functions with a `lease_id` change something only while the caller holds the lease: they return its
state, `held`, `lost` or `cancelled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.engines.postgres import Row, Runner, from_row
from headrace.jobs.sql import SQL
from headrace.jobs.steps import JobResult, RecordedStep, Step


async def begin(
    runner: Runner, lease_id: int, job_id: int, version: int
) -> tuple[str, dict[int, RecordedStep]]:
    """Begin a run. Return the state of the lease, and the recorded steps by number."""
    rows = await runner.all(SQL.begin_workflow, lease=lease_id, job=job_id, version=version)
    steps = (from_row(RecordedStep, row, number=row["ord"]) for row in rows[1:])
    return rows[0]["state"], {step.number: step for step in steps}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step to record for a running job."""

    lease_id: int
    job_id: int
    step: RecordedStep


async def record(runner: Runner, records: Sequence[StepRecord]) -> list[str]:
    """Record the ends of steps, or failed attempts. Return the states of the leases, in order."""
    steps = [one.step for one in records]
    return list(
        await runner.value(
            SQL.record_steps,
            leases=[one.lease_id for one in records],
            jobs=[one.job_id for one in records],
            numbers=[step.number for step in steps],
            names=[step.name for step in steps],
            states=[step.state for step in steps],
            failures=[step.failures for step in steps],
            waits_s=[step.wait_s for step in steps],
            errors=[step.error for step in steps],
            results=[step.result for step in steps],
        )
    )


async def wait(
    runner: Runner,
    lease_id: int,
    job_id: int,
    step: RecordedStep,
    *,
    event: tuple[str, str] | None = None,
) -> tuple[str, RecordedStep]:
    """Record a wait, unless it is. Return the state of the lease, and the step as it is now."""
    name, key = event or (None, None)
    row: Any = await runner.one(
        SQL.wait_step,
        lease=lease_id,
        job=job_id,
        number=step.number,
        name=step.name,
        kind=step.kind,
        wait_s=step.wait_s,
        event_name=name,
        event_key=key,
    )
    if row["held"] != "held":
        return row["held"], step
    found = {name: row[name] for name in ("state", "wait_s", "error", "result")}
    return "held", msgspec.structs.replace(step, **found)


async def step_jobs(runner: Runner, job_id: int, number: int) -> list[JobResult] | None:
    """Results of the jobs of a step, in order; None while one of them has not ended."""
    rows = await runner.all(SQL.step_jobs, job=job_id, number=number)
    if not rows or not rows[0]["has_ended"]:
        return None
    return [_result(row, row["id"]) for row in rows]


async def end_jobs_step(
    runner: Runner, lease_id: int, job_id: int, number: int, *, error: str | None
) -> str:
    """Record the end of a step's jobs. Return the state of the lease."""
    state = "done" if error is None else "failed"
    return str(
        await runner.value(
            SQL.end_jobs_step, lease=lease_id, job=job_id, number=number, state=state, error=error
        )
    )


async def group_results(
    runner: Runner, group_id: int, *, after: int, jobs_max: int
) -> list[JobResult]:
    """Results of members of a group with ids over `after`."""
    rows = await runner.all(SQL.group_results, group=group_id, after=after, jobs_max=jobs_max)
    return [_result(row, row["job_id"]) for row in rows]


async def cancel_tree(runner: Runner, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Cancel jobs and what they started. Return those that ended, and those that still run."""
    row: Any = await runner.one(SQL.cancel_tree, ids=list(ids))
    return list(row["ended"] or ()), list(row["marked"] or ())


async def marked_jobs(runner: Runner, host_id: int) -> dict[int, int]:
    """Running jobs of a host that were cancelled, and the lease of each."""
    rows = await runner.all(SQL.marked_jobs, host=host_id)
    return {row["job_id"]: row["lease_id"] for row in rows}


async def steps(runner: Runner, job_id: int) -> list[Step]:
    """The steps of a workflow in order."""
    return [
        from_row(
            Step,
            row,
            waits_for=waits_for(row) if row["state"] == "waiting" else None,
            jobs=list(row["job_ids"] or ()),
            result=None if row["result"] is None else msgspec.json.decode(row["result"]),
        )
        for row in await runner.all(SQL.workflow_steps, job=job_id)
    ]


async def waiting_steps(runner: Runner, job_id: int) -> list[str]:
    """What a workflow waits for, at most three."""
    rows = await runner.all(SQL.waiting_steps, job=job_id)
    return [f"step {row['number']} {row['name']!r} waits {waits_for(row)}" for row in rows]


def waits_for(row: Row) -> str:
    """What a waiting step waits for."""
    until = "" if row["wake_at"] is None else f"{row['wake_at']:%Y-%m-%d %H:%M:%S} UTC"
    match row["kind"]:
        case "event":
            event = f"for event {row['event_name']} with key {row['event_key']}"
            return f"{event}, until {until}" if until else event
        case "jobs":
            return "for its jobs"
        case "sleep":
            return f"until {until}"
        case _:
            return f"for its next attempt at {until}, after failure {row['failures']}"


def _result(row: Row, job_id: int) -> JobResult:
    result = None if row["result"] is None else msgspec.json.decode(row["result"])
    return JobResult(
        job_id=job_id, state=row["state"] or "cancelled", error=row["error"], result=result
    )
