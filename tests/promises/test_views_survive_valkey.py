"""Valkey is killed, cut, emptied and failed over under hits.

What it may lose is lost, nothing else, nothing twice.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from contextlib import asynccontextmanager, suppress

import pytest
from counted_views import CountedViews
from own_valkey import OwnValkey
from slow_disk import slow_syncs
from tests.kit.processes import wait_until
from tests.kit.waiting import wait_true

from headrace.kernel.errors import Unavailable


@asynccontextmanager
async def counted_on(server, database_url, tmp_path, **settings):
    """Clients on a server of their own."""
    server.start()
    server.lead()
    counted = CountedViews(database_url, server.url, tmp_path, lease_s=1.0, **settings)
    try:
        yield counted
    finally:
        await counted.close()
        server.end()


@pytest.fixture
def folder(tmp_path_factory):
    """A short path: sockets are in it."""
    return tmp_path_factory.mktemp("v")


@pytest.mark.slow
@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
async def test_a_killed_valkey_loses_and_doubles_nothing(database_url, folder, appendfsync):
    await _kill(database_url, folder, appendfsync, kills=5)


@pytest.mark.soak
@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
async def test_a_valkey_killed_many_times_loses_and_doubles_nothing(
    database_url, folder, appendfsync
):
    await _kill(database_url, folder, appendfsync, kills=200)


@pytest.mark.slow
@pytest.mark.parametrize("sync_ms", [300, 1500])
async def test_a_valkey_killed_beside_a_slow_disk_loses_and_doubles_nothing(
    database_url, folder, sync_ms
):
    """While a sync runs, Valkey answers before it writes.

    Such hits are not answered before they are written.
    """
    slow = slow_syncs(folder, sync_ms=sync_ms)
    await _kill(database_url, folder, "everysec", kills=4, environment=slow)


@pytest.mark.soak
@pytest.mark.parametrize("sync_ms", [50, 500, 3000])
async def test_a_valkey_killed_many_times_beside_a_slow_disk_loses_and_doubles_nothing(
    database_url, folder, sync_ms
):
    slow = slow_syncs(folder, sync_ms=sync_ms)
    await _kill(database_url, folder, "everysec", kills=40, environment=slow)


async def _kill(database_url, folder, appendfsync, *, kills, environment=None):
    server = OwnValkey(
        folder / "a", folder / "now", appendfsync=appendfsync, environment=environment
    )
    async with counted_on(server, database_url, folder) as counted:
        counted.start(flushers=2)
        for _ in range(kills):
            await counted.pass_more(60)
            server.kill()
            server.start()
        await counted.pass_more(60)
        await counted.finish()
        await counted.require_exact()


@pytest.mark.slow
async def test_a_cut_tail_costs_what_was_cut_and_not_flushed(database_url, folder):
    """A power cut: the end of the file was never on the disk."""
    await _cut(database_url, folder, cuts=6)


@pytest.mark.soak
async def test_many_cut_tails_cost_what_was_cut_and_not_flushed(database_url, folder):
    await _cut(database_url, folder, cuts=200)


async def _cut(database_url, folder, *, cuts):
    chance = random.Random(5)
    server = OwnValkey(folder / "a", folder / "now")
    async with counted_on(server, database_url, folder) as counted:
        for _ in range(cuts):
            counted.start(readers=0, flushers=1)
            await counted.pass_more(150)
            server.kill()
            await counted.finish()
            file = server.newest_file()
            cut_bytes = min(chance.randint(1, 20_000), file.stat().st_size)
            with file.open("r+b") as handle:
                handle.truncate(file.stat().st_size - cut_bytes)
            server.start()
            before = Counter(await counted.settle())
            # What is not counted now is lost for good; all from here on must be there.
            assert before <= counted.asked
            counted.acked = Counter(before)
            counted.asked = Counter(before)
        counted.start(flushers=1)
        await counted.pass_more(100)
        await counted.finish()
        await counted.require_exact()


@pytest.mark.slow
async def test_a_cut_tail_that_postgres_had_counted_is_found_and_totals_are_dropped(
    database_url, folder
):
    """No fence was passed: PostgreSQL counted what the file never had."""
    server = OwnValkey(folder / "a", folder / "now")
    async with counted_on(server, database_url, folder) as counted:
        for _ in range(20):
            await counted.hit()
        await counted.settle()
        size = server.newest_file().stat().st_size
        for _ in range(20):
            await counted.hit()
        await counted.settle()
        server.kill()
        with server.newest_file().open("r+b") as handle:
            handle.truncate(size)
        server.start()
        await wait_true(lambda: _answers(counted), what="connected again")
        for _ in range(20):
            await counted.hit()
        await counted.require_exact()


@pytest.mark.slow
async def test_an_emptied_valkey_costs_what_was_not_flushed(database_url, folder):
    server = OwnValkey(folder / "a", folder / "now")
    async with counted_on(server, database_url, folder) as counted:
        counted.start()
        await counted.pass_more(200)
        await counted.finish()
        counted_before = await counted.settle()
        assert counted_before == dict(counted.acked)
        for _ in range(10):
            await counted.hit()
        server.kill()
        shutil.rmtree(server.folder / "appendonlydir")
        counted.acked = Counter(counted_before)
        counted.asked = Counter(counted_before)
        server.start()
        await wait_true(lambda: _answers(counted), what="connected again")
        counted.start(readers=0, flushers=1)
        await counted.pass_more(100)
        await counted.finish()
        await counted.require_exact()


@pytest.mark.slow
async def test_a_replica_that_missed_the_tail_takes_over(database_url, folder):
    await _fail_over(database_url, folder, times=2)


@pytest.mark.soak
async def test_many_failovers_to_replicas_that_missed_the_tail(database_url, folder):
    await _fail_over(database_url, folder, times=60)


async def _fail_over(database_url, folder, *, times):
    """Cut off the replica, flush the running primary, kill it, and promote the replica."""
    server = OwnValkey(folder / "p0", folder / "now")
    async with counted_on(server, database_url, folder) as counted:
        for number in range(1, times + 1):
            replica = OwnValkey(folder / f"p{number}", folder / "now")
            replica.start("--replicaof", "127.0.0.1", str(server.port))
            wait_until(
                lambda r=replica: b"link_status:up" in r.ask("INFO", "replication"), what="in sync"
            )
            counted.start(readers=0, flushers=1)
            await counted.pass_more(100)
            replica.ask("REPLICAOF", "NO", "ONE")
            await counted.pass_more(100)
            await counted.finish()
            server.kill()
            replica.lead()
            server = replica
            await wait_true(lambda: _answers(counted), what="connected again")
            # Between what PostgreSQL had and all; what the replica missed may be counted or not.
            before = Counter(await counted.settle())
            assert before <= counted.asked
            counted.acked, counted.asked = Counter(before), Counter(before)
        counted.start(flushers=1)
        await counted.pass_more(100)
        await counted.finish()
        await counted.require_exact()
        server.end()


@pytest.mark.slow
async def test_durable_hits_survive_a_cut_of_what_was_not_synced(database_url, folder):
    """Answered means synced: whatever is cut after the size the file had then, is not ours."""
    server = OwnValkey(folder / "a", folder / "now", appendfsync="always")
    async with counted_on(server, database_url, folder, durability="durable") as counted:
        counted.start(readers=0)
        await counted.pass_more(100)
        await counted.finish()
        size = server.newest_file().stat().st_size
        server.kill()
        with server.newest_file().open("r+b") as handle:
            handle.truncate(size)
        server.start()
        await wait_true(lambda: _answers(counted), what="connected again")
        await counted.require_exact()


@pytest.mark.slow
async def test_while_valkey_is_away_hits_are_refused_and_reads_go_on(database_url, folder):
    server = OwnValkey(folder / "a", folder / "now")
    async with counted_on(server, database_url, folder) as counted:
        for _ in range(20):
            await counted.hit()
        stored = await counted.settle()
        server.kill()
        with pytest.raises(Unavailable) as refused:
            await wait_true(lambda: counted.views.hit("ad:1"))
        assert refused.value.retry_after_s
        found = await counted.views.totals(counted.entities)
        assert all(total.stale for total in found)
        assert {t.id: t.total for t in found if t.total} == stored
        server.start()
        await wait_true(lambda: _answers(counted), what="connected again")
        await counted.hit()
        await counted.require_exact()


async def _answers(counted) -> bool:
    with suppress(Unavailable):
        await counted.engines.multiplexer.command("PING")
        return True
    return False
