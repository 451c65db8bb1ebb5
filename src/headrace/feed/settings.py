"""The settings of the feed (section `feed` of the configuration) and its metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from headrace.kernel.config import parse_duration_s, setting
from headrace.kernel.metrics import counter, gauge

SHARDS_MAX: Final = 64
FOLLOWS_MAX: Final = 10_000
SLOW_PAGES_MAX: Final = 64


def parse_shards(text: str) -> int:
    """A number of shards. Raises: ValueError."""
    return _whole(text, SHARDS_MAX)


def parse_follows(text: str) -> int:
    """A number of follows. Raises: ValueError."""
    return _whole(text, FOLLOWS_MAX)


def parse_slow_pages(text: str) -> int:
    """A number of pages read at once. Raises: ValueError."""
    return _whole(text, SLOW_PAGES_MAX)


def _whole(text: str, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text.strip()) or not 1 <= int(text) <= most:
        raise ValueError(f"a whole number from 1 to {most}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """Section `feed`."""

    shards: int = setting(
        "1",
        "Parts of the index in Valkey; a page asks each of them. It stays for good.",
        parse_shards,
    )
    follows_max: int = setting("5000", "Authors that a viewer may follow.", parse_follows)
    index_for_s: float = setting(
        "365d",
        "How long posts stay in Valkey; older ones are read from PostgreSQL.",
        parse_duration_s,
    )
    keep_for_s: float = setting("36500d", "How long posts stay in PostgreSQL.", parse_duration_s)
    sweep_every_s: float = setting(
        "1s", "Time between two looks for changes that Valkey lacks.", parse_duration_s
    )
    live_every_s: float = setting(
        "1s", "Time between two looks for new posts, for each viewer who watches.", parse_duration_s
    )
    slow_pages_max: int = setting(
        "3",
        "Pages that a process reads from PostgreSQL at once; four times as many wait, others get 503.",
        parse_slow_pages,
    )


pages_told = counter(
    "feed_pages_total", "Pages by what they were read from.", source=("index", "postgres")
)
pages_refused = counter(
    "feed_pages_refused_total", "Pages that were not read, since PostgreSQL was busy with others."
)
changes_made = counter(
    "feed_changes_total",
    "Changes of the index by what became of them at once.",
    outcome=("applied", "replayed", "left"),
)
changes_repaired = counter(
    "feed_changes_repaired_total", "Changes that the sweep found missing in Valkey."
)
sweep_lag_s = gauge("feed_sweep_lag_seconds", "Age of the oldest change that was not swept.")
