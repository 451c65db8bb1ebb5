"""PostgreSQL is killed, stays away, comes back without its last commits.

Hits go on, each is counted once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from counted_views import CountedViews
from tests.kit.processes import wait_until

from headrace.app import PACKAGES
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.migrate import apply_migrations
from headrace.kernel.errors import Unavailable

HITTER = Path(__file__).with_name("hitting_process.py")


@asynccontextmanager
async def counted_on_own_engines(folder, *, durable=True):
    """Clients, and engines that can be killed."""
    engines = EmbeddedEngines(folder / "data", durable=durable)
    endpoints = await engines.start()
    counted = CountedViews(endpoints.postgres_url, endpoints.valkey_url, folder, lease_s=1.0)
    try:
        await apply_migrations(counted.engines.postgres, PACKAGES)
        yield counted, engines
    finally:
        await counted.close()
        await engines.stop()


@pytest.mark.slow
async def test_a_killed_postgres_loses_and_doubles_nothing(tmp_path):
    await _kill(tmp_path, kills=3)


@pytest.mark.soak
async def test_a_postgres_killed_many_times_loses_and_doubles_nothing(tmp_path):
    await _kill(tmp_path, kills=200)


async def _kill(tmp_path, *, kills):
    async with counted_on_own_engines(tmp_path) as (counted, engines):
        counted.start(flushers=2)
        for _ in range(kills):
            await counted.pass_more(100)
            os.kill(engines.postgres_pid, signal.SIGKILL)
            await counted.pass_more(50)
            await engines.restart("postgres")
        await counted.pass_more(100)
        await counted.finish()
        assert counted.asked == counted.acked, "no hit was refused"
        await counted.require_exact()


@pytest.mark.slow
async def test_commits_that_postgres_lost_are_made_again(tmp_path):
    await _lose_commits(tmp_path, times=4)


@pytest.mark.soak
async def test_commits_that_postgres_lost_many_times_are_made_again(tmp_path):
    await _lose_commits(tmp_path, times=60)


async def _lose_commits(tmp_path, *, times):
    """As after a failover to a standby that misses the last ones.

    Here they were only in its memory.
    """
    async with counted_on_own_engines(tmp_path, durable=False) as (counted, engines):
        postgres = counted.engines.postgres
        await counted.hit()
        await counted.settle()
        async with postgres.session() as session:
            for setting in ("synchronous_commit = off", "wal_writer_delay = '10s'"):
                await session.connection.execute(f"ALTER SYSTEM SET {setting}")
            await session.connection.execute("SELECT pg_reload_conf()")
            await session.connection.execute("CHECKPOINT")
        lost = 0
        counted.start(flushers=1)
        for _ in range(times):
            await counted.pass_more(200)
            before = await _offsets(counted)
            os.kill(engines.postgres_pid, signal.SIGKILL)
            await engines.restart("postgres")
            after = await _offsets(counted)
            lost += any(after.get(shard, "") < before[shard] for shard in before)
        await counted.pass_more(100)
        await counted.finish()
        assert lost, "no commit was lost: nothing was tested"
        await counted.require_exact()


async def _offsets(counted):
    """What PostgreSQL says of each shard; asked without others in between where it can be."""
    while True:
        try:
            return {lag.shard: lag.through for lag in await counted.views.analytics.lag()}
        except Unavailable:
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_while_postgres_is_away_hits_go_on_and_totals_stay_right(tmp_path):
    async with counted_on_own_engines(tmp_path) as (counted, engines):
        for _ in range(30):
            await counted.hit()
        await counted.settle()
        os.kill(engines.postgres_pid, signal.SIGKILL)
        counted.start(flushers=1)
        await counted.pass_more(300)
        assert (await counted.views.hit("new")).total is None
        [new] = await counted.views.totals(["new"])
        assert (new.total, new.stale) == (None, True)
        with pytest.raises(Unavailable):
            await counted.views.analytics.series("ad:1")
        # A process that starts now counts, too.
        assert (await counted.new_views().hit("new")).stale
        await engines.restart("postgres")
        await counted.pass_more(50)
        await counted.finish()
        assert counted.asked == counted.acked, "no hit was refused"
        counted.entities.append("new")
        counted.acked["new"] = counted.asked["new"] = 2
        await counted.settle()
        await counted.require_exact()


@pytest.mark.slow
async def test_both_engines_killed_come_back_with_every_hit(tmp_path):
    async with counted_on_own_engines(tmp_path) as (counted, engines):
        counted.start(flushers=1)
        for _ in range(2):
            await counted.pass_more(100)
            os.kill(engines.postgres_pid, signal.SIGKILL)
            os.kill(engines.valkey_pid, signal.SIGKILL)
            await engines.restart("valkey")
            await engines.restart("postgres")
        await counted.pass_more(100)
        await counted.finish()
        await counted.require_exact()


@pytest.mark.slow
async def test_what_killed_processes_were_told_is_counted(tmp_path):
    await _kill_hitters(tmp_path, kills=5)


@pytest.mark.soak
async def test_what_many_killed_processes_were_told_is_counted(tmp_path):
    await _kill_hitters(tmp_path, kills=200)


async def _kill_hitters(tmp_path, *, kills):
    """Each process writes down what it asked and what it was told, and is killed in the middle."""
    async with counted_on_own_engines(tmp_path) as (counted, _):
        urls = [*counted.urls, "headrace"]
        counted.start(hitters=0, readers=0, flushers=1)
        for number in range(kills):
            file = tmp_path / f"told-{number}"
            words = [sys.executable, str(HITTER), *urls, str(file), str(number)]
            process = await asyncio.create_subprocess_exec(*words)
            wanted = 2_000 + 37 * number % 500
            await asyncio.to_thread(
                wait_until,
                lambda f=file, w=wanted: f.exists() and f.stat().st_size > w,
                what="hits",
            )
            process.kill()
            await process.wait()
            for line in file.read_text().splitlines():
                kind, *ids = line.split(" ")
                (counted.asked if kind == "asked" else counted.acked).update(Counter(ids))
        await counted.finish()
        await counted.require_exact()
