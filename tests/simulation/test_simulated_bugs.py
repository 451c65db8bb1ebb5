"""The simulation finds planted bugs with their pinned seeds."""

from __future__ import annotations

import pytest
from verification.simulation.planted import bugs, simulate_bug


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug):
    ended = simulate_bug(bug, str(bug.seed))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"\n{bug.finding} " in ended.stdout, ended.stdout
