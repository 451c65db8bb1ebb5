"""The jobs room in the simulation: pinned seeds find nothing, and planted bugs are found."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from verification.simulation.jobs import JobsScenario
from verification.simulation.planted import ROOT, bugs
from verification.simulation.run import run_seed

HOURS = 0.03
PINNED = (2, 7, 12)
"""Seeds with many faults."""
BUGS = [bug for bug in bugs() if bug.room == "jobs"]


@pytest.fixture(autouse=True)
def _silent():
    """The log of a run has thousands of lines."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def simulated(*arguments):
    """Run the command in an interpreter of its own; its output."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "verification.simulation", "jobs", "--no-shrink", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )


@pytest.mark.parametrize("seed", PINNED)
def test_a_pinned_seed_finds_nothing(seed):
    outcome = run_seed(JobsScenario, seed, hours=HOURS)
    assert outcome.findings == ()
    assert outcome.faults


def test_a_seed_replays_in_another_interpreter():
    arguments = ("--seed", "7", "--hours", "0.02")
    first, second = (simulated(*arguments) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    digests = {run.stdout.partition("digest ")[2].split(":")[0] for run in (first, second)}
    assert len(digests) == 1


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug):
    ended = simulated("--plant", bug.name, "--seed", str(bug.seed), "--hours", str(bug.hours))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"\n{bug.finding} " in ended.stdout, ended.stdout
