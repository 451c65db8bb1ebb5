"""`spread` smears load over a window that begins when the job would have been due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs import InvalidJob, NewJob
from headrace.jobs.errors import InvalidTask
from headrace.jobs.model import AT_AWAY_S_MAX
from headrace.jobs.validation import prepare_jobs

SPREAD_S = st.floats(0, 86_400.0)


@given(SPREAD_S, st.none() | st.floats(0, 86_400.0))
def test_a_delay_grows_by_at_most_the_spread(spread_s, after_s):
    rows = prepare_jobs([NewJob(queue="q", after_s=after_s, spread_s=spread_s)])
    first_s = after_s or 0.0
    assert first_s <= (rows.delays_s[0] or 0.0) <= first_s + spread_s
    assert rows.run_ats == [None]


@given(SPREAD_S, st.floats(-86_400.0, 86_400.0))
def test_a_moment_moves_by_at_most_the_spread(spread_s, away_s):
    """One that has passed counts as now."""
    asked = datetime.now(UTC)
    at = asked + timedelta(seconds=away_s)
    rows = prepare_jobs([NewJob(queue="q", at=at, spread_s=spread_s)])
    run_at = rows.run_ats[0]
    assert at <= run_at
    if spread_s:
        assert max(asked, at) <= run_at
        assert run_at <= max(datetime.now(UTC), at) + timedelta(seconds=spread_s)


def test_the_whole_window_is_used():
    rows = prepare_jobs([NewJob(queue="q", spread_s=1_000.0)] * 2_000)
    tenths = {int(delay_s // 100) for delay_s in rows.delays_s}
    assert tenths == set(range(10))


@pytest.mark.parametrize("spread_s", [-1.0, float("nan"), float("inf"), "2h", AT_AWAY_S_MAX + 1])
def test_a_spread_that_means_nothing_is_refused(spread_s):
    with pytest.raises(InvalidJob, match="spread_s: expected seconds"):
        prepare_jobs([NewJob(queue="q", spread_s=spread_s)])


def test_the_end_of_the_window_is_within_a_year():
    at = datetime.now(UTC) + timedelta(days=365)
    for options in ({"at": at}, {"after_s": 365 * 86_400.0}):
        prepare_jobs([NewJob(queue="q", spread_s=3_600.0, **options)])
        with pytest.raises(InvalidJob, match="spread_s: expected to end within a year"):
            prepare_jobs([NewJob(queue="q", spread_s=2 * 86_400.0, **options)])


async def test_a_job_is_enqueued_into_its_window(jobs, registry):
    @registry.task("q")
    async def handle(n: int): ...

    now = datetime.now(UTC)
    refs = [await handle.enqueue(n=n, after_s=3_600, spread="2h") for n in range(5)]
    moments = [(await ref.job()).run_at for ref in refs]
    assert len(set(moments)) == 5
    assert all(3_590 <= (at - now).total_seconds() <= 3 * 3_600 + 60 for at in moments)
    with pytest.raises(InvalidTask, match="spread: expected a duration"):
        await handle.enqueue(n=1, spread="some time")
