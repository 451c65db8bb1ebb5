"""Settings of the feed (section `feed` of the configuration) and its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.kernel.config import parse_count_between, parse_duration_s, setting
from headrace.kernel.metrics import counter, gauge, histogram

SHARDS_MAX: Final = 64
FOLLOWS_MAX: Final = 10_000
"""Tested up to this number."""
SLOW_PAGES_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """Section `feed`."""

    shards: int = setting(
        "1",
        "Number of parts of the viewers in Valkey, each with all posts; fixed after the first use.",
        parse_count_between(1, SHARDS_MAX),
    )
    follows_max: int = setting(
        "5000",
        "Maximum number of authors a viewer may follow.",
        parse_count_between(1, FOLLOWS_MAX),
    )
    index_for_s: float = setting(
        "365d",
        "How long posts stay in Valkey; older ones are read from PostgreSQL.",
        parse_duration_s,
    )
    keep_for_s: float = setting("36500d", "How long posts stay in PostgreSQL.", parse_duration_s)
    sweep_every_s: float = setting(
        "1s",
        "How often changes that Valkey lacks are added to it from PostgreSQL.",
        parse_duration_s,
    )
    live_every_s: float = setting("1s", "Time between two polls of a live feed.", parse_duration_s)
    slow_pages_max: int = setting(
        "3",
        "Pages of feeds that a process reads from PostgreSQL at once; four times as many"
        " wait, others get 503.",
        parse_count_between(1, SLOW_PAGES_MAX),
    )


pages_read = counter(
    "feed_pages_total", "Pages of feeds read, by source.", source=("index", "postgres")
)
page_seconds = histogram(
    "feed_page_seconds",
    "Time to read a page of a feed.",
    buckets_s=(
        *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
        *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    ),
)
posts_added = counter("feed_posts_total", "Posts added.")
pages_refused = counter(
    "feed_pages_refused_total", "Pages of feeds refused because too many were read from PostgreSQL."
)
changes_made = counter(
    "feed_changes_total",
    "Changes of the index by immediate outcome.",
    outcome=("applied", "replayed", "deferred"),
)
changes_repaired = counter(
    "feed_changes_repaired_total", "Changes that the sweep found missing in Valkey."
)
sweep_lag_s = gauge(
    "feed_sweep_lag_seconds",
    "Age of the oldest change of the feed that no sweep has compared with Valkey:"
    " the highest of the last seconds.",
)
