"""The simulation itself: seeds replay, deaths run no cleanup, rows are isolated, plans shrink."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest
from tests.kit.checkers import Finding, counted_twice
from verification.simulation.faults import FaultKind, process_kinds
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.run import SETTLE_MAX_S, run_seed, shrink
from verification.simulation.world import World

from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query

ADD = compile_query("add", "-- Add an effect.\nINSERT INTO effect VALUES (:key)")
ADD_ONCE = compile_query("add_once", "-- Add an effect once.\nINSERT INTO effect VALUES (:key)")
READ = compile_query("read", "-- All effects.\nSELECT key FROM effect")


class Effects:
    """Clients add numbered effects and repeat a call whose reply was lost."""

    gap_s = 120.0
    settle_max_s = SETTLE_MAX_S
    query = ADD_ONCE

    def __init__(self, world):
        self.world = world
        self.model = model = PostgresModel(world)
        self.effects = model.table()
        self.acknowledged = []

        @model.on(ADD)
        def add(key):
            self.effects.put(model.next_id("effect"), key)
            return 1

        @model.on(ADD_ONCE)
        def add_once(key):
            self.effects.put(key, key)
            return 1

        @model.on(READ)
        def read():
            return [{"key": key} for key in self.effects.values()]

    def fault_kinds(self):
        crash = FaultKind("crash", lambda *_: self.model.crash(down_s=1.0), ["postgres"])
        return [*process_kinds(["client-0", "client-1"], lasts_max_s=30.0), crash]

    async def begin(self):
        self.numbers = iter(range(10**9))
        for name in ("client-0", "client-1"):
            self.world.start(name, self.client)

    async def client(self):
        postgres = SimulatedPostgres(self.model)
        while True:
            key = next(self.numbers)
            for _ in range(20):
                try:
                    await postgres.run(self.query, key=key)
                    self.acknowledged.append(key)
                    self.world.recorder.note("ok", "add", key=key)
                    break
                except PostgresDown:
                    await asyncio.sleep(1)
            await asyncio.sleep(1)

    async def work(self, until_s):
        await asyncio.sleep(until_s)

    async def is_settled(self):
        return True

    def findings(self):
        stored = list(self.effects.values())
        lost = [Finding("lost", key, "no row") for key in set(self.acknowledged) - set(stored)]
        return [*lost, *counted_twice("effect", stored)]


class RepeatedEffects(Effects):
    """The planted bug: a repeated call has a second effect."""

    query = ADD


def test_a_seed_replays_and_another_seed_differs():
    first, again, other = (run_seed(Effects, seed, hours=1.0) for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest
    assert first.steps == again.steps
    assert len(first.faults) > 10
    assert not first.findings
    assert not other.findings


def test_a_planted_bug_is_found_and_its_plan_shrinks_to_the_fault_that_matters():
    failed = next(
        outcome
        for seed in range(20)
        if (outcome := run_seed(RepeatedEffects, seed, hours=0.5)).findings
    )
    small = shrink(RepeatedEffects, failed, hours=0.5)
    assert {finding.fault for finding in small.findings} == {"doubled"}
    assert [fault.name for fault in small.faults] in (
        [[name] for name in ("crash", "cut", "cut_replies", "lossy", "pause")]
    )


def test_a_killed_process_runs_no_cleanup_and_is_started_again():
    world = World(1)
    seen = []

    async def main():
        seen.append("begin")
        try:
            await asyncio.sleep(100)
        finally:
            seen.append("cleanup")

    async def scenario():
        world.start("one", main)
        await asyncio.sleep(1)
        world.kill("one")
        await asyncio.sleep(10)

    world.run(scenario, hours_max=1)
    assert seen == ["begin", "begin"]


def test_a_paused_process_continues_where_it_was_and_clocks_step_alone():
    world = World(1)
    seen = []

    async def main():
        while True:
            await asyncio.sleep(1)
            seen.append((world.now_s, time.time()))

    async def scenario():
        world.start("one", main)
        await asyncio.sleep(2.5)
        resume = world.pause("one")
        await asyncio.sleep(10)
        assert len(seen) == 2
        resume()
        world.step_clock("one", -60)
        await asyncio.sleep(0.1)

    world.run(scenario, hours_max=1)
    (_, before), (at_s, after) = seen[1:3]
    assert at_s == 12.5
    assert after - before == pytest.approx(10.5 - 60)


def test_transactions_are_isolated_and_roll_back():
    world = World(1)
    model = PostgresModel(world)
    rows = model.table()
    put = model.on(ADD)(lambda key: rows.put("row", key))
    assert put is not None
    model.on(READ)(lambda: [{"key": rows.get("row")}])
    seen = []

    async def scenario():
        postgres = SimulatedPostgres(model)
        await postgres.run(ADD, key="old")
        with suppress(KeyError):
            async with postgres.transaction() as tx:
                await tx.run(ADD, key="new")
                seen.append((await tx.value(READ), await postgres.value(READ)))
                writer = asyncio.create_task(postgres.run(ADD, key="other"))
                await asyncio.sleep(1)
                assert not writer.done()
                raise KeyError
        await writer
        seen.append(await postgres.value(READ))

    world.run(scenario, hours_max=1)
    assert seen == [("new", "old"), "other"]


def test_a_crash_keeps_commits_and_a_late_standby_loses_the_newest():
    world = World(1)
    model = PostgresModel(world)
    rows = model.table()
    model.on(ADD)(lambda key: rows.put(key, key))
    model.on(READ)(lambda: [{"key": [*rows.values()]}])
    seen = []

    async def scenario():
        postgres = SimulatedPostgres(model)
        for lost in (0, 2):
            for key in "abc":
                await postgres.run(ADD, key=f"{key}{lost}")
            model.crash(down_s=1.0, lost_commits=lost)
            with pytest.raises(PostgresDown):
                await postgres.run(ADD, key="never")
            await asyncio.sleep(2)
            seen.append(await postgres.value(READ))

    world.run(scenario, hours_max=1)
    assert seen == [["a0", "b0", "c0"], ["a0", "b0", "c0", "a2"]]
