"""Views: count how often items are viewed, exactly once, and show the totals at once.

    hit --function--> stream of its shard, cached total --flusher--> totals, hours (PostgreSQL)
                           `--> its new total                            |
    read <-- cached totals; missing ones from <--------------------------'   series, top, verify

**Promise.** Once a hit is answered it is counted exactly once, whichever process dies. A hit with
an event id is also safe to repeat. Totals and hours are written together. Totals fall only by
reclassification or deletion. At level `fast` a power cut of Valkey loses at most the writes it
had not synced (`everysec`: one or two seconds, more on a slow disk), and a failover loses what
the replica had not received. Level `durable` answers after that can no longer happen.

**PostgreSQL** is the truth: totals, hours, offsets, tombstones. **Valkey** holds the hits not
flushed yet, cached totals, event ids of one day, and viewers of three days. Hits are accepted
while PostgreSQL is down, and reads are answered while Valkey is down.

**What is counted.** Item ids, by class (human, bot, owner, staff) and hour of UTC, by Valkey's
clock. Days follow `views.time_zone`. Where its offset is not a whole hour, an hour belongs to the
day in which it begins.

**Other languages** call the function `headrace_views_hit_v1`; `lua/views_v1.lua` documents
arguments and reply. The shard of an id is its CRC-32 modulo `views.shards`. Every key of a shard
contains `{v:<shard>}`.

**Files.** Read `lua/views_v1.lua` (counting) and `flush.py` (exactly once) first. Then: `service`
(the public verbs and reads), `counting` (batches of hits), `totals_cache`, `analytics` (series,
top lists, corrections), `exports` (all series, changes), `worker` (the flusher),
`durability_wait`, `sketches` (viewers), `bots`, `valkey_store`, `store` with `sql/` (PostgreSQL),
`model`, `settings`, `errors`, `http`, `cli`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.views.model import (
    ChangePage,
    DayViewers,
    Deleted,
    Difference,
    ExportPage,
    ExportRow,
    Hit,
    Mark,
    SeriesPoint,
    ShardLag,
    TopEntry,
    Total,
    Traffic,
    Verified,
)
from headrace.views.settings import ViewsConfig

if TYPE_CHECKING:
    from headrace.views.service import Views as Views

__all__ = [
    "ChangePage",
    "DayViewers",
    "Deleted",
    "Difference",
    "ExportPage",
    "ExportRow",
    "Hit",
    "Mark",
    "SeriesPoint",
    "ShardLag",
    "TopEntry",
    "Total",
    "Traffic",
    "Verified",
    "Views",
    "ViewsConfig",
]


def __getattr__(name: str) -> Any:
    """Import the service on first use, so that reading the configuration needs no driver."""
    if name == "Views":
        from headrace.views.service import Views

        return Views
    raise AttributeError(f"module 'headrace.views' has no attribute {name!r}")
