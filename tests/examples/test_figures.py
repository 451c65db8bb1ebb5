"""The lines of the demo's terminal."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest
from examples.bazaar.buyers import Bought
from examples.bazaar.figures import Figures, Rates, Sample
from examples.bazaar.followers import Followed
from examples.bazaar.readers import Viewed
from examples.bazaar.story import StoryProgress
from examples.bazaar.visitors import Seen


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


def test_the_changing_figures_are_seen_on_80_columns():
    figures = Figures(
        stage=SimpleNamespace(sellers=range(50)),
        desk=None,
        adverts=None,
        progress=StoryProgress(),
        seen=Seen(statuses=Counter({200: 12_345, 206: 123_456, 304: 12_345})),
        viewed=Viewed(),
        followed=Followed(),
        bought=Bought(pages=12_345),
    )
    for number in range(2):
        figures._rates.add(sample(number, number * 123_456_789))
    figures._queues = [
        {"ready": 12_345, "leased": 1_234, "scheduled": 12_345, "failed": 123, "decisions": {}}
    ]
    lines = dict(re.match(r"[ \d]+(?: s)? +(\w+) +(.*)", row).groups() for row in figures.lines())
    seen = {room: f"{text}"[: 80 - 1 - 16] for room, text in lines.items()}
    assert "12345 ready, 1234 leased, 12345 scheduled" in seen.pop("jobs")
    assert "requests/s, 123.5 MB/s · wrong: 0 · 200: 12345" in seen.pop("media")
    assert seen.pop("views").startswith("123456789 views/s, 0 not yet flushed · wrong: 0")
    assert seen.pop("shop").startswith("12345 pages · wrong: 0")
    for room, text in seen.items():
        assert re.match(r"123456789 \w+/s · wrong: 0", text), room
