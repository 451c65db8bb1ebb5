"""Views: what was looked at how often, counted once and shown at once.

    hit --function--> stream of its shard, cached total --flusher--> totals, hours (PostgreSQL)
                           `--> its new total                            |
    read <-- cached totals, what is missing from <------------------------'   series, top lists, verify

**Promise.** A view is counted exactly once from the answer on (with an event id: from the first try on), whatever is
killed. Totals and hours are written together. Totals never go down but by reclassification or deletion. In level `fast` a
power cut of Valkey loses at most what it had not synced (`everysec`: a second or two, more on a slow disk), a failover what the replica had
not received; level `durable` answers once that cannot be.

**PostgreSQL** is the truth (totals, hours, offsets, tombstones). **Valkey** has the hits not flushed yet, cached totals,
event ids of a day, viewers of three days. Hits go on while PostgreSQL is away; reads go on while Valkey is away.

**Counted** are ids, by class (human, bot, owner, staff), in hours of UTC by the clock of Valkey; days are those of
`views.time_zone`. A zone whose offset is no whole hour has its days begin with the hour in which they begin.

**Other languages** call the function `headrace_views_hit_v1` themselves; what it takes and answers stands at its head in
`lua/views_v1.lua`. The shard of an id is its CRC-32 modulo `views.shards`; every key of a shard carries `{v:<shard>}`.

**Files**: hearts `lua/views_v1.lua` (counting) and `flush.py` (exactly once); then `model`, `settings`, `errors`, `hot`
(Valkey), `fence` (durable), `store/` + `sql/`, `service/` (`counting`, `filling`, `reading`, `owners`, `shards`), `worker`
(the flusher), `http/`, `cli/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.views.model import (
    DayViewers,
    Deleted,
    Difference,
    Hit,
    SeriesPoint,
    ShardLag,
    TopEntry,
    Total,
    Traffic,
    Verified,
    traffic_of_user_agent,
)
from headrace.views.settings import ViewsConfig

if TYPE_CHECKING:
    from headrace.views.service import Views as Views

__all__ = [
    "DayViewers",
    "Deleted",
    "Difference",
    "Hit",
    "SeriesPoint",
    "ShardLag",
    "TopEntry",
    "Total",
    "Traffic",
    "Verified",
    "Views",
    "ViewsConfig",
    "traffic_of_user_agent",
]


def __getattr__(name: str) -> Any:
    """Import the room on first use: whoever reads the configuration needs its settings alone."""
    if name == "Views":
        from headrace.views.service import Views

        return Views
    raise AttributeError(f"module 'headrace.views' has no attribute {name!r}")
