"""Valkey is killed, cut, emptied, put back and failed over under hits.

Each acknowledged hit is counted once, except those that Valkey may lose.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import pytest
from tests.kit.processes import wait_until
from tests.kit.stock_valkey import OwnValkey
from tests.kit.storm.room_views import CountedViews
from tests.kit.waiting import wait_true

from headrace.kernel.errors import Unavailable
from headrace.views.worker import Flusher

pytestmark = pytest.mark.slow
HOUR_MS = 3_600_000
SLOW_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static void wait_ms(void) {
  struct timespec t = {%(ms)d / 1000, %(ms)d %% 1000 * 1000000L};
  nanosleep(&t, 0);
}
#define SLOW(name) int name(int fd) { \\
  int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, #name); wait_ms(); return next(fd); }
SLOW(fdatasync)
SLOW(fsync)
"""


def soak(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.fixture
def folder(tmp_path_factory):
    """A short path: sockets are in it."""
    return tmp_path_factory.mktemp("v")


@asynccontextmanager
async def counted_on(database_url, folder, *, appendfsync="everysec", **settings):
    """Clients, and a Valkey that can be killed, cut, emptied and failed over."""
    server = OwnValkey(folder / "a", folder / "now", appendfsync=appendfsync)
    server.start()
    counted = CountedViews(database_url, server.url, folder, **settings)
    try:
        yield counted, server
    finally:
        await counted.close()
        server.end()


async def restart(counted, server):
    """Start Valkey again, and wait for the clients' connections."""
    server.start()
    await wait_true(lambda: _answers(counted), what="connected again")


async def _answers(counted) -> bool:
    with suppress(Unavailable):
        await counted.engines.multiplexer.command("PING")
        return True
    return False


@pytest.mark.parametrize(
    ("appendfsync", "sync_ms", "kills"),
    [
        # `test_storms` has "everysec" without a slow disk.
        ("always", 0, 3),
        ("everysec", 1500, 2),
        soak("everysec", 300, 40),
        soak("always", 0, 200),
        soak("everysec", 0, 200),
        soak("everysec", 50, 40),
        soak("everysec", 500, 40),
        soak("everysec", 3000, 40),
    ],
)
async def test_a_killed_valkey_loses_and_doubles_nothing(
    database_url, folder, appendfsync, sync_ms, kills
):
    """While a sync runs, Valkey answers before it writes; such hits are answered after it."""
    async with counted_on(database_url, folder, appendfsync=appendfsync) as (counted, server):
        if sync_ms:
            server.kill()
            server.environment = slow_syncs(folder, sync_ms)
            server.start()
        is_swept = not sync_ms
        counted.start(flushers=2, readers=not is_swept, sweepers=is_swept)
        for _ in range(kills):
            await counted.pass_more(60)
            server.kill()
            server.start()
        await counted.pass_more(60)
        await counted.finish()
        await counted.require_exact()


def slow_syncs(folder, sync_ms):
    """Variables of a process whose every sync takes longer, as on a slow disk."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) is installed: syncs cannot be made slow")
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(SLOW_DISK % {"ms": sync_ms})
    words = [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(words, check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.parametrize("times", [3, soak(200)])
async def test_a_cut_tail_costs_what_was_cut_and_not_flushed(database_url, folder, times):
    """A power cut: the end of the file was never on the disk."""
    chance = random.Random(5)
    async with counted_on(database_url, folder) as (counted, server):
        for _ in range(times):
            counted.start(readers=0, flushers=1, sweepers=1)
            await counted.pass_more(150)
            server.kill()
            await counted.finish()
            server.cut_tail(lost_bytes=chance.randint(1, 20_000))
            server.start()
            counted.forget_to(await counted.settle())
        await require_more(counted)


async def require_more(counted, readers=0, sweepers=1):
    counted.start(readers=readers, flushers=1, sweepers=sweepers)
    await counted.pass_more(100)
    await counted.finish()
    await counted.require_exact()


def move_ids_ahead(server, ahead_ms=HOUR_MS):
    """Add an entry to each stream, as if the server's clock had been ahead."""
    ahead = f"{int(datetime.now(UTC).timestamp() * 1000) + ahead_ms}-0"
    for key in server.command("KEYS", "*:q"):
        server.command("XADD", key.decode(), ahead, "a", "")


@pytest.mark.parametrize("ahead_ms", [0, HOUR_MS])
async def test_a_cut_tail_that_postgres_had_counted_is_detected(database_url, folder, ahead_ms):
    """PostgreSQL counted what the file never had.

    If Valkey's clock was ahead before, the next ids are lower than those that were counted.
    """
    async with counted_on(database_url, folder) as (counted, server):
        if ahead_ms:
            await counted.settle()
            move_ids_ahead(server, ahead_ms)
        sizes = []
        for _ in range(2):
            for _ in range(20):
                await counted.hit()
            await counted.settle()
            sizes.append(server.file_bytes())
        server.kill()
        server.cut_tail(at=sizes[0])
        await restart(counted, server)
        for _ in range(20):
            await counted.hit()
        await counted.require_exact()


async def test_entries_read_before_a_loss_are_not_flushed_after_it(database_url, folder):
    """A flusher read them, Valkey lost them, and a hit set up each shard before the commit.

    With the clock behind, new entries get lower ids: a flush of the lost ones would skip them.
    """
    async with counted_on(database_url, folder) as (counted, server):
        idle = counted.new_views()
        await counted.hit(idle.hits)
        await counted.settle()
        size = server.file_bytes()
        move_ids_ahead(server)
        await counted.views.hits([f"lost:{number}" for number in range(50)])
        flusher = Flusher(counted.engines, counted.config, name="slow")
        await flusher._lease()
        held = [(shard, await shard.read()) for shard in flusher._shards.values()]
        server.kill()
        server.cut_tail(at=size)
        await restart(counted, server)
        for _ in range(20):
            assert await counted.hit(idle.hits)
        for shard, batch in held:
            assert batch is not None
            await shard.write(batch)
        await counted.require_exact()


async def test_reads_are_right_at_once_after_valkey_was_emptied(database_url, folder):
    """Totals of hits since then are not dropped: a read would lag by a flush."""
    async with counted_on(database_url, folder) as (counted, server):
        await counted.hit()
        counted.forget_to(await counted.settle())
        assert server.command("FLUSHALL") == b"OK"
        await counted.hit()
        await require_more(counted, readers=2, sweepers=0)


async def test_an_emptied_valkey_costs_what_was_not_flushed(database_url, folder):
    async with counted_on(database_url, folder) as (counted, server):
        counted.start()
        await counted.pass_more(200)
        await counted.finish()
        stored = await counted.settle()
        assert stored == dict(counted.acked)
        for _ in range(10):
            await counted.hit()
        server.kill()
        shutil.rmtree(server.folder / "appendonlydir")
        counted.forget_to(stored)
        await restart(counted, server)
        await require_more(counted)


def replica_of(server, folder):
    """A new replica that has all data."""
    replica = OwnValkey(folder, server.link)
    replica.start("--replicaof", "127.0.0.1", str(server.port))
    wait_in_sync(replica)
    return replica


def wait_in_sync(replica):
    wait_until(lambda: b"link_status:up" in replica.command("INFO", "replication"), what="in sync")


async def test_a_primary_that_takes_over_again_without_a_restart_is_set_up_again(
    database_url, folder
):
    """It lacked nothing when it was demoted, so its functions were not loaded again.

    Then it lost entries with later ids than its clock gives, which PostgreSQL had counted.
    """
    async with counted_on(database_url, folder) as (counted, first):
        idle = counted.new_views()
        await counted.hit(idle.hits)
        await counted.settle()
        second = replica_of(first, folder / "second")
        try:
            second.command("REPLICAOF", "NO", "ONE")
            first.command("REPLICAOF", "127.0.0.1", str(second.port))
            wait_in_sync(first)
            assert b"sync_partial_ok:1" in second.command("INFO", "stats"), "it lacked something"
            first.command("REPLICAOF", "NO", "ONE")
            move_ids_ahead(second)
            second.lead()
            first.command("CLIENT", "KILL", "TYPE", "normal")
            await wait_true(lambda: _answers(counted), what="connected again")
            for _ in range(20):
                await counted.hit()
            await counted.settle()
        finally:
            second.end()
        first.lead()
        await wait_true(lambda: _answers(counted), what="connected again")
        for _ in range(20):
            assert await counted.hit(idle.hits)
        await counted.require_exact()


@pytest.mark.parametrize("times", [2, soak(60)])
async def test_a_replica_without_the_last_hits_takes_over(database_url, folder, times):
    """Cut off the replica, flush the running primary, kill it, and promote the replica."""
    async with counted_on(database_url, folder) as (counted, first):
        server = first
        for number in range(times):
            replica = replica_of(server, folder / f"r{number}")
            counted.start(readers=0, flushers=1)
            await counted.pass_more(100)
            replica.command("REPLICAOF", "NO", "ONE")
            await counted.pass_more(100)
            await counted.finish()
            server.kill()
            replica.lead()
            server = replica
            await wait_true(lambda: _answers(counted), what="connected again")
            # Hits that the replica missed may be counted or not.
            counted.forget_to(await counted.settle())
        await require_more(counted)
        server.end()


async def test_durable_hits_survive_a_cut_of_everything_that_was_not_synced(database_url, folder):
    settings = {"appendfsync": "always", "durability": "durable"}
    async with counted_on(database_url, folder, **settings) as (counted, server):
        counted.start(readers=0)
        await counted.pass_more(100)
        await counted.finish()
        size = server.file_bytes()
        server.kill()
        server.cut_tail(at=size)
        await restart(counted, server)
        await counted.require_exact()


async def test_while_valkey_is_down_hits_are_refused_and_reads_continue(database_url, folder):
    async with counted_on(database_url, folder) as (counted, server):
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
        await restart(counted, server)
        await counted.hit()
        await counted.require_exact()
