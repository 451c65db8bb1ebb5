"""Metrics of the cache. The filler counts fills; lookups are summed over the workers."""

from __future__ import annotations

from typing import Final

from headrace.kernel.metrics import bound, counter, gauge
from headrace.media.cache.filler_ipc import DiskState

_OUTCOMES: Final = ("stored", "pass", "failed")
_FILLS: Final = counter(
    "media_fills_total",
    "Blocks read from the origin: stored, passed through, or failed.",
    outcome=_OUTCOMES,
)
FILLED: Final = {
    outcome: bound(_FILLS, "media_fills_total", outcome=outcome) for outcome in _OUTCOMES
}
FILLED_BYTES: Final = counter(
    "media_filled_bytes_total", "Bytes of blocks read from the origin by the filler."
)
JOINED: Final = counter("media_fills_joined_total", "Misses that joined a read in progress.")
EVICTIONS: Final = counter("media_evictions_total", "Blocks evicted to make room.")
STUCK: Final = counter(
    "media_stuck_turns_total",
    "Blocks that were not cached because a worker process used the old block for too long.",
)
_SUMS: Final = counter(
    "media_block_sums_total",
    "Blocks compared with their checksum, by the comparing side.",
    by=("worker", "scrub"),
    result=("right", "wrong"),
)
SUMS: Final = {
    (by, is_right): bound(
        _SUMS, "media_block_sums_total", by=by, result="right" if is_right else "wrong"
    )
    for by in ("worker", "scrub")
    for is_right in (True, False)
}
_DISKS: Final = gauge(
    "media_disks",
    "Disks of this node by state, without retired ones.",
    state=DiskState,
)
DISKS: Final = {state: bound(_DISKS, "media_disks", state=state) for state in DiskState}
DISKS_MAX: Final = 64
_QUEUE: Final = gauge(
    "media_disk_queue",
    "Writes and checks that wait for a disk, by its position in `media disks`.",
    disk=map(str, range(DISKS_MAX)),
)
QUEUE: Final = [
    bound(_QUEUE, "media_disk_queue", disk=str(position)) for position in range(DISKS_MAX)
]
_ROTTEN: Final = gauge(
    "media_disk_rotten_blocks",
    "Blocks that changed on a disk after they were verified, by its position in `media disks`.",
    disk=map(str, range(DISKS_MAX)),
)
ROTTEN: Final = [
    bound(_ROTTEN, "media_disk_rotten_blocks", disk=str(position)) for position in range(DISKS_MAX)
]
FAULTS: Final = counter(
    "media_disk_faults_total", "Times a disk was taken out of use because it failed."
)
