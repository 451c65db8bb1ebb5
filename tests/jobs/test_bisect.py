"""Bisecting a batch finds its bad jobs; good jobs run again at most as often as documented."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs.agent.queue_state import CALL_S, BatchSizer
from headrace.jobs.slots.executor import Bisect


def runs_of(count, bad, said=()):
    """Simulate a batch whose calls raise on a bad job. Return runs and failures by job."""
    runs, failed, done = dict.fromkeys(range(count), 0), set(), set()
    bisect = Bisect(range(count))
    while (run := bisect.next_run()) is not None:
        assert run
        for job in run:
            runs[job] += 1
        if not bad.intersection(run):
            done.update(run)
        elif len(run) == 1:
            failed.update(run)
        else:
            done.update(job for job in run if job in said)
            bisect.split([job for job in run if job not in said])
    return runs, failed, done


@given(st.data(), st.integers(1, 130))
def test_exactly_the_bad_jobs_fail_and_good_ones_run_few_times(data, count):
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    runs, failed, done = runs_of(count, bad)
    assert failed == bad
    assert done == set(range(count)) - bad
    assert max(runs.values()) <= math.ceil(math.log2(count)) + 1


@given(st.data(), st.integers(2, 60))
def test_jobs_that_said_their_outcome_are_not_run_again(data, count):
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    said = data.draw(st.sets(st.integers(0, count - 1))) - bad
    runs, failed, done = runs_of(count, bad, said)
    assert failed == bad
    assert done == set(range(count)) - bad
    assert all(runs[job] == 1 for job in said)


@pytest.mark.parametrize(("bad", "calls"), [({41}, 15), (set(range(100)), 199), (set(), 1)])
def test_how_many_calls_it_takes(bad, calls):
    bisect, made = Bisect(range(100)), 0
    while (run := bisect.next_run()) is not None:
        made += 1
        if len(run) > 1 and bad.intersection(run):
            bisect.split(run)
    assert made == calls


def test_what_is_given_up_is_everything_that_was_left():
    bisect = Bisect(range(10))
    bisect.split(bisect.next_run())
    assert list(bisect.next_run()) == [0, 1, 2, 3, 4]
    assert bisect.give_up() == [5, 6, 7, 8, 9]
    assert bisect.next_run() is None


@given(st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=30), st.integers(1, 10_000))
def test_a_batch_is_capped_by_what_its_calls_showed(job_times, batch):
    batch_sizer = BatchSizer()
    assert batch_sizer.batch_size(batch) == batch
    for job_s in job_times:
        batch_sizer.note_calls(10, 10 * job_s)
    size = batch_sizer.batch_size(batch)
    assert 1 <= size <= batch
    assert size == 1 or size * min(job_times) <= CALL_S
    for _ in range(60):
        batch_sizer.note_calls(10, 10 * 0.1)
    assert batch_sizer.batch_size(batch) in (min(batch, 14), min(batch, 15))
