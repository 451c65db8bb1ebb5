"""Outcomes of photos: their codes, which of them are retried, and their counters.

An outcome is a text in one of four forms, stored and shown as it is: `stored`, `unchanged`,
`refused:<code>` (we rejected the URL or the content) and `failed:<code>` (the host did not
deliver). `known` counts photos that needed no request. A `refused` outcome and most 4xx responses
are final; 5xx, TEMPORARY_STATUSES and network errors are retried with backoff.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from headrace.kernel import metrics

FIRST_BYTE_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.175, 0.25, 0.5, 1.0, 1.75, 2.5, 5.0, 10.0, 30.0),
)
TEMPORARY_STATUSES: Final = frozenset({408, 421, 425, 429})
OUTCOME_CODES: Final = (
    "stored",
    "unchanged",
    "known",
    "refused:forbidden_address",
    "refused:not_an_image",
    "refused:too_large",
    "refused:too_many_pixels",
    "refused:too_many_frames",
    "refused:undecodable",
    "failed:dns",
    "failed:connect",
    "failed:timeout",
    "failed:http_404",
    "failed:http_503",
    "failed:rate_limited",
    "failed:truncated",
    "failed:tls",
    "failed:tls_expired",
    "failed:tls_not_yet_valid",
    "failed:tls_wrong_name",
    "failed:tls_self_signed",
    "failed:tls_untrusted",
    "failed:tls_incomplete",
)
PHOTOS_DECIDED: Final = metrics.counter(
    "fetch_photos_total", "Photos decided, by outcome.", outcome=OUTCOME_CODES
)
BYTES_RECEIVED: Final = metrics.counter(
    "fetch_received_bytes_total", "Bytes of photo bodies received."
)
ATTEMPTS: Final = metrics.counter(
    "fetch_attempts_total", "Requests for photos, by timeout class.", timeout_class=()
)
FIRST_BYTE: Final = metrics.histogram(
    "fetch_first_byte_seconds",
    "From the start of a request for a photo to the first byte of its response.",
    buckets_s=FIRST_BYTE_BUCKETS_S,
)


def is_temporary(outcome: str) -> bool:
    """Whether a retry in this run makes sense."""
    kind, _, code = outcome.partition(":")
    if kind != "failed" or code.startswith("tls"):
        return False
    status = re.fullmatch(r"http_(\d+)", code)
    return status is None or int(status[1]) in TEMPORARY_STATUSES or int(status[1]) >= 500


def count_bad(by_outcome: Mapping[str, int]) -> int:
    """Number of photos that failed or were refused."""
    return sum(n for one, n in by_outcome.items() if one.startswith(("failed:", "refused:")))
