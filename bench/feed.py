"""The room's figures: which module makes which, in which order."""

from __future__ import annotations

from typing import Final

from bench import (
    feed_crowded,
    feed_http,
    feed_kinds,
    feed_module,
    feed_pages,
    feed_push,
    feed_shards,
)
from bench.harness import Measure

QUESTIONS: Final[dict[str, Measure]] = {
    "pages": feed_pages.measure_pages,
    "pages_10m": feed_pages.measure_large("uniform"),
    "pages_10m_zipf": feed_pages.measure_large("zipf"),
    "crowded": feed_crowded.measure_crowded,
    "kinds": feed_kinds.measure_kinds,
    "shards": feed_shards.measure_shards,
    "module": feed_module.measure_module,
    "writes": feed_http.measure_writes,
    "http": feed_http.measure_http,
    "push": feed_push.measure_push,
}
PACKAGES: Final[list[str]] = []
SETTINGS: Final = {
    "headrace": "one shard, AOF everysec; over HTTP metrics, trace ids, tokens on",
    feed_pages.APP: "one pipeline of ZRANGE a page, libvalkey, the follows known to the app",
    feed_pages.LUA: "one script by hash, on the same keys",
    feed_pages.COLUMNS: "numpy, authors of posts by time, in one process",
    feed_module.MODULE: (
        "a module built elsewhere, loaded into the same Valkey; FEED_MODULE is its path"
    ),
}
