"""The room's figures: which module makes which, in which order."""

from __future__ import annotations

from typing import Final

from bench import (
    fetch_broken,
    fetch_diff,
    fetch_isolation,
    fetch_limits,
    fetch_photos,
    fetch_routing,
)
from bench.harness import Measure

QUESTIONS: Final[dict[str, Measure]] = {
    "photos": fetch_photos.measure,
    "isolation": fetch_isolation.measure,
    "limits": fetch_limits.measure,
    "routing": fetch_routing.measure,
    "broken": fetch_broken.measure,
    "diff": fetch_diff.measure,
}
PACKAGES: Final = ["scrapy", "img2dataset"]
SETTINGS: Final = {
    "headrace": "agent with 2 slots, a lane a customer, a consumer, all checks, bytes and names"
    " synced",
    "scrapy images pipeline": "1 process, 200 requests at once, uvloop, no retries; syncs nothing",
    "img2dataset": "2 processes x 64 threads, files, no second encoding, SHA-256; syncs nothing",
    "img2dataset, tar files of 500": "the same with its webdataset format: no object per photo",
    "bare pycurl loop": "100 at once, SHA-256, file and folder synced in 16 threads; no checks",
}
