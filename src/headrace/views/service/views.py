"""Views, the verbs: `await app.views.hit("ad:1")`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime

from headrace.engines import Engines
from headrace.jobs import Jobs, Registry, Task
from headrace.views.fence import Fence
from headrace.views.hot import Hot
from headrace.views.model import (
    DayViewers,
    Deleted,
    Hit,
    Reclassify,
    SeriesPoint,
    ShardLag,
    TopEntry,
    Total,
    Traffic,
    Verified,
    require_traffic,
)
from headrace.views.service.counting import Counting
from headrace.views.service.filling import Filling
from headrace.views.service.owners import RECLASSIFY_QUEUE, Owners
from headrace.views.service.patience import Patience
from headrace.views.service.reading import Reading
from headrace.views.service.shards import Shards
from headrace.views.settings import ViewsConfig


class Views:
    """The room's handle; opens nothing by itself."""

    def __init__(self, engines: Engines, jobs: Jobs, config: ViewsConfig) -> None:
        self.config = config
        postgres, zone = engines.postgres, config.time_zone
        self._hot = Hot(engines.valkey, engines.multiplexer)
        patience = Patience()
        self._shards = Shards(postgres, self._hot, config.shards, patience)
        filling = Filling(postgres, self._hot, self._shards, patience)
        self._counting = Counting(self._hot, self._shards, filling, time_zone=zone)
        if config.durability == "durable":
            self._counting.fence = Fence(
                engines.valkey,
                replicas=config.durable_replicas,
                timeout_s=config.durable_timeout_s,
            )
        self._reading = Reading(postgres, self._hot, self._shards, patience, time_zone=zone)
        self._owners = Owners(
            postgres, self._hot, self._shards, jobs, patience=patience, time_zone=zone
        )

    def register(self, registry: Registry) -> None:
        """Add the room's task; every process that enqueues or works needs it."""
        registry.add(Task(queue=RECLASSIFY_QUEUE, handler=self._move, retries=20))

    async def hit(
        self,
        entity: str,
        n: int = 1,
        *,
        viewer: str | None = None,
        event: str | None = None,
        traffic: Traffic | str = Traffic.HUMAN,
    ) -> Total:
        """Count `n` views of an entity; its total after it.

        Counted exactly once from the answer on. After ValkeyLost it is counted or not; with an `event` id the call may be
        repeated for 24 hours. Raises: InvalidHit, ValkeyDown, NotCounting, NotDurable.
        """
        plain = n == 1 and viewer is None and event is None and traffic == Traffic.HUMAN
        hit: Hit | str = entity
        if not plain:
            hit = Hit(id=entity, n=n, viewer=viewer, event=event, traffic=require_traffic(traffic))
        [total] = await self._counting.hits([hit])
        return total

    async def hits(self, hits: Iterable[Hit | str]) -> list[Total]:
        """Count up to 1,000 hits, each a `Hit` or an id; their totals, in order.

        Those of one shard are counted together or not at all. Raises: as `hit`, and TooManyHits.
        """
        return await self._counting.hits(hits)

    async def totals(
        self, ids: Sequence[str], *, fields: Sequence[str] = ("total",)
    ) -> list[Total]:
        """Totals of up to 1,000 entities, in order; 0 for what was never hit.

        `fields` may add `today` (people's views since midnight), `unique` (viewers today) and `classes` (all totals);
        these lag as the series do, and are None in a stale answer while PostgreSQL is away. Raises: InvalidHit, TooManyIds,
        FieldUnknown, and PostgresDown where Valkey is away, too.
        """
        return await self._reading.totals(ids, fields)

    async def series(
        self,
        entity: str,
        by: str = "hour",
        *,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
    ) -> list[SeriesPoint]:
        """Views by `hour` (of UTC) or `day` (of the deployment's time zone), oldest first, those without any left out.

        Without a span: two days of hours; today and the 30 days before it. Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        return await self._owners.series(entity, by, from_at, to_at)

    async def viewers(
        self, entity: str, *, from_day: date | None = None, to_day: date | None = None
    ) -> list[DayViewers]:
        """Viewers by day of the deployment's time zone, from `from_day` until before `to_day`, oldest first.

        Without a span: today and the 30 days before it. Days without a viewer are left out. Each is an estimate (within 2 % for 95
        of 100), kept for `views.viewers_kept`. Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        return await self._reading.viewers(entity, from_day, to_day)

    async def top(
        self, window_s: float = 86_400.0, limit: int = 20, *, traffic: Traffic | str = Traffic.HUMAN
    ) -> list[TopEntry]:
        """The most viewed entities of the last `window_s`, most first. Raises: InvalidSpan, PostgresDown."""
        return await self._owners.top(window_s, limit, require_traffic(traffic, counts=False))

    async def delete(self, entity: str) -> Deleted:
        """Remove an entity's counts, and count nothing for it for 30 days, whatever races it.

        Raises: InvalidHit, PostgresDown, ValkeyDown (delete again: Valkey was not told).
        """
        return await self._owners.delete(entity)

    async def reclassify(
        self, entity: str, *, from_at: datetime, to_at: datetime, source: str, target: str
    ) -> int:
        """Enqueue the move of an entity's counted views of whole hours to another class; the job's id.

        Raises: InvalidHit, InvalidSpan, PostgresDown.
        """
        return await self._owners.reclassify(
            Reclassify(
                id=entity,
                from_at=from_at,
                to_at=to_at,
                source=require_traffic(source, counts=False),
                target=require_traffic(target, counts=False),
            )
        )

    async def verify(self) -> Verified:
        """Prove that every total is the sum of its hours, or say which is not. Raises: PostgresDown."""
        return await self._owners.verify()

    async def lag(self) -> list[ShardLag]:
        """How far the flush of each shard is. Raises: PostgresDown, ValkeyDown."""
        return await self._owners.lag()

    async def _move(self, wanted: Reclassify) -> None:
        await self._owners.move(wanted)
