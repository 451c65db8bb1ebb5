"""Seeds of views and the feed: promises hold, seeds replay."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest
import structlog
from verification.simulation.__main__ import scenario_of
from verification.simulation.planted import simulate
from verification.simulation.postgres import PostgresModel
from verification.simulation.run import run_seed
from verification.simulation.valkey import ValkeyModel
from verification.simulation.views import engines_for
from verification.simulation.views_sql import ViewsTables
from verification.simulation.world import World

from headrace.engines.multiplex import ValkeyLost
from headrace.engines.valkey import ValkeyDown
from headrace.views.errors import NotCounting
from headrace.views.model import Reclassify, Traffic
from headrace.views.service import Views
from headrace.views.settings import ViewsConfig
from headrace.views.worker import Flusher

HOURS = 0.03
SEEDS = [
    ("views", 3, HOURS),
    ("views", 4, HOURS),
    ("views", 291137, 0.1),
    ("feed", 1, HOURS),
    ("feed", 2, HOURS),
]
SOAK_SEEDS = 200


@pytest.fixture(autouse=True)
def _quiet():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


@pytest.mark.parametrize(("room", "seed", "hours"), SEEDS)
def test_a_seed_breaks_no_promise(room, seed, hours):
    outcome = run_seed(scenario_of(room), seed, hours=hours)
    assert not outcome.findings
    assert outcome.faults


@pytest.mark.parametrize("room", ["views", "feed"])
def test_a_seed_replays_in_another_process(room):
    outcomes = {_digest_in_process(room) for _ in range(2)}
    assert len(outcomes) == 1


def _digest_in_process(room):
    ended = simulate(room, "--seed", "5", "--hours", "0.01")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.partition("digest ")[2].split(":")[0]


class Engines:
    """A world with both engines, for processes of views with `config`."""

    def __init__(self, config, **valkey):
        self.world = World(1)
        self.valkey, self.postgres = ValkeyModel(self.world, **valkey), PostgresModel(self.world)
        self.tables = ViewsTables(self.postgres)
        self.config = config

    def views(self):
        """The service, for the current process."""
        return Views(engines_for(self.postgres, self.valkey), None, self.config)

    def start_flusher(self, name="flusher"):
        """Start a flusher."""
        self.world.start(name, self._flush)

    async def _flush(self):
        engines = engines_for(self.postgres, self.valkey)
        await Flusher(engines, self.config, name="flusher").run(asyncio.Event())

    def cut_from_valkey(self, name):
        """Cut a process off from Valkey."""
        self.world.network.cut(name, self.valkey.name)
        self.world.network.cut(self.valkey.name, name)

    def to_bots(self, entity):
        """A move of an entity's views of this hour."""
        at = self.postgres.now().replace(minute=0, second=0, microsecond=0)
        return Reclassify(
            id=entity,
            from_at=at,
            to_at=at + timedelta(hours=1),
            source=Traffic.HUMAN,
            target=Traffic.BOT,
        )

    def run(self, **processes):
        """Run processes for five minutes."""

        async def scenario():
            for name, main in processes.items():
                self.world.start(name, main)
            await asyncio.sleep(300.0)

        self.world.run(scenario, hours_max=1)
        assert not self.world.errors


def test_a_durable_hit_that_was_counted_is_lost_and_not_refused():
    """Views seed 1002: the caller would have sent it again, and it would have counted twice."""
    config = ViewsConfig(shards=1, durability="durable", durable_replicas=1)
    engines, seen = Engines(config, replicas=1), []
    valkey = engines.valkey

    async def api():
        views = engines.views()
        await views.hit("ad:1")
        valkey.replica_lag_s = 60.0
        engines.world.loop.call_later(0.5, lambda: valkey.restart(end=valkey.units_end, down_s=1.0))
        try:
            await views.hit("ad:1")
        except ValkeyDown as error:
            seen.append(type(error))

    engines.run(api=api)
    assert seen == [ValkeyLost]


@pytest.mark.parametrize("correction", ["move", "deletion"])
def test_a_correction_that_valkey_lost_is_repeated(correction):
    """Views seed 2002: a power cut lost a move, and the total of before stayed cached."""
    engines, seen = Engines(ViewsConfig(shards=1)), []
    valkey = engines.valkey

    async def api():
        views = engines.views()
        await views.hits(["ad:1"] * 3)
        await asyncio.sleep(10.0)
        end = valkey.units_end
        if correction == "move":
            await views.corrections.move(engines.to_bots("ad:1"))
        else:
            await views.delete("ad:1")
        valkey.restart(end=end, down_s=1.0)
        await asyncio.sleep(30.0)
        seen.extend(await views.totals(["ad:1"]))

    engines.start_flusher()
    engines.run(api=api)
    assert [total.total for total in seen] == [0]


@pytest.mark.parametrize("correction", ["move", "deletion"])
def test_a_correction_that_valkey_never_received_is_repeated(correction):
    """The process died after its commit, and the next correction reached Valkey."""
    engines, seen = Engines(ViewsConfig(shards=1)), []

    async def dies():
        views = engines.views()
        await views.hit("ad:3")
        await asyncio.sleep(10.0)
        engines.cut_from_valkey("dies")
        if correction == "move":
            await views.corrections.move(engines.to_bots("ad:1"))
        else:
            await views.delete("ad:1")

    async def api():
        views = engines.views()
        await views.hits(["ad:1", "ad:2"])
        await asyncio.sleep(10.5)
        engines.world.kill("dies", restarts=False)
        await views.corrections.move(engines.to_bots("ad:2"))
        await asyncio.sleep(30.0)
        seen.extend(await views.totals(["ad:1", "ad:2", "ad:3"]))

    engines.start_flusher()
    engines.run(api=api, dies=dies)
    assert [total.total for total in seen] == [0, 0, 1]


@pytest.mark.parametrize("correction", ["move", "deletion"])
def test_a_correction_that_postgres_lost_is_undone_behind_a_later_one(correction):
    """The later one had its number, so a flusher that renewed afterwards noticed nothing."""
    engines, seen = Engines(ViewsConfig(shards=1)), []

    async def api():
        views = engines.views()
        await views.hits(["ad:1"] * 3 + ["ad:2"])
        await asyncio.sleep(10.0)
        engines.world.kill("flusher", restarts=False)
        if correction == "move":
            await views.corrections.move(engines.to_bots("ad:1"))
        else:
            await views.delete("ad:1")
        await views.hit("ad:1")
        engines.postgres.crash(down_s=0.1, lost_commits=1)
        await asyncio.sleep(1.0)
        await views.corrections.move(engines.to_bots("ad:2"))
        engines.start_flusher("next")
        await asyncio.sleep(60.0)
        seen.extend(await views.totals(["ad:1", "ad:2"]))

    engines.start_flusher()
    engines.run(api=api)
    assert [total.total for total in seen] == [4, 0]


def test_a_move_that_reaches_valkey_late_lowers_no_other_total():
    """Views seed 1: a flusher took it for a lost one, and dropped totals with pending hits."""
    engines, seen = Engines(ViewsConfig(shards=1)), []

    async def mover():
        views = engines.views()
        await views.hit("moved:0")
        await asyncio.sleep(50.0)
        engines.cut_from_valkey("mover")
        while True:
            with suppress(ValkeyDown):
                await views.corrections.move(engines.to_bots("moved:0"))

    async def reader():
        views = engines.views()
        await views.hit("ad:1")
        for _ in range(200):
            [counted] = await views.hits(["ad:1"])
            await asyncio.sleep(1.0)
            [read] = await views.totals(["ad:1"])
            seen.append((counted.total, read.total))

    engines.start_flusher()
    engines.run(mover=mover, reader=reader)
    assert seen == [(total, total) for total in range(2, 202)]


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_step_of_valkeys_clock_lowers_no_total(step_s):
    """Views seed 221: every total seemed unused, and was swept with its pending hits."""
    engines, seen = Engines(ViewsConfig(shards=1, cache_for_s=600.0)), []

    async def reader():
        views = engines.views()
        await views.hit("ad:1")
        for _ in range(10):
            await asyncio.sleep(10.0)
            [counted] = await views.hits(["ad:1"])
            engines.world.step_clock(engines.valkey.name, step_s)
            await asyncio.sleep(1.8)
            [read] = await views.totals(["ad:1"])
            seen.append((counted.total, read.total))

    engines.start_flusher()
    engines.run(reader=reader)
    assert seen == [(total, total) for total in range(2, 12)]


def test_hits_after_a_loss_with_a_clock_that_is_behind_are_counted_or_refused():
    """Views seed 291137: ids followed the old end of the stream, below the flush offset."""
    engines, seen = Engines(ViewsConfig(shards=1)), []
    valkey, postgres = engines.valkey, engines.postgres

    async def api():
        views = engines.views()
        await views.hit("ad:1")
        engines.world.step_clock(valkey.name, -3600.0)
        end = valkey.units_end
        for _ in range(9):
            await views.hit("ad:1")
        await asyncio.sleep(20.0)
        engines.world.kill("flusher", restarts=False)
        postgres.crash(down_s=10.0)
        valkey.restart(end=end, down_s=1.0)
        await asyncio.sleep(5.0)
        with suppress(NotCounting):
            await views.hit("ad:1")
            seen.append("counted")
        await asyncio.sleep(10.0)
        for _ in range(4):
            await views.hit("ad:1")
        engines.start_flusher("next")
        await asyncio.sleep(30.0)
        [total] = await views.totals(["ad:1"])
        seen.append(total.total)

    engines.start_flusher()
    engines.run(api=api)
    assert seen == [14]
    assert dict(engines.tables.totals.items()) == {("ad:1", 0): 14}


def test_shards_of_a_dead_flusher_are_taken_over_after_the_clock_was_set_back():
    """Views seed 40: PostgreSQL's clock had to reach the end of the dead flusher's lease."""
    engines, seen = Engines(ViewsConfig(shards=2)), []

    async def api():
        views = engines.views()
        await asyncio.sleep(10.0)
        engines.world.kill("flusher", restarts=False)
        engines.world.step_clock(engines.postgres.name, -3600.0)
        engines.start_flusher("other")
        await views.hits(["ad:1", "ad:2"])
        await asyncio.sleep(30.0)
        seen.extend(dict(engines.tables.totals.items()))

    engines.start_flusher()
    engines.run(api=api)
    assert sorted(seen) == [("ad:1", 0), ("ad:2", 0)]


@pytest.mark.soak
@pytest.mark.parametrize("room", ["views", "feed"])
def test_many_seeds_break_no_promise(room):
    for seed in range(1000, 1000 + SOAK_SEEDS):
        outcome = run_seed(scenario_of(room), seed, hours=0.1)
        assert not outcome.findings, f"python -m verification.simulation {room} --seed {seed}"
