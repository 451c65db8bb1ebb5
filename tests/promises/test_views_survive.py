"""Flushers and PostgreSQL die, lose writes and fail over under hits.

Each acknowledged hit is counted once; what an engine may lose is lost, nothing else. `test_storms`
has real flushers and APIs that die at random, `test_views_valkey_losses` a Valkey that loses data.
"""

from __future__ import annotations

import asyncio
import csv
import os
import random
import secrets
import signal
from collections import Counter
from contextlib import asynccontextmanager, suppress
from datetime import datetime

import pytest
from tests.kit.forked import ended, start_forked
from tests.kit.storm.room_views import CountedViews, open_engines
from tests.kit.storm.storm import own_engines

from headrace.engines.sql import compile_query
from headrace.kernel.errors import Unavailable
from headrace.views import ViewsConfig
from headrace.views.exports import Exports, follow
from headrace.views.worker import Flusher

pytestmark = pytest.mark.slow
STEPS = ("read", "confirmed", "aggregated", "committed", "recorded")
HOURS = compile_query(
    "hours", "-- Stored hours.\nSELECT id, hour, views FROM headrace.views_hour WHERE class = 0"
)
FLUSH = "headrace.flush_views_v1"


def often(few, many):
    """Some repetitions in every run, many in the soak run."""
    return pytest.mark.parametrize("times", [few, pytest.param(many, marks=pytest.mark.soak)])


@pytest.fixture
async def counted(running_engines, database_url, tmp_path):
    """Some hits on the shared engines, all answered and flushed."""
    prefix = f"test-{secrets.token_hex(4)}"
    valkey_url = running_engines.endpoints.valkey_url
    found = CountedViews(database_url, valkey_url, tmp_path, prefix=prefix)
    for _ in range(20):
        await found.hit()
    await found.settle()
    yield found
    await found.close()


async def flush(postgres_url, valkey_url, prefix, folder, name):
    """A flusher, until it is killed."""
    engines = open_engines(postgres_url, valkey_url, folder, prefix=prefix)
    kept_s = 3600.0 if name.startswith("recording") else 0.0
    config = ViewsConfig(flush_every_s=0.02, lease_s=1.0, changes_kept_s=kept_s)
    await Flusher(engines, config, name=name).run(asyncio.Event())


@often(10, 200)
async def test_flushers_that_die_at_each_step_lose_and_double_nothing(counted, tmp_path, times):
    """Two run at once: one takes over the shards of the other, or races it.

    Totals are swept meanwhile, so that hits fill them with the hits that are not flushed.
    """
    chance = random.Random(3)
    counted.start(hitters=2, readers=0, sweepers=1)
    where = (*counted.urls, counted.engines.valkey.prefix, tmp_path)
    running = []
    for number in range(times):
        point = f"views.{STEPS[number % len(STEPS)]}:{chance.randint(1, 12)}"
        running.append(start_forked(flush, *where, f"f{number}", crash_at=point))
        if len(running) == 2:
            assert await ended(running.pop(0)) == -signal.SIGKILL
    assert await ended(running.pop()) == -signal.SIGKILL
    await counted.finish()
    assert counted.sent == counted.acked, "no hit was refused"
    await counted.require_exact()


async def follow_changes(postgres_url, valkey_url, prefix, folder, files):
    """A reader of changes, until it is killed."""
    engines = open_engines(postgres_url, valkey_url, folder, prefix=prefix)
    exports = Exports(engines.postgres, shards=4, time_zone="UTC")
    while True:
        await follow(exports, files, "csv")


@often(8, 100)
async def test_readers_and_flushers_that_die_give_each_change_once(
    running_engines, database_url, tmp_path, times
):
    """The files add up to the stored hours, and stored hours to the acknowledged hits."""
    chance, files = random.Random(5), tmp_path / "changes"
    prefix = f"test-{secrets.token_hex(4)}"
    counted = CountedViews(
        database_url,
        running_engines.endpoints.valkey_url,
        tmp_path,
        prefix=prefix,
        changes_kept_s=3600.0,
    )
    try:
        await Flusher(counted.engines, counted.config, name="first").run_once()
        counted.start(hitters=2)
        where = (*counted.urls, prefix, tmp_path)
        for number in range(times):
            step = STEPS[number % len(STEPS)]
            flusher = start_forked(
                flush, *where, f"recording{number}", crash_at=f"views.{step}:{chance.randint(1, 9)}"
            )
            reader = start_forked(
                follow_changes, *where, files, crash_at=f"views.followed:{chance.randint(1, 4)}"
            )
            assert await ended(flusher) == -signal.SIGKILL
            if number % 2:
                with suppress(ProcessLookupError):
                    os.kill(reader.pid, signal.SIGKILL)
            counted.start(flushers=1)
            assert await ended(reader) == -signal.SIGKILL
            await counted.finish()
            counted.start(hitters=2)
        await counted.finish()
        await counted.require_exact()
        await follow(counted.views.exports, files, "csv")
        found = Counter()
        for path in files.glob("*.csv"):
            for row in csv.DictReader(path.open()):
                found[row["id"], datetime.fromisoformat(row["start_at"])] += int(row["views"])
        rows = await counted.engines.postgres.all(HOURS)
        assert found == {(row["id"], row["hour"]): row["views"] for row in rows}
        assert len(list(files.glob("*.csv"))) >= times // 2
    finally:
        await counted.close()


# PostgreSQL


@asynccontextmanager
async def counted_on_own_engines(folder, *, durable=True):
    """Clients, and engines that can be killed."""
    async with own_engines(folder, durable=durable) as (engines, endpoints, _):
        counted = CountedViews(endpoints.postgres_url, endpoints.valkey_url, folder)
        try:
            yield counted, engines
        finally:
            await counted.close()


@often(4, 60)
async def test_commits_that_postgres_lost_are_made_again(tmp_path, times):
    """As after a failover to a standby without the last ones. Here they were in memory only."""
    async with counted_on_own_engines(tmp_path, durable=False) as (counted, engines):
        await counted.hit()
        await counted.settle()
        async with counted.engines.postgres.session() as session:
            for setting in ("synchronous_commit = off", "wal_writer_delay = '10s'"):
                await session.connection.execute(f"ALTER SYSTEM SET {setting}")
            await session.connection.execute("SELECT pg_reload_conf()")
            await session.connection.execute("CHECKPOINT")
        lost = 0
        counted.start(readers=0, flushers=1, sweepers=1)
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
    while True:
        with suppress(Unavailable):
            return {lag.shard: lag.through for lag in await counted.views.analytics.lag()}
        await asyncio.sleep(0)


async def test_while_postgres_is_down_hits_continue_and_totals_stay_right(tmp_path):
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
        assert counted.sent == counted.acked, "no hit was refused"
        counted.entities.append("new")
        counted.acked["new"] = counted.sent["new"] = 2
        await counted.require_exact()


# Planted faults: the checker of these tests reports each.


async def plant(counted, text):
    """Change what is stored behind the service."""
    async with counted.engines.postgres.session() as session:
        await session.connection.execute(text)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"total": "+ 1", "hour": "+ 1"}, "acknowledged, [0-9]+ stored, [0-9]+ sent"),
        ({"total": "- 1", "hour": "- 1"}, "acknowledged, [0-9]+ stored, [0-9]+ sent"),
        ({"hour": "+ 1"}, None),
    ],
    ids=["doubled", "lost", "an hour that contradicts its total"],
)
async def test_a_wrong_count_is_reported(counted, changes, error):
    await counted.require_exact()
    for table, change in changes.items():
        column = "total" if table == "total" else "views"
        where = f"SET {column} = {column} {change} WHERE id = 'ad:1'"
        await plant(counted, f"UPDATE headrace.views_{table} {where}")
    with pytest.raises(AssertionError, match=error):
        await counted.require_exact()


async def test_a_wrong_cached_total_and_a_wrong_read_are_reported(counted):
    valkey = counted.engines.valkey
    await valkey.command("INCR", f"{valkey.prefix}:{{v:1}}:c:ad:1")
    with pytest.raises(AssertionError):
        await counted.require_exact()
    counted.acked["ad:1"] += 2
    await counted.read()
    assert len(counted.wrong_reads) == 1


async def test_a_flush_that_ignores_the_offset_is_reported(counted):
    """Two flushers read the same entries, and the second counts them again."""
    query = f"-- The function.\nSELECT pg_get_functiondef('{FLUSH}'::regproc)"
    text = await counted.engines.postgres.value(compile_query("text", query))
    guard = " AND s.through = p_from"
    assert guard in text
    await plant(counted, text.replace(guard, ""))
    flushers = [Flusher(counted.engines, counted.config, name=f"r{n}") for n in range(2)]
    for each in flushers:
        await plant(counted, "UPDATE headrace.views_lease SET flusher = NULL")
        await plant(counted, "DELETE FROM headrace.views_flusher")
        await each.run_once()
    await counted.hit()
    await asyncio.gather(*[each.run_once() for each in flushers])
    with pytest.raises(AssertionError, match=r"acknowledged, [0-9]+ stored, [0-9]+ sent"):
        await counted.require_exact()
