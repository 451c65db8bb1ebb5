"""The rate of a signed URL: at most a burst ahead, few timers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.media.worker.socket_io import BURST_BYTES_MIN, BURST_S, RateLimit


@given(
    rate=st.integers(1, 10**9),
    steps=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 2**20)), max_size=50),
)
def test_no_more_goes_out_than_the_rate_and_one_burst(rate, steps):
    pace, now_s, sent = RateLimit(rate, 100.0), 100.0, 0
    for delay_s, wanted in steps:
        now_s += delay_s
        share = min(wanted, pace.allowed_bytes(now_s))
        pace.spend(share)
        sent += share
        ahead = sent - (now_s - 100.0) * rate
        assert ahead <= max(BURST_BYTES_MIN, rate * BURST_S) + 1


@pytest.mark.parametrize("rate", [1000, 600_000, 10**9])
def test_sends_that_take_time_do_not_allow_each_other(rate):
    """Otherwise a paced client would occupy its worker until its answer ends."""
    pace, now_s, sends = RateLimit(rate, 0.0), 0.0, 0
    while now_s < 10:
        share = pace.allowed_bytes(now_s)
        pace.spend(share)
        sends += share > 0
        now_s += 0.00005 if share else pace.wait_s()
    burst = max(BURST_BYTES_MIN, rate * BURST_S)
    assert sends <= 10 * rate / (burst / 4) + 2


@pytest.mark.parametrize("rate", [1000, 32_768, 10**6, 10**9])
def test_a_client_that_takes_all_gets_its_rate(rate):
    pace, now_s, sent, timers = RateLimit(rate, 0.0), 0.0, 0, 0
    while now_s < 60:
        share = pace.allowed_bytes(now_s)
        pace.spend(share)
        sent += share
        if not share:
            now_s += pace.wait_s()
            timers += 1
    burst = max(BURST_BYTES_MIN, rate * BURST_S)
    assert 60 * rate - burst <= sent <= 60 * rate + 2 * burst
    assert timers <= 60 * rate / (burst / 2) + 2
