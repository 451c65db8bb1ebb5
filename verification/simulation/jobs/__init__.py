"""The room `jobs` in the simulation: models of its statements, and its processes."""

from verification.simulation.jobs.scenario import (
    BusyJobsScenario,
    JobsScenario,
    LateStandbyScenario,
    StallingJobsScenario,
)

__all__ = ["BusyJobsScenario", "JobsScenario", "LateStandbyScenario", "StallingJobsScenario"]
