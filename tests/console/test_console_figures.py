"""Derived figures of screens: days of a time zone, histogram bounds, states of rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from headrace.console.screens.fetch import TONES, WORDS
from headrace.console.screens.media import bound_s, kind_of, parents_of
from headrace.console.screens.views import chart_of, flush_of
from headrace.console.views import PanelData, Rates, parse_series
from headrace.fetch.model import RunState
from headrace.views import SeriesPoint, ShardLag

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TTFB = """
media_ttfb_seconds_bucket{le="2.5e-05",role="media"} 10.0
media_ttfb_seconds_bucket{le="0.001",role="media"} 90.0
media_ttfb_seconds_bucket{le="0.025",role="media"} 99.0
media_ttfb_seconds_bucket{le="+Inf",role="media"} 100.0
media_ttfb_seconds_count{role="media"} 100.0
media_ttfb_seconds_bucket{le="2.5e-05",role="api"} 5000.0
media_ttfb_seconds_count{role="api"} 5000.0
"""


def test_days_follow_the_time_zone():
    """In Berlin, the last Sunday of October has 25 hours."""
    from_at, to_at = datetime(2026, 10, 24, 12, tzinfo=UTC), datetime(2026, 10, 27, 12, tzinfo=UTC)
    point = SeriesPoint(start_at=datetime(2026, 10, 24, 22, tzinfo=UTC), human=5)
    chart = chart_of([point], "day", from_at, to_at, zone=BERLIN)
    starts = [datetime.fromtimestamp(x, BERLIN) for x in chart.xs]
    assert [(at.day, at.hour) for at in starts] == [(24, 0), (25, 0), (26, 0), (27, 0)]
    assert chart.xs[2] - chart.xs[1] == 25 * 3600
    assert chart.lines[0].values == [0, 5, 0, 0]


def test_missing_hours_count_as_zero_and_empty_classes_have_no_line():
    from_at = NOON - timedelta(hours=3)
    points = [SeriesPoint(start_at=NOON - timedelta(hours=2), human=2, bot=1)]
    chart = chart_of(points, "hour", from_at, NOON, zone=ZoneInfo("UTC"))
    assert [(line.label, list(line.values)) for line in chart.lines] == [
        ("human", [0, 2, 0, 0]),
        ("bot", [0, 1, 0, 0]),
    ]


@pytest.mark.parametrize(
    ("share", "bound"), [(0.05, 2.5e-05), (0.5, 0.001), (0.99, 0.025), (1.0, None)]
)
def test_a_bound_is_the_smallest_sufficient_bucket(share, bound):
    rates = Rates(None)
    rates.add(0.0, parse_series(TTFB))
    assert bound_s(rates, "media_ttfb_seconds", share) == bound


def test_an_idle_node_has_no_bound():
    rates = Rates(None)
    assert bound_s(rates, "media_ttfb_seconds", 0.5) is None
    rates.add(0.0, parse_series('media_ttfb_seconds_count{role="media"} 0.0\n'))
    assert bound_s(rates, "media_ttfb_seconds", 0.5) is None


def test_the_flush_state_is_that_of_the_worst_shard():
    shards = [
        ShardLag(shard=0, through="0-1", pending=2, oldest_s=3.0, flusher="a"),
        ShardLag(shard=1, through="0-1", pending=1, oldest_s=90.0, flusher="a"),
    ]
    flush = flush_of(PanelData(shards)).value
    assert (flush.pending, flush.oldest_s, flush.alone, flush.tone) == (3, 90.0, 0, "bad")
    assert flush_of(PanelData(error="away")).error == "away"
    words = [flush_of(PanelData(found)).value.word for found in (shards, shards[:1], [])]
    assert words == ["flush is late", "flushing", "flushed"]


def test_every_run_state_has_text_and_tone():
    assert WORDS.keys() == TONES.keys() == set(RunState)


def test_only_images_audio_and_video_have_previews():
    kinds = [kind_of(one) for one in ("image/jpeg", "image/svg+xml", "audio/mpeg", "text/html", "")]
    assert kinds == ["image", "", "audio", "", ""]
    assert parents_of("a/b") == [("a", "a"), ("b", "a/b")]
