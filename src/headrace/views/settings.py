"""Settings of views (section `views` of the configuration) and their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headrace.kernel.config import parse_count, parse_count_between, parse_duration_s, setting
from headrace.kernel.metrics import counter, gauge
from headrace.views.bots import read_rules
from headrace.views.model import CLASSES, COUNTER_NAME, COUNTERS_MAX, DELETED, FIELDS, ExportRow

SHARDS_MAX: Final = 1024
HOURS_KEPT_S_MIN: Final = 32 * 86_400.0
RESERVED: Final = frozenset(
    {*CLASSES, DELETED, *FIELDS, *ExportRow.__struct_encode_fields__, "stale"}
)
"""Names that counters cannot have: they would be confused in tables and exports."""
LEVELS: Final = ("fast", "durable")


def parse_time_zone(text: str) -> str:
    """Parse the name of a time zone. Raises: ValueError."""
    try:
        return ZoneInfo(text.strip()).key
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError("a time zone such as UTC or Europe/Amsterdam") from error


def parse_level(text: str) -> str:
    """Parse a durability level. Raises: ValueError."""
    if text.strip() not in LEVELS:
        raise ValueError(f"one of {', '.join(LEVELS)}")
    return text.strip()


def parse_bots(text: str) -> str:
    """Parse the name of a valid file of rules for bots. Raises: ValueError."""
    read_rules(Path(text.strip()))
    return text.strip()


def parse_counters(text: str) -> tuple[str, ...]:
    """Parse names of counters. Raises: ValueError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    is_valid = all(COUNTER_NAME.fullmatch(name) and name not in RESERVED for name in names)
    if not is_valid or len(names) > COUNTERS_MAX or len(set(names)) < len(names):
        raise ValueError(
            f"up to {COUNTERS_MAX} different names of a-z 0-9 _ such as photo,phone; not a class"
            " or a field such as human or views"
        )
    return names


def parse_hours_kept(text: str) -> float:
    """Parse how long hours are kept: longer than any top list. Raises: ValueError."""
    if parse_duration_s(text) < HOURS_KEPT_S_MIN:
        raise ValueError("a duration of at least 32d")
    return parse_duration_s(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsConfig:
    """Section `views`."""

    shards: int = setting(
        "4",
        "Number of parts of the items, each with its own stream in Valkey and flusher;"
        " fixed after the first use.",
        parse_count_between(1, SHARDS_MAX),
    )
    time_zone: str = setting("UTC", "Time zone of days.", parse_time_zone)
    counters: tuple[str, ...] = setting(
        "",
        "Names of counters that hits may count beside views, such as photo,phone.",
        parse_counters,
    )
    bots: str | None = setting(
        None,
        "File of rules for bots in place of the package's bots.toml; read again when it changes.",
        parse_bots,
    )
    durability: str = setting(
        "fast",
        "When a hit is answered: fast (counted) or durable (also confirmed to survive a failure).",
        parse_level,
    )
    durable_replicas: int = setting(
        "0",
        "Replicas that must confirm a durable hit; 0: none, but Valkey's append-only file,"
        " which needs appendfsync always.",
        parse_count,
    )
    durable_timeout_s: float = setting(
        "1500ms", "Longest wait for the confirmation of a durable hit.", parse_duration_s
    )
    cache_for_s: float = setting(
        "2d", "How long an unused total stays cached in Valkey.", parse_duration_s
    )
    flush_every_s: float = setting("250ms", "Time between two flushes.", parse_duration_s)
    trim_after_s: float = setting(
        "10m",
        "How long hits stay in Valkey after their flush; a PostgreSQL standby may lag that far.",
        parse_duration_s,
    )
    hours_kept_s: float = setting(
        "400d",
        "How long views by hour are kept, in whole months; then days replace them for good.",
        parse_hours_kept,
    )
    changes_kept_s: float = setting(
        "0s",
        "How long changes of view counts are kept for `headrace views changes`; 0s: not recorded.",
        parse_duration_s,
    )
    viewers_kept_s: float = setting(
        "400d", "How long viewer counts of a day are kept.", parse_duration_s
    )
    lease_s: float = setting(
        "10s", "How long a flusher owns its shards without renewing its lease.", parse_duration_s
    )


hits_counted = counter(
    "views_hits_total",
    "Hits by outcome, of the API and of jobs.",
    outcome=("counted", "refused"),
)
totals_read = counter(
    "views_totals_read_total",
    "Totals read, by where they were found: Valkey's cache or PostgreSQL.",
    source=("valkey", "postgres"),
)
totals_unavailable = counter(
    "views_totals_unavailable_total",
    "Totals answered stale or as unknown, by cause.",
    reason=("postgres", "behind", "valkey"),
)
flushed_views = counter("views_flushed_total", "Views written to PostgreSQL.")
flushed_rows = counter("views_flushed_rows_total", "Rows of totals and hours written by flushes.")
dropped_views = counter("views_dropped_total", "Dropped hits of deleted items.")
unreadable_hits = counter(
    "views_unreadable_total",
    "Unreadable stream entries skipped by a flush: another program wrote to the stream.",
)
flush_races = counter(
    "views_flush_races_total",
    "Flushes discarded because another flusher moved the offset, or a shard was set up, first.",
)
streams_broken = counter(
    "views_streams_broken_total",
    "Streams without their last flushed entry: Valkey lost data, or PostgreSQL is an old copy.",
)
flush_lag_s = gauge(
    "views_flush_lag_seconds",
    "Age of the oldest hit not yet in PostgreSQL, the highest of the last seconds.",
)
