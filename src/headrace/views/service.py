"""The public verbs of views: `await app.views.hit("ad:1")`, `await app.views.totals(["ad:1"])`.

Totals are read from Valkey in one command, and the missing ones from PostgreSQL in one statement. A
read does not write the cache, so items that are only read do not displace those that are hit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from headrace.engines import Engines
from headrace.engines.multiplex import ValkeyPartlyDown
from headrace.engines.valkey import ValkeyDown
from headrace.jobs import Jobs, Registry
from headrace.kernel.errors import Unavailable
from headrace.views import store
from headrace.views.analytics import ANSWER_S, Analytics, Corrections
from headrace.views.bots import Bots
from headrace.views.counting import CacheFiller, HitBatcher, Shards
from headrace.views.durability_wait import DurabilityWait
from headrace.views.errors import InvalidHit, TooManyIds
from headrace.views.exports import Exports
from headrace.views.model import (
    FIELDS,
    IDS_PER_READ_MAX,
    Hit,
    Total,
    Traffic,
    require_counters,
    require_ids,
    require_traffic,
    shard_of,
)
from headrace.views.settings import ViewsConfig, totals_read, totals_unavailable
from headrace.views.valkey_store import CircuitBreaker, ValkeyStore

KEYS_CACHED_MAX: Final = 100_000
"""Cached keys of items, about 25 MB; then the cache is cleared."""


_FROM_VALKEY: Final = totals_read.labels(source="valkey")
_FROM_POSTGRES: Final = totals_read.labels(source="postgres")


class Views:
    """Count views and read totals; `app.views`.

    `analytics` has series, viewers, top lists, `verify` and `lag`. `exports` has series of all
    items and changes. `corrections` has `reclassify` and `delete`.
    """

    def __init__(self, engines: Engines, jobs: Jobs, config: ViewsConfig) -> None:
        self.config = config
        postgres, zone = engines.postgres, config.time_zone
        valkey, breaker = ValkeyStore(engines.valkey, engines.multiplexer), CircuitBreaker()
        shards = Shards(postgres, valkey, config.shards, breaker)
        durability = None
        if config.durability == "durable":
            durability = DurabilityWait(
                engines.valkey,
                replicas=config.durable_replicas,
                timeout_s=config.durable_timeout_s,
            )
        filler = CacheFiller(postgres, valkey, shards, breaker)
        batcher = HitBatcher(
            valkey,
            shards,
            filler,
            time_zone=zone,
            counters=config.counters,
            durability=durability,
        )
        self.analytics = Analytics(postgres, valkey, shards, breaker, time_zone=zone)
        self.bots = Bots(config.bots)
        self.exports = Exports(postgres, shards=config.shards, time_zone=zone)
        self.corrections = Corrections(postgres, valkey, shards, jobs)
        self.hits = batcher.hits
        self.delete = self.corrections.delete
        self._postgres, self._valkey = postgres, valkey
        self._breaker, self._shards = breaker, shards
        self._zone = ZoneInfo(zone)
        self._keys: dict[str, str] = {}

    def register(self, registry: Registry) -> None:
        """Add the tasks of views; required in every process that enqueues or works."""
        self.corrections.register(registry)

    async def hit(
        self,
        entity: str,
        n: int = 1,
        *,
        viewer: str | None = None,
        event: str | None = None,
        traffic: Traffic | str = Traffic.HUMAN,
        counters: Sequence[str] = (),
    ) -> Total:
        """Count `n` views of an item, and one for each of `counters`. Return its new total.

        Once answered, the views are counted exactly once. After ValkeyLost their state is unknown;
        with an `event` id the call may be repeated for 24 hours. Raises: InvalidHit, ValkeyDown,
        NotCounting, NotDurable.
        """
        plain = n == 1 and viewer is None and event is None and traffic == Traffic.HUMAN
        hit: Hit | str = entity
        if not plain or counters:
            hit = Hit(
                id=entity,
                n=n,
                viewer=viewer,
                event=event,
                traffic=require_traffic(traffic),
                counters=require_counters(counters),
            )
        [total] = await self.hits([hit])
        return total

    async def totals(
        self, ids: Sequence[str], *, fields: Sequence[str] = ("total",)
    ) -> list[Total]:
        """Totals of up to 1,000 items, in order; 0 for an item without hits.

        `fields` may add `today` (human views since midnight), `unique` (viewers today), `classes`
        (totals of all classes) and `counters`. These lag behind like the series, and are None in a
        stale answer while PostgreSQL is down. Raises: InvalidHit, TooManyIds;
        PostgresDown if Valkey is down as well.
        """
        for field in fields:
            if field not in FIELDS:
                raise InvalidHit("field", field, f"some of {', '.join(FIELDS)}", counts=False)
        names = ids if isinstance(ids, list) else require_ids(ids)
        keys = self._keys_of(names)
        if not keys:
            return []
        if not self._shards.is_ready:
            await self._shards.ready_for_read()
        found = await self._totals(names, keys)
        extra = [field for field in fields if field != "total"]
        if not extra:
            return found
        try:
            return await self._breaker.call(
                lambda: self._with_fields(found, extra), wait_s=ANSWER_S
            )
        except Unavailable:
            totals_unavailable.labels(reason="postgres").inc(len(found))
            return [msgspec.structs.replace(total, stale=True) for total in found]

    def _keys_of(self, ids: Sequence[str]) -> list[str]:
        """Keys of cached totals. The first use of an id validates it and caches its key."""
        cached = self._keys
        try:
            keys = [cached[entity] for entity in ids]
        except (KeyError, TypeError):
            names, count = require_ids(ids), self._shards.count
            keys = self._valkey.total_keys(names, [shard_of(name, count) for name in names])
            if len(cached) > KEYS_CACHED_MAX:
                cached.clear()
            cached.update(zip(names, keys, strict=True))
        if len(keys) > IDS_PER_READ_MAX:
            raise TooManyIds(len(keys), IDS_PER_READ_MAX)
        return keys

    async def _totals(self, names: list[str], keys: list[str]) -> list[Total]:
        try:
            cached = await self._valkey.totals(keys)
        except ValkeyPartlyDown as error:
            totals_unavailable.labels(reason="valkey").inc(len(error.lost))
            return await self._with_missing(names, error.found, error.lost)
        except ValkeyDown:
            totals_unavailable.labels(reason="valkey").inc(len(names))
            stored = await self._stored(names)
            return [Total(id=name, total=stored.get(name, 0), stale=True) for name in names]
        missing = cached.count(None)
        _FROM_VALKEY.inc(len(cached) - missing)
        if not missing:
            return [Total(id=name, total=total) for name, total in zip(names, cached, strict=True)]
        return await self._with_missing(names, cached)

    async def _with_missing(
        self, names: list[str], cached: list[int | None], lost: Collection[int] = ()
    ) -> list[Total]:
        """Add PostgreSQL's totals of missing items; `lost`: positions to return as stale."""
        missing = [name for name, total in zip(names, cached, strict=True) if total is None]
        unknown = {names[place] for place in lost}
        # First, because PostgreSQL's totals are to contain what is flushed meanwhile.
        stale = unknown | await self._unflushed(set(missing) - unknown)
        stored: dict[str, int] | None = None
        try:
            stored = await self._stored(missing)
            _FROM_POSTGRES.inc(len(missing))
        except Unavailable:
            totals_unavailable.labels(reason="postgres").inc(len(missing))
        answer = []
        for name, total in zip(names, cached, strict=True):
            if total is not None:
                answer.append(Total(id=name, total=total))
            elif stored is not None:
                answer.append(Total(id=name, total=stored.get(name, 0), stale=name in stale))
            else:
                answer.append(Total(id=name, total=None, stale=True))
        return answer

    async def _unflushed(self, names: set[str]) -> set[str]:
        """The items without a cached total that may have hits which PostgreSQL lacks."""
        by_shard: dict[int, list[str]] = {}
        for name in names:
            by_shard.setdefault(shard_of(name, self._shards.count), []).append(name)
        calls = [self._valkey.unflushed(shard, part) for shard, part in by_shard.items()]
        try:
            parts = await asyncio.gather(*calls)
        except ValkeyDown:
            totals_unavailable.labels(reason="valkey").inc(len(names))
            return names
        found = set(chain.from_iterable(parts))
        totals_unavailable.labels(reason="behind").inc(len(found))
        return found

    async def _stored(self, names: list[str]) -> dict[str, int]:
        return await self._breaker.call(
            lambda: store.totals(self._postgres, names), wait_s=ANSWER_S
        )

    async def _with_fields(self, totals: list[Total], fields: Sequence[str]) -> list[Total]:
        """Add the requested fields to totals. Raises: PostgresDown."""
        names = list(dict.fromkeys(total.id for total in totals))
        added: dict[str, dict[str, object]] = {name: {} for name in names}

        def add(field: str, found: Mapping[str, object], otherwise: object) -> None:
            for name in names:
                added[name][field] = found.get(name, otherwise)

        if "today" in fields:
            midnight_at = self._midnight_at()
            add("today", await store.day_totals(self._postgres, names, since_at=midnight_at), 0)
        if "classes" in fields:
            add("classes", await store.class_totals(self._postgres, names), {})
        if "counters" in fields:
            add("counters", await store.counter_totals(self._postgres, names), {})
        if "unique" in fields:
            viewers, is_stale = await self.analytics.viewers_today(names)
            add("unique", viewers, 0)
            if is_stale:
                add("stale", {}, otherwise=True)
        return [msgspec.structs.replace(total, **added[total.id]) for total in totals]

    def _midnight_at(self) -> datetime:
        now_at = datetime.now(self._zone)
        return datetime.combine(now_at.date(), datetime.min.time(), self._zone).astimezone(UTC)
