"""The fetch room in the simulation: pinned seeds find nothing, and a seed replays."""

from __future__ import annotations

import logging

import pytest
from verification.simulation.fetch import FetchScenario
from verification.simulation.planted import simulate
from verification.simulation.run import run_seed

HOURS = 0.03
PINNED = (2, 18)
"""Seeds with many faults."""
SOAK_SEEDS = 50


@pytest.fixture(autouse=True)
def _silent():
    """The log of a run has thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", PINNED)
def test_a_pinned_seed_finds_nothing(seed):
    outcome = run_seed(FetchScenario, seed, hours=HOURS)
    assert outcome.findings == ()
    assert outcome.faults


def test_a_seed_replays_in_another_interpreter():
    arguments = ("--seed", "7", "--hours", "0.02")
    first, second = (simulate("fetch", *arguments) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    digests = {run.stdout.partition("digest ")[2].split(":")[0] for run in (first, second)}
    assert len(digests) == 1


@pytest.mark.soak
def test_many_seeds_find_nothing():
    for seed in range(1000, 1000 + SOAK_SEEDS):
        outcome = run_seed(FetchScenario, seed, hours=0.1)
        assert not outcome.findings, f"python -m verification.simulation fetch --seed {seed}"
