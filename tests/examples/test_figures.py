"""The lines of the demo's terminal."""

from __future__ import annotations

import pytest
from examples.bazaar.figures import Rates, Sample


def sample(at_s, count):
    """Every counter at `count`."""
    return Sample(
        at_s=at_s,
        jobs_done=count,
        photos=count,
        requests=count,
        body_bytes=count,
        views=count,
        pages=count,
    )


@pytest.mark.parametrize("every_s", [1.0, 4.0, 4.7, 30.0])
def test_a_rate_is_the_difference_by_the_elapsed_time(every_s):
    rates = Rates()
    for number in range(12):
        rates.add(sample(number * every_s, int(number * every_s * 100)))
        if number:
            assert rates.per_second() == pytest.approx((100.0,) * 6)


def test_an_old_rate_does_not_stay():
    rates = Rates()
    for number in range(10):
        rates.add(sample(number, number * 100))
    for number in range(10, 16):
        rates.add(sample(number, 900))
    assert rates.per_second() == (0.0,) * 6
