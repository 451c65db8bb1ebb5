"""Seeds of views and the feed: promises hold, seeds replay."""

from __future__ import annotations

import asyncio
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
from headrace.views.model import Reclassify, Traffic
from headrace.views.service import Views
from headrace.views.settings import ViewsConfig
from headrace.views.worker import Flusher

SEEDS = [("views", 3), ("views", 4), ("feed", 1), ("feed", 2)]
HOURS = 0.03
SOAK_SEEDS = 200


@pytest.fixture(autouse=True)
def _quiet():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


@pytest.mark.parametrize(("room", "seed"), SEEDS)
def test_a_seed_breaks_no_promise(room, seed):
    outcome = run_seed(scenario_of(room), seed, hours=HOURS)
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


def test_a_durable_hit_that_was_counted_is_lost_and_not_refused():
    """Views seed 1002: the caller would have sent it again, and it would have counted twice."""
    world = World(1)
    valkey = ValkeyModel(world, replicas=1)
    postgres = PostgresModel(world)
    ViewsTables(postgres)
    config = ViewsConfig(shards=1, durability="durable", durable_replicas=1)
    seen = []

    async def api():
        views = Views(engines_for(postgres, valkey), None, config)
        await views.hit("ad:1")
        valkey.replica_lag_s = 60.0
        try:
            await views.hit("ad:1")
        except ValkeyDown as error:
            seen.append(type(error))

    async def scenario():
        world.start("api", api)
        await asyncio.sleep(0.5)
        valkey.restart(end=valkey.units_end, down_s=1.0)
        await asyncio.sleep(5.0)

    world.run(scenario, hours_max=1)
    assert seen == [ValkeyLost]


def test_a_move_between_classes_that_valkey_lost_is_repeated():
    """Views seed 2002: a power cut lost the move, and the total of before stayed cached."""
    world = World(1)
    valkey, postgres = ValkeyModel(world), PostgresModel(world)
    ViewsTables(postgres)
    config = ViewsConfig(shards=1)
    seen = []

    async def flusher():
        engines = engines_for(postgres, valkey)
        await Flusher(engines, config, name="flusher").run(asyncio.Event())

    async def api():
        views = Views(engines_for(postgres, valkey), None, config)
        await views.hits(["ad:1"] * 3)
        await asyncio.sleep(10.0)
        at = postgres.now().replace(minute=0, second=0, microsecond=0)
        move = Reclassify(
            id="ad:1",
            from_at=at,
            to_at=at + timedelta(hours=1),
            source=Traffic.HUMAN,
            target=Traffic.BOT,
        )
        end = valkey.units_end
        await views.corrections.move(move)
        valkey.restart(end=end, down_s=1.0)
        await asyncio.sleep(30.0)
        seen.extend(await views.totals(["ad:1"]))

    async def scenario():
        world.start("flusher", flusher)
        world.start("api", api)
        await asyncio.sleep(60.0)

    world.run(scenario, hours_max=1)
    assert [total.total for total in seen] == [0]


@pytest.mark.soak
@pytest.mark.parametrize("room", ["views", "feed"])
def test_many_seeds_break_no_promise(room):
    for seed in range(1000, 1000 + SOAK_SEEDS):
        outcome = run_seed(scenario_of(room), seed, hours=0.1)
        assert not outcome.findings, f"python -m verification.simulation {room} --seed {seed}"
