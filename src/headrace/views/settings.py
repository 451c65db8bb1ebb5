"""The settings of views (section `views` of the configuration) and their metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headrace.kernel.config import parse_count, parse_duration_s, setting
from headrace.kernel.metrics import counter, gauge

SHARDS_MAX: Final = 1024
LEVELS: Final = ("fast", "durable")


def parse_shards(text: str) -> int:
    """A number of shards. Raises: ValueError."""
    if not re.fullmatch(r"[0-9]{1,4}", text.strip()) or not 1 <= int(text) <= SHARDS_MAX:
        raise ValueError(f"a whole number from 1 to {SHARDS_MAX}")
    return int(text)


def parse_time_zone(text: str) -> str:
    """A name of the time zone database. Raises: ValueError."""
    try:
        return ZoneInfo(text.strip()).key
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError("a time zone such as UTC or Europe/Amsterdam") from error


def parse_level(text: str) -> str:
    """How safe a hit is when it is answered. Raises: ValueError."""
    if text.strip() not in LEVELS:
        raise ValueError(f"one of {', '.join(LEVELS)}")
    return text.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsConfig:
    """Section `views`."""

    shards: int = setting(
        "4",
        "Parts of the counts, each with its stream and its flusher; stays as it was first used.",
        parse_shards,
    )
    time_zone: str = setting("UTC", "Time zone of days.", parse_time_zone)
    durability: str = setting(
        "fast",
        "When a hit is answered: fast (counted) or durable (confirmed to survive a failure, too).",
        parse_level,
    )
    durable_replicas: int = setting(
        "0",
        "Replicas that must have a durable hit; 0: the append-only file of Valkey, with appendfsync always.",
        parse_count,
    )
    durable_timeout_s: float = setting(
        "1500ms", "Longest wait for that confirmation.", parse_duration_s
    )
    cache_for_s: float = setting(
        "2d", "How long a total that nobody asks for stays in Valkey.", parse_duration_s
    )
    flush_every_s: float = setting("250ms", "Time between two flushes.", parse_duration_s)
    trim_after_s: float = setting(
        "10m",
        "How long hits stay in Valkey after their flush: a standby of PostgreSQL may be that far behind.",
        parse_duration_s,
    )
    viewers_kept_s: float = setting(
        "400d", "How long the number of viewers of a day is kept.", parse_duration_s
    )
    lease_s: float = setting(
        "10s", "A flusher silent for so long gives its shards to others.", parse_duration_s
    )


hits_counted = counter(
    "views_hits_total", "Hits by what became of them.", outcome=("counted", "refused")
)
totals_untold = counter(
    "views_totals_untold_total",
    "Totals that were answered stale or not at all, by the reason.",
    reason=("postgres", "behind", "valkey"),
)
flushed_views = counter("views_flushed_total", "Views written to PostgreSQL.")
flushed_rows = counter("views_flushed_rows_total", "Rows of totals and hours written for them.")
dropped_views = counter("views_dropped_total", "Hits of deleted entities that were dropped.")
unreadable_hits = counter(
    "views_unreadable_total", "Hits left out of a flush: something wrote into a stream by itself."
)
flush_races = counter("views_flush_races_total", "Flushes given up: another one was quicker.")
streams_broken = counter(
    "views_streams_broken_total",
    "Streams found without the last flushed entry: Valkey lost its tail, or PostgreSQL is an old copy.",
)
flush_lag_s = gauge(
    "views_flush_lag_seconds", "Age of the oldest hit that PostgreSQL does not have yet."
)
