"""The room's figures: which module makes which, in which order."""

from __future__ import annotations

from typing import Final

from bench import (
    media_cluster,
    media_devices,
    media_ranges,
    media_slow,
    media_store,
    media_tls,
    media_variants,
)
from bench.harness import Measure
from bench.peers import media_servers

QUESTIONS: Final[dict[str, Measure]] = {
    "ranges": media_ranges.measure,
    "tls": media_tls.measure,
    "fast": media_slow.measure_fast,
    "crowd": media_slow.measure_crowd,
    "hop": media_cluster.measure_hop,
    "restart": media_store.measure_restart,
    "hits": media_store.measure_hits,
    "devices": media_devices.measure,
    "spread": media_cluster.measure_spread,
    "variants": media_variants.measure,
}
PACKAGES: Final = ["aiohttp", "granian", "uvloop"]
SETTINGS: Final = {
    "headrace": (
        "1 worker and its filler, store of blocks with sums, every URL signed and checked, metrics"
    ),
    media_ranges.FILES: "1 worker, files of a folder, every URL signed and checked, metrics",
    media_tls.FILES: "as headrace, files; HTTPS without kernel TLS",
    **media_servers.SETTINGS,
}
