"""Seeds of media: promises hold, a seed replays."""

from __future__ import annotations

import pytest
import structlog
from verification.simulation.media import MediaScenario
from verification.simulation.run import run_seed

SOAK_SEEDS = 100


@pytest.fixture(autouse=True)
def _quiet():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def test_a_seed_breaks_no_promise_and_replays():
    first, again = (run_seed(MediaScenario, 2, hours=0.004) for _ in range(2))
    assert not first.findings
    assert first.faults
    assert first.digest == again.digest


def test_connections_do_not_break_after_the_fault():
    """Idle ones broke half a minute later, so a block was read without a fault four times."""
    assert run_seed(MediaScenario, 291138, hours=0.03).findings == ()


@pytest.mark.soak
def test_many_seeds_break_no_promise():
    for seed in range(1000, 1000 + SOAK_SEEDS):
        outcome = run_seed(MediaScenario, seed, hours=0.1)
        assert not outcome.findings, f"python -m verification.simulation media --seed {seed}"
