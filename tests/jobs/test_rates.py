"""Arrival rates and handler times from cumulative readings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs.fleet.rates import QueueRate, Rate, Rates, Reading


def feed(queue, rates_per_s, *, handler_s=0.5, start=None, done=lambda arrived: arrived):
    """A reading every 5 s at the given arrival rates; `done` is how many of them had finished."""
    reading = start or Reading(0.0, 0, 0, 0.0)
    arrived = reading.finished + reading.active
    queue.observe(reading)
    for rate in rates_per_s:
        arrived += rate * 5
        finished = int(done(arrived))
        reading = Reading(reading.at_s + 5, finished, int(arrived) - finished, finished * handler_s)
        queue.observe(reading)
    return reading


def test_a_steady_rate_is_what_arrived_over_a_minute():
    queue = QueueRate()
    feed(queue, [20] * 12 + [22, 18])
    assert queue.rate() == Rate(20.0, 0.5)
    assert queue.covered_s == 60.0


def test_a_burst_is_believed_when_ten_seconds_are_significantly_higher():
    queue = QueueRate()
    last = feed(queue, [20] * 12)
    last = feed(queue, [26, 26], start=last)
    assert queue.rate().rate_per_s == pytest.approx(21.0), "30 % more is chance"
    feed(queue, [200, 200], start=last)
    assert queue.rate().rate_per_s == pytest.approx(200.0)


def test_the_end_of_a_burst_is_believed_slowly():
    queue = QueueRate()
    feed(queue, [20] * 12 + [0, 0])
    assert queue.rate().rate_per_s == pytest.approx(20 * 50 / 60)


def test_a_saturated_queue_counts_what_arrives_and_not_what_it_processes():
    queue = QueueRate()
    feed(queue, [100] * 13, done=lambda arrived: arrived / 10)
    assert queue.rate().rate_per_s == pytest.approx(100.0)


def test_a_handler_time_needs_five_that_finished_or_much_time_spent():
    queue = QueueRate()
    queue.observe(Reading(0, 0, 9, 0.0))
    queue.observe(Reading(5, 4, 5, 0.4))
    assert queue.rate().handler_s == 0.1, "four are too few"
    queue.observe(Reading(10, 5, 4, 1.0))
    assert queue.rate().handler_s == pytest.approx(0.2)
    poisoned = QueueRate()
    feed(poisoned, [10] * 12)
    for second in range(5, 90, 5):
        poisoned.observe(Reading(60 + second, 600, 400, 300 + 400 * second))
    assert poisoned.rate().handler_s > 1_000, "running handlers count before the first ends"


def test_late_readings_and_new_starts_do_no_harm():
    queue = QueueRate()
    last = feed(queue, [20] * 12)
    queue.observe(Reading(last.at_s - 1, 5, 5, 5.0))
    queue.observe(last)
    assert queue.rate().rate_per_s == 20.0
    queue.observe(Reading(last.at_s + 5, 3, 0, 0.1))
    assert queue.covered_s == 0.0
    assert queue.rate() == Rate(0.0, 0.5), "the handler time is still the best there is"
    feed(queue, [20, 20], start=Reading(last.at_s + 10, 3, 0, 0.1))
    assert queue.rate().rate_per_s == pytest.approx(13.3, abs=0.1)
    feed(queue, [40] * 12, start=Reading(last.at_s + 10_000, 9_000, 0, 9_000.0))
    assert queue.rate().rate_per_s == pytest.approx(40.0)


def test_a_new_leader_plans_after_ten_seconds_and_counts_them_as_a_minute():
    rates = Rates()
    assert not rates.is_ready
    for second in (0, 5, 10):
        assert not rates.is_ready
        rates.observe(
            {
                "mail": Reading(second, 30 * second, 0, 3.0 * second),
                "slow": Reading(second, 0, second // 5, 0.0),
            }
        )
    assert rates.is_ready
    assert rates.rates() == {"mail": Rate(30.0, 0.1), "slow": Rate(0.2, 0.1)}
    rates.observe({"slow": Reading(15, 0, 3, 0.0)})
    assert rates.rates().keys() == {"slow"}


@given(
    st.lists(
        st.tuples(st.floats(0, 400), st.integers(0, 500), st.integers(0, 99), st.floats(0, 1e4)),
        max_size=30,
    )
)
def test_any_readings_give_a_usable_rate(rows):
    queue = QueueRate()
    for row in rows:
        queue.observe(Reading(*row))
        rate = queue.rate()
        assert rate.rate_per_s >= 0
        assert rate.handler_s >= 0
        assert queue.covered_s >= 0


@pytest.mark.parametrize("per_s", [0.5, 50.0])
def test_chance_alone_seldom_looks_like_a_burst(per_s):
    dice = random.Random(3)
    queue = QueueRate()
    finished, too_high = 0, 0
    for step in range(1, 2_001):
        finished += sum(dice.random() < per_s / 100 for _ in range(500))
        queue.observe(Reading(step * 5.0, finished, 0, finished * 0.1))
        too_high += step > 12 and queue.rate().rate_per_s > per_s * 1.6 + 0.5
    assert too_high / 2_000 < 0.02
