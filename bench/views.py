"""The room's figures: which module makes which, in which order."""

from __future__ import annotations

from typing import Final

from bench import views_cold, views_history, views_hits, views_http
from bench.harness import Measure

QUESTIONS: Final[dict[str, Measure]] = {
    "most": views_http.measure_most,
    "wait": views_http.measure_wait,
    "hits": views_hits.measure_hits,
    "flush": views_hits.measure_flush,
    "cold": views_cold.measure_cold,
    "history": views_history.measure_history,
}
PACKAGES: Final[list[str]] = []
SETTINGS: Final = {
    "headrace": "4 shards, fast durability, metrics, trace ids, tokens, ETags on; AOF everysec",
    views_http.RAW: "uvicorn, uvloop, httptools, our multiplexed connection, no metrics, no checks",
    views_hits.QUEUED: "script by hash, 20 hits a pipeline, batches of 10,000, two upserts",
    views_hits.PLAIN: "20 INCR a pipeline; nothing is kept by hour",
}
