"""The lines of the demo's terminal."""

from __future__ import annotations

import re
import time
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
    return Sample(at_s, (count,) * 6)


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


@pytest.fixture
def figures():
    """A demo of many figures."""
    found = Figures(
        stage=SimpleNamespace(sellers=range(50)),
        desk=None,
        happened=list,
        shown=list,
        progress=StoryProgress(shops_settled=set(range(50))),
        seen=Seen(photos_whole=74_568),
        viewed=Viewed(totals={"a": 1, "b": 1}),
        views=lambda: 53_415,
        followed=Followed(walks=2_044, unfollowed=1_396),
        bought=Bought(pages=17_161, tracks=2_269, ways=2_102),
    )
    for number in range(2):
        found._rates.add(Sample(number, (number * 381, number * 9)))
        found._visitor_rates.add(Sample(number, (0, 0, 0, 0)))
    found._pending = 156
    found._done_lines.update(publish=605, edit=185, unpublish=185)
    found._queues = [
        {"ready": 14, "leased": 39, "failed": 2, "decisions": {}},
        {"ready": 359, "leased": 0, "failed": 0, "decisions": {"fine": None}},
    ]
    return found


CHECKS = [
    "0 wrong answers · ledger: 66053 compared",
    "0 lost besides 261 views that Empty Valkey may lose, 0 doubled",
]


def test_no_line_is_cut_on_80_columns(figures):
    rows = figures.lines(CHECKS)
    assert max(map(len, rows)) < 80, rows
    lines = [re.match(r"[ \d]+(?: s)? +(\w+) +(.*)", row).groups() for row in rows[:7]]
    texts = dict(lines)
    assert texts["jobs"] == "381 done/s · 39 in progress, 14 waiting, 2 failed, 359 to review"
    assert texts["views"].endswith("/s of adverts · 53415 counted, 156 not yet in PostgreSQL")
    assert texts["checks"] == CHECKS[0]
    assert rows[7].strip() == CHECKS[1]


def test_the_rate_of_media_includes_tracks(figures):
    """The console counts all answers of the node."""
    figures._visitor_rates = Rates()
    figures._visitor_rates.add(Sample(time.monotonic() - 2, (0, 0, 0, 0)))
    figures._seen.statuses.update({206: 40})
    figures._bought.ranges, figures._bought.range_bytes = 60, 8_000_000
    assert "media  50 requests/s, 4.0 MB/s" in "\n".join(figures.lines(CHECKS))


def test_figures_that_could_not_be_read_are_marked(figures):
    figures._read_s -= 17
    jobs, fetch, media, views, *_ = figures.lines(CHECKS)
    assert jobs.endswith("jobs   - done/s · not readable for 17 s")
    assert "fetch  - photos/s · 50/50 sellers" in fetch
    assert "requests/s" in media
    assert views.endswith("53415 counted, - not yet in PostgreSQL")


def test_the_summary_names_expected_errors_and_earlier_failures(figures):
    figures._stage = SimpleNamespace(sellers=[SimpleNamespace(manner="fast")] * 50)
    figures._photos.update(stored=90, waiting=12)
    figures._seen.statuses.update({206: 30})
    figures._viewed.lists, figures._viewed.unchanged = 44, 43
    text = "\n".join(figures.summary(CHECKS))
    assert "photos of these catalogues: 90 stored, 12 failed before (not requested)\n" in text
    assert "totals of 44 lists of adverts read, each twice: 43 unchanged the second time" in text
    assert text.count("206: 30\n") == 1
    figures._seen.statuses[416] = 7
    past_end = "206: 30, 416: 7 (visitors request ranges past the end on purpose)"
    assert past_end in "\n".join(figures.summary(CHECKS))
