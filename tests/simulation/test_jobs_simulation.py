"""The jobs room in the simulation: pinned seeds find nothing, and a seed replays."""

from __future__ import annotations

import logging

import pytest
from verification.simulation.jobs import JobsScenario
from verification.simulation.planted import simulate
from verification.simulation.run import run_seed

HOURS = 0.03
PINNED = (2, 7, 12)
"""Seeds with many faults."""


@pytest.fixture(autouse=True)
def _silent():
    """The log of a run has thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", PINNED)
def test_a_pinned_seed_finds_nothing(seed):
    outcome = run_seed(JobsScenario, seed, hours=HOURS)
    assert outcome.findings == ()
    assert outcome.faults


def test_a_seed_replays_in_another_interpreter():
    arguments = ("--seed", "7", "--hours", "0.02")
    first, second = (simulate("jobs", *arguments) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    digests = {run.stdout.partition("digest ")[2].split(":")[0] for run in (first, second)}
    assert len(digests) == 1
