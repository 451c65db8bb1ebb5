"""The lines of the demo's terminal."""

from __future__ import annotations

import re
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
        seen=Seen(photos_whole=1_234),
        viewed=Viewed(views=12_345, totals={"a": 1, "b": 1}),
        followed=Followed(),
        bought=Bought(pages=12_345, tracks=456),
    )
    for number in range(2):
        figures._rates.add(sample(number, number * 123_456_789))
    figures._queues = [
        {"ready": 12_345, "leased": 1_234, "scheduled": 12_345, "failed": 123, "decisions": {}}
    ]
    checks = "0 wrong answers · lost 0 and doubled 0 of 12345 jobs, views, photos, posts"
    lines = dict(
        re.match(r"[ \d]+(?: s)? +(\w+) +(.*)", row).groups() for row in figures.lines(checks)
    )
    seen = {room: f"{text}"[: 80 - 1 - 16] for room, text in lines.items()}
    assert "1234 in progress, 12345 waiting, 123 failed" in seen.pop("jobs")
    assert "requests/s, 123.5 MB/s · 1234 photos" in seen.pop("media")
    assert "views/s · 12345 views of 2 adverts, " in seen.pop("views")
    assert seen.pop("site").startswith("12345 pages · 456 tracks played")
    assert seen.pop("checks") == checks[: 80 - 1 - 16]
    assert "lost 0 and doubled 0" in checks[: 80 - 1 - 16]
    for room, text in seen.items():
        assert re.match(r"123456789 \w+/s · ", text), room
