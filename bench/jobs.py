"""The room's figures: which module makes which, in which order."""

from __future__ import annotations

from typing import Final

from bench import (
    jobs_churn,
    jobs_drain,
    jobs_enqueue,
    jobs_lanes,
    jobs_many_lanes,
    jobs_plan,
    jobs_simulated_day,
    jobs_slots,
    jobs_wake,
    jobs_workflows,
    limits,
)
from bench.harness import Measure

QUESTIONS: Final[dict[str, Measure]] = {
    "limits": limits.measure,
    "drain": jobs_drain.measure,
    "enqueue": jobs_enqueue.measure,
    "wake": jobs_wake.measure,
    "workflows": jobs_workflows.measure,
    "lanes": jobs_lanes.measure,
    "many_lanes": jobs_many_lanes.measure,
    "churn": jobs_churn.measure,
    "slots": jobs_slots.measure,
    "plan": jobs_plan.measure,
    "day": jobs_simulated_day.measure,
}
