"""The scenario `views`: processes that count hits, flushers, and readers, on modelled engines.

Promises: an acknowledged hit is counted once, one without an answer at most once, one with an event
id once however often it is sent. Totals equal the sum of their hours and what Valkey caches. Reads
do not go down. Without faults everything is flushed within LAG_S. A fault that destroys data of
Valkey loses what was not flushed, and nothing else.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from tests.kit.checkers import Finding

from headrace.engines import Engines
from headrace.engines.multiplex import Multiplexer, ValkeyLost, ValkeyRefused
from headrace.engines.valkey import ValkeyConfig
from headrace.kernel.errors import Unavailable
from headrace.views.errors import NotDurable
from headrace.views.model import NUMBER, Hit, Reclassify, Traffic, id_key, parse_line, shard_of
from headrace.views.service import Views
from headrace.views.settings import ViewsConfig
from headrace.views.worker import Flusher
from verification.simulation.faults import FaultKind, process_kinds, stall_kinds
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.run import SETTLE_MAX_S
from verification.simulation.valkey import SimulatedValkey, ValkeyModel
from verification.simulation.valkey_faults import (
    Disturbance,
    link_kind,
    postgres_kinds,
    valkey_kinds,
)
from verification.simulation.valkey_values import Stream, id_text
from verification.simulation.views_ledger import Kind, Ledger
from verification.simulation.views_sql import ViewsTables
from verification.simulation.world import World

SHARDS: Final = 2
APIS: Final = ("api-0", "api-1", "api-2")
FLUSHERS: Final = ("flusher-0", "flusher-1")
ENTITIES: Final = tuple(f"ad:{n}" for n in range(8))
MOVED: Final = ("moved:0", "moved:1")
"""Entities whose views are moved between classes."""
CLIENTS_PER_PROCESS: Final = 2
LAG_S: Final = 60.0
LOOK_EVERY_S: Final = 10.0
EVENT_TRIES: Final = 60
LOSS_FELT_S: Final = 900.0
FAULT_MAX_S: Final = 30.0


def engines_for(postgres: PostgresModel, valkey: ValkeyModel) -> Engines:
    """Handles of the current process for the models."""
    parts: Any = (
        SimulatedPostgres(postgres),
        SimulatedValkey(valkey),
        Multiplexer(valkey.url, ValkeyConfig()),
        None,
    )
    return Engines(*parts)


class ViewsScenario:
    """See the module."""

    gap_s = 25.0
    settle_max_s = SETTLE_MAX_S

    def __init__(self, world: World) -> None:
        self.world = world
        chance = world.stream("views")
        self.ledger = Ledger()
        self.postgres = PostgresModel(world)
        self.tables = ViewsTables(self.postgres)
        replicas, policy = chance.choice([0, 1]), chance.choice(["everysec", "always"])
        self.valkey = ValkeyModel(world, policy=policy, replicas=replicas)
        self.is_durable = bool(replicas or policy == "always") and chance.random() < 0.5
        self.config = ViewsConfig(
            shards=SHARDS,
            flush_every_s=chance.choice([0.5, 2.0, 5.0, 20.0]),
            cache_for_s=chance.choice([60.0, 600.0, 172_800.0]),
            durability="durable" if self.is_durable else "fast",
            durable_replicas=replicas,
        )
        self.disturbance = Disturbance()
        self._gap_s = chance.choice([1.0, 3.0, 10.0])
        """Mean time between two calls of a client."""
        self._potential: Counter[Kind] = Counter()
        self._lost_s = float("-inf")
        self._deleted: dict[str, bool] = {}
        """Deleted entities, and whether the deletion was acknowledged."""
        self._starts: Counter[str] = Counter()
        self._numbers = iter(range(10**9))
        self._is_working = True
        self._ends: deque[dict[int, tuple[int, int]]] = deque(maxlen=int(LAG_S / LOOK_EVERY_S))
        self.valkey.on_loss.append(self._note_valkey_loss)

    def fault_kinds(self) -> Sequence[FaultKind]:
        """Faults of processes and both engines."""
        kinds = [
            *process_kinds([*APIS, *FLUSHERS], lasts_max_s=FAULT_MAX_S),
            link_kind([*APIS, *FLUSHERS], self.valkey, lasts_max_s=FAULT_MAX_S),
            *(self._measured(kind) for kind in valkey_kinds(self.valkey, lasts_max_s=FAULT_MAX_S)),
            *(
                self._measured(kind)
                for kind in postgres_kinds(
                    self.postgres, lasts_max_s=FAULT_MAX_S, on_failover=self._note_failover
                )
            ),
            *self._stalls(),
        ]
        return [self.disturbance.noting(kind) for kind in kinds]

    def _stalls(self) -> Sequence[FaultKind]:
        return ()

    async def begin(self) -> None:
        """Start the processes."""
        for name in APIS:
            self.world.start(name, self._api)
        for name in FLUSHERS:
            self.world.start(name, self._flusher)

    async def work(self, until_s: float) -> None:
        """Let clients call until the time, and look at the lag."""
        while self.world.now_s < until_s:
            await asyncio.sleep(LOOK_EVERY_S)
            self._check_lag()
        self._is_working = False

    async def is_settled(self) -> bool:
        """Whether everything is flushed."""
        pending = [self._pending(shard) for shard in range(SHARDS)]
        return self.disturbance.calm_s(self.world.now_s) > LAG_S and not any(pending)

    def findings(self) -> list[Finding]:
        """Broken promises."""
        stored = self._stored()
        moved = {kind for kind in stored if kind[0] in MOVED}
        plain = Counter({kind: n for kind, n in stored.items() if kind not in moved})
        for kind in moved:
            plain[kind[0], 0] += stored[kind]
        gone = Counter({kind: plain.pop(kind) for kind in list(plain) if kind[0][:4] == "gone"})
        return [
            *self.ledger.findings,
            *self.ledger.check(plain),
            *self._check_hours(stored),
            *self._check_cache(stored),
            *[
                Finding("deleted", kind, f"{count} views after the deletion")
                for kind, count in gone.items()
                if self._deleted.get(kind[0])
            ],
        ]

    # Processes

    def _stream(self, name: str) -> random.Random:
        self._starts[name] += 1
        return self.world.stream(f"{name}/{self._starts[name]}")

    async def _flusher(self) -> None:
        engines = engines_for(self.postgres, self.valkey)
        await Flusher(engines, self.config, name="flusher").run(asyncio.Event())

    async def _api(self) -> None:
        nothing: Any = None
        views = Views(engines_for(self.postgres, self.valkey), nothing, self.config)
        chance = self._stream("api")
        clients = [self._client(views, chance) for _ in range(CLIENTS_PER_PROCESS)]
        await asyncio.gather(*clients)

    async def _client(self, views: Views, chance: random.Random) -> None:
        actions = [
            (self._plain, 50),
            (self._marked, 20),
            (self._with_event, 15),
            (self._read, 30),
            (self._move, 4),
            (self._delete, 1),
        ]
        names, weights = [action for action, _ in actions], [weight for _, weight in actions]
        while self._is_working:
            await asyncio.sleep(chance.expovariate(1 / self._gap_s))
            [action] = chance.choices(names, weights)
            await action(views, chance)
        await asyncio.Event().wait()

    async def _plain(self, views: Views, chance: random.Random) -> None:
        await self._hit(views, chance.choices(ENTITIES, k=chance.choice([1, 1, 1, 2, 5])))

    async def _marked(self, views: Views, chance: random.Random) -> None:
        entity = chance.choice([*ENTITIES, *MOVED])
        traffic = chance.choice([Traffic.HUMAN, Traffic.HUMAN, Traffic.BOT])
        viewer = chance.choice([None, "u1", "u2"])
        hit = Hit(id=entity, n=chance.choice([1, 2, 7]), viewer=viewer, traffic=traffic)
        await self._hit(views, [hit])

    async def _hit(self, views: Views, hits: list[Any]) -> None:
        call = self.ledger.begin(_views_of(hits))
        floors = self.ledger.floors()
        try:
            totals = await views.hits(hits)
        except Unavailable as error:
            is_one = len({shard_of(_id_of(hit), SHARDS) for hit in hits}) == 1
            is_unknown = not is_one or isinstance(error, ValkeyLost | ValkeyRefused | NotDurable)
            self.world.trace("hit", call.views, type(error).__name__)
            self.ledger.end(call, is_counted=None if is_unknown else False)
        else:
            self.ledger.end(call, is_counted=True)
            self._note_reads(totals, floors)

    async def _with_event(self, views: Views, chance: random.Random) -> None:
        entity, number = chance.choice(ENTITIES), next(self._numbers)
        hit = Hit(id=entity, n=chance.choice([1, 3]), event=f"e{number}")
        call = self.ledger.begin(_views_of([hit]), has_event=True)
        for _ in range(EVENT_TRIES):
            floors = self.ledger.floors()
            try:
                totals = await views.hits([hit])
            except Unavailable:
                await asyncio.sleep(chance.uniform(0.1, 5.0))
                continue
            self.ledger.end(call, is_counted=True)
            self._note_reads(totals, floors)
            if chance.random() < 0.3:
                await self._repeat(views, hit)
            return
        self.ledger.end(call, is_counted=None)

    async def _repeat(self, views: Views, hit: Hit) -> None:
        """Send an acknowledged event again: it must not count, unless Valkey loses the event."""
        call = self.ledger.begin(Counter(), has_event=True)
        lost_s = self._lost_s
        with suppress(Unavailable):
            await views.hits([hit])
        self.ledger.end(call, is_counted=True)
        if self._lost_s != lost_s:
            self.ledger.end(self.ledger.begin(_views_of([hit])), is_counted=None)

    async def _read(self, views: Views, chance: random.Random) -> None:
        floors = self.ledger.floors()
        try:
            totals = await views.totals(chance.sample(ENTITIES, 4))
        except Unavailable:
            return
        self._note_reads(totals, floors)

    def _note_reads(self, totals: Sequence[Any], floors: dict[str, int]) -> None:
        for total in totals:
            self.world.trace("total", total.id, total.total, total.stale)
            if not total.stale and total.total is not None and total.id not in MOVED:
                self.ledger.note_read(total.id, total.total, floors, now_s=self.world.now_s)

    async def _move(self, views: Views, chance: random.Random) -> None:
        hour_at = self.postgres.now().replace(minute=0, second=0, microsecond=0)
        source, target = chance.sample([Traffic.HUMAN, Traffic.BOT], 2)
        request = Reclassify(
            id=chance.choice(MOVED),
            from_at=hour_at - timedelta(hours=3),
            to_at=hour_at + timedelta(hours=1),
            source=source,
            target=target,
        )
        # The job repeats it until it succeeds.
        for _ in range(EVENT_TRIES):
            try:
                await views.corrections.move(request)
            except Unavailable:
                await asyncio.sleep(chance.uniform(0.5, 5.0))
            else:
                return

    async def _delete(self, views: Views, chance: random.Random) -> None:
        entity = f"gone:{next(self._numbers)}"
        self._deleted[entity] = False
        try:
            await views.hits([entity] * 3)
            await views.delete(entity)
            self._deleted[entity] = True
            await views.hits([entity])
            [total] = await views.totals([entity])
        except Unavailable:
            return
        if total.total:
            text = f"a read returned {total.total} after the deletion"
            self.ledger.findings.append(Finding("deleted", entity, text))

    # Losses

    def _measured(self, kind: FaultKind) -> FaultKind:
        """The same kind, which records what the engines have before it."""

        def act(world: World, fault: Any) -> Any:
            self._potential = self._all_views()
            return kind.act(world, fault)

        return FaultKind(kind.name, act, kind.targets, kind.lasts_max_s, kind.weight)

    def _note_valkey_loss(self) -> None:
        """Valkey lost writes. What was confirmed to be durable is still there."""
        self._lost_s = self.world.now_s
        self.ledger.note_loss(self._potential, self._all_views(), now_s=self.world.now_s)

    def _note_failover(self) -> None:
        """PostgreSQL lost commits, whose hits Valkey still has unless it lost them before."""
        after = self._all_views()
        if self.world.now_s - self._lost_s > LOSS_FELT_S:
            self._potential = after
        self._deleted = dict.fromkeys(self._deleted, False)
        self.ledger.note_loss(self._potential, after, now_s=self.world.now_s)

    # State

    def _stored(self) -> Counter[Kind]:
        return Counter(dict(self.tables.totals.items()))

    def _all_views(self) -> Counter[Kind]:
        """Counted views and those that a flush would count."""
        found = self._stored()
        for shard in range(SHARDS):
            for line in self._pending(shard):
                for text in filter(None, line.split(",")):
                    parsed = parse_line(text)
                    if parsed is not None:
                        found[parsed[0], parsed[1]] += parsed[2]
        for kind in [kind for kind in found if kind[0] in MOVED and kind[1]]:
            found[kind[0], 0] += found.pop(kind)
        return found

    def _pending(self, shard: int) -> list[str]:
        stream = self._stream_of(shard)
        through = id_key(self.tables.through_of(shard))
        pairs = zip(stream.ids, stream.lines, strict=True) if stream else ()
        return [line[1].decode() for entry, line in pairs if entry > through and line[1]]

    def _stream_of(self, shard: int) -> Stream | None:
        key = f"{self.valkey_prefix}:{{v:{shard}}}:q".encode()
        return self.valkey.data.find(key, Stream)  # type: ignore[no-any-return]

    @property
    def valkey_prefix(self) -> str:
        """The prefix of all keys."""
        return "headrace"

    # Checks

    def _check_lag(self) -> None:
        """Entries of LAG_S ago are flushed if there was no fault meanwhile."""
        self._ends.append(
            {shard: stream.last for shard in range(SHARDS) if (stream := self._stream_of(shard))}
        )
        calm_s = self.disturbance.calm_s(self.world.now_s)
        if calm_s <= LAG_S + LOOK_EVERY_S or len(self._ends) < (self._ends.maxlen or 0):
            return
        for shard, end in self._ends[0].items():
            through = self.tables.through_of(shard)
            stream = self._stream_of(shard)
            if id_key(through) < end and stream and stream.ids and stream.ids[-1] >= end:
                text = f"{id_text(end).decode()} is not flushed after {LAG_S:.0f} s: {through}"
                self.ledger.findings.append(Finding("lag", shard, text))

    def _check_hours(self, stored: Counter[Kind]) -> list[Finding]:
        hours: Counter[Kind] = Counter()
        for (entity, _, kind), count in self.tables.hours.items():
            hours[entity, kind] += count
        return [
            Finding("hours", kind, f"the total is {stored[kind]}, its hours have {hours[kind]}")
            for kind in stored.keys() | hours.keys()
            if stored[kind] != hours[kind]
        ]

    def _check_cache(self, stored: Counter[Kind]) -> list[Finding]:
        found = []
        for key, value in self.valkey.data.keys.items():
            name = key.decode().partition("}:c:")[2]
            if name and value != b"x" and int(value) - 1 != stored[name, 0]:
                text = f"Valkey caches {int(value) - 1}, PostgreSQL has {stored[name, 0]}"
                found.append(Finding("cache", name, text))
        return found


class StallingViewsScenario(ViewsScenario):
    """With flushers that pause between two statements, for longer than a lease."""

    def _stalls(self) -> Sequence[FaultKind]:
        return stall_kinds(self.postgres, (), FLUSHERS, lasts_max_s=2 * FAULT_MAX_S)


def _id_of(hit: Hit | str) -> str:
    return hit if isinstance(hit, str) else hit.id


def _views_of(hits: Sequence[Hit | str]) -> Counter[Kind]:
    """Views by entity and class; moved entities have one class."""
    found: Counter[Kind] = Counter()
    for hit in hits:
        if isinstance(hit, str):
            found[hit, 0] += 1
        else:
            found[hit.id, 0 if hit.id in MOVED else NUMBER[hit.traffic]] += hit.n
    return found
