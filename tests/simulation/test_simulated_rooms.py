"""Jobs and fetch in the simulation: pinned seeds find nothing, and a seed replays."""

from __future__ import annotations

import logging

import pytest
from verification.simulation.fetch import FetchScenario
from verification.simulation.jobs import JobsScenario
from verification.simulation.planted import simulate
from verification.simulation.run import run_seed

HOURS = 0.03
SCENARIOS = {"jobs": JobsScenario, "fetch": FetchScenario}
PINNED = [("jobs", 2), ("jobs", 7), ("jobs", 12), ("fetch", 2), ("fetch", 18), ("fetch", 1028)]
"""Seeds with many faults."""
SOAK_SEEDS = 50


@pytest.fixture(autouse=True)
def _silent():
    """The log of a run has thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("room", "seed"), PINNED)
def test_a_pinned_seed_finds_nothing(room, seed):
    outcome = run_seed(SCENARIOS[room], seed, hours=HOURS)
    assert outcome.findings == ()
    assert outcome.faults


@pytest.mark.parametrize("room", SCENARIOS)
def test_a_seed_replays_in_another_interpreter(room):
    arguments = ("--seed", "7", "--hours", "0.02")
    first, second = (simulate(room, *arguments) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    digests = {run.stdout.partition("digest ")[2].split(":")[0] for run in (first, second)}
    assert len(digests) == 1


@pytest.mark.soak
def test_many_seeds_of_fetch_find_nothing():
    for seed in range(1000, 1000 + SOAK_SEEDS):
        outcome = run_seed(FetchScenario, seed, hours=0.1)
        assert not outcome.findings, f"python -m verification.simulation fetch --seed {seed}"
