"""The protocol of versions: changes reach the index in order and once, through any fault.

A random history of writes meets one fault after another between PostgreSQL and Valkey. After each,
pages equal the oracle and the index equals PostgreSQL.
"""

from __future__ import annotations

import asyncio

import pytest
from feed_world import History
from structlog.testing import capture_logs
from tests.kit.waiting import wait_true
from tests.views.room_harness import KeysCopy

from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.valkey import ValkeyDown
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.errors import FeedShardsFixed
from headrace.feed.model import Change, ChangeKind
from headrace.feed.worker import Sweeper
from headrace.testing import drain

STEPS, PAGES = 6, 8


class Unreachable:
    """An index that only this process cannot reach."""

    def __init__(self, error=None, shards=3):
        self.error = error or ValkeyDown("cut off")
        self.shards = shards

    def shards_of(self, kind, entity):
        return range(self.shards)

    async def apply(self, shard, change):
        raise self.error


async def is_fast(feed):
    return not (await feed.page(7)).is_slow


def meta_key(feed, shard=0):
    return f"{feed.valkey._starts[shard]}m"


async def note_restart(feed, engines):
    """Make the index look as if its server had been restarted."""
    for shard in range(feed.valkey.shards):
        await engines.valkey.command("HSET", meta_key(feed, shard), "run", "the run before")


class FaultyHistory(History):
    """Random writes, and faults while they reach the index."""

    def __init__(self, feed, engines, sql, seed):
        super().__init__(feed, seed)
        self.engines, self.sql = engines, sql
        self.applier, self.sweeper = feed.index.applier, Sweeper(feed)
        self.keys = KeysCopy(engines.valkey)

    async def write(self):
        """Some writes."""
        for _ in range(STEPS):
            await self.step()

    async def write_without_index(self):
        """Some writes of processes that die after the commit. Return their changes."""
        held = []

        async def hold(changes):
            held.extend(changes)
            return True

        self.applier.apply_or_defer = hold
        await self.write()
        del self.applier.apply_or_defer
        return held

    async def require_equal(self):
        """Pages equal the oracle, and the index equals PostgreSQL."""
        await self.check(PAGES)
        assert (await self.feed.index.verify()).differences == []

    async def arrive_in_any_order_and_twice(self):
        held = await self.write_without_index()
        for change in self.random.sample(held * 2, 2 * len(held)):
            assert await self.applier.apply_or_defer([change])

    async def arrive_by_the_sweep(self):
        held = await self.write_without_index()
        assert await self.sweeper.run_once(older_s=60) == 0
        assert await self.sweeper.run_once(older_s=0) >= len({c.entity for c in held}) > 0
        assert await self.sweeper.run_once(older_s=0) == 0
        [row] = await self.sql("SELECT count(*) FROM headrace.feed_outbox WHERE NOT is_swept")
        assert row[0] == 0

    async def arrive_with_a_time_in_the_future(self):
        """The clock of the database steps back after the commits."""
        await self.write_without_index()
        await self.sql(
            "UPDATE headrace.feed_outbox SET made_at = made_at + interval '1 hour'"
            " WHERE NOT is_swept"
        )
        assert await self.sweeper.run_once() > 0

    async def arrive_after_the_outbox_was_purged(self):
        held = await self.write_without_index()
        await self.sql("DELETE FROM headrace.feed_outbox")
        last = {(change.kind, change.entity): change for change in held}
        assert await self.applier.apply_or_defer(list(last.values()))

    async def are_deferred(self):
        """Pages of this process come from PostgreSQL until its changes have arrived."""
        self.applier._valkey = Unreachable()
        await self.write()
        assert self.applier.has_deferred
        assert not await is_fast(self.feed)
        await self.check(PAGES)
        self.applier._valkey = self.feed.valkey
        await wait_true(lambda: is_fast(self.feed), what="the changes arrived")
        assert not self.applier.has_deferred

    async def are_cancelled(self):
        """A writer is cancelled after its commit."""
        post = self.random.choice(sorted(self.world.posts))
        self.applier._valkey = Unreachable(asyncio.CancelledError())
        with pytest.raises(asyncio.CancelledError):
            await self.feed.delete(post)
        self.applier._valkey = self.feed.valkey
        del self.world.posts[post]
        await self.check(PAGES)
        await wait_true(lambda: is_fast(self.feed), what="the change arrived")

    async def are_lost_by_a_restart(self, step_back="0 minutes"):
        """Valkey returns without its last moments; no page is read from it until it is swept."""
        await self.sweeper.run_once(older_s=0)
        await self.keys.take()
        [row] = await self.sql("SELECT coalesce(max(id), 0) AS last FROM headrace.feed_outbox")
        await self.write()
        await self.sql(
            f"UPDATE headrace.feed_outbox SET made_at = made_at - interval '{step_back}'"
            f" WHERE id > {row['last']}"
        )
        await self.keys.put_back()
        await note_restart(self.feed, self.engines)
        await self.check(PAGES)
        assert not await is_fast(self.feed)
        assert await self.sweeper.run_once(older_s=0, settle_s=0) > 0
        assert await is_fast(self.feed)

    async def are_lost_by_a_restart_after_a_clock_step(self):
        await self.are_lost_by_a_restart("5 minutes")

    async def are_lost_with_an_old_copy(self):
        """Valkey returns with data older than the outbox: the index is built again."""
        await self.keys.take()
        await self.write()
        await self.sql("UPDATE headrace.feed_outbox SET made_at = made_at - interval '3 hours'")
        await self.sweeper.run_once(older_s=0)
        [row] = await self.sql(
            "SELECT (SELECT count(*) FROM headrace.feed_outbox), purged FROM headrace.feed_index"
        )
        assert (row[0], row[1] > 0) == (0, True)
        await self.keys.put_back()
        await note_restart(self.feed, self.engines)
        await self.sweeper.run_once(older_s=0, settle_s=0)
        await self.check(PAGES)
        await wait_true(lambda: is_fast(self.feed), what="the index was built")

    async def are_made_while_the_index_is_built(self):
        await self.feed.valkey.drop()
        assert (await self.feed.page(1)).is_slow

        async def write_and_read():
            await self.write()
            await self.check(PAGES)

        await asyncio.gather(write_and_read(), self.feed.index.rebuild_now())
        assert await is_fast(self.feed)


FAULTS = [name for name in vars(FaultyHistory) if name.startswith(("arrive_", "are_"))]


async def run_faults(history, names):
    """Write through each fault; afterwards the index equals PostgreSQL."""
    await history.post(40)
    await history.write()
    for name in names:
        try:
            await getattr(history, name)()
            await history.require_equal()
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"changes {name}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
async def test_the_index_equals_postgres_after_every_fault(make_feed, engines, sql, shards):
    history = FaultyHistory(make_feed(shards=shards), engines, sql, seed=shards)
    await run_faults(history, FAULTS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
async def test_the_index_equals_postgres_after_many_faults(make_feed, engines, sql, seed):
    history = FaultyHistory(make_feed(shards=1 + seed % 3), engines, sql, seed=seed)
    await run_faults(history, history.random.choices(FAULTS, k=40))


async def test_a_change_is_accepted_once_and_in_order(feed):
    await feed.index.ready()
    first = Change(ChangeKind.POSTS, 1, 1, ["a"], [5_000])
    assert await feed.valkey.change(0, Change(ChangeKind.POSTS, 1, 2, ["b"], [6_000])) == ("gap", 0)
    assert await feed.valkey.change(0, first) == ("ok", 0)
    assert await feed.valkey.change(0, first) == ("old", 1)
    assert await feed.valkey.change(0, Change(ChangeKind.POSTS, 1, 3, ["a"], [-1])) == ("gap", 1)


REPEATED = {
    "follow": (lambda feed: feed.follow(7, [8, 9]), ["b1", "a1"]),
    "unfollow": (lambda feed: feed.unfollow(7, [8]), []),
    "unfollow all": (lambda feed: feed.follows.unfollow_all(7), []),
    "mute": (lambda feed: feed.follows.mute(7, [8]), []),
    "block": (lambda feed: feed.follows.block(8, [7]), []),
    "post": (lambda feed: feed.post(8, "a2", kind="sale"), ["a2", "a1"]),
    "delete": (lambda feed: feed.delete(["a1"]), []),
}


@pytest.mark.parametrize("call", REPEATED)
async def test_a_repeated_call_applies_what_the_first_committed(feed, call):
    """The first call failed after its commit, because the commit's reply was lost."""
    write, expected = REPEATED[call]
    for author, post in ((8, "a1"), (9, "b1")):
        await feed.post(author, post)
    await feed.follow(7, [8])
    applier = feed.index.applier

    async def fail(changes):
        raise PostgresDown("the commit's reply was lost")

    applier.apply_or_defer = fail
    with pytest.raises(PostgresDown):
        await write(feed)
    del applier.apply_or_defer
    await write(feed)
    page = await feed.page(7)
    assert ([post.id for post in page.posts], page.is_slow) == (expected, False)


async def test_only_changes_swept_recently_are_swept_again(feed, sweeper, sql):
    for number in range(4):
        await feed.post(1, f"p{number}")
    await sweeper.run_once(older_s=0)
    ids = [row[0] for row in await sql("SELECT id FROM headrace.feed_outbox ORDER BY id")]
    await sql(
        "UPDATE headrace.feed_outbox SET made_at = made_at - interval '5 minutes'"
        f" WHERE id <= {ids[1]}"
    )
    for swept, marked in ((ids[2], 2), (ids[1], 4), (0, 4)):
        assert await store.mark_unswept(feed.postgres, swept=swept, late_s=60) == marked
        await sweeper.run_once(older_s=0)


@pytest.mark.slow
async def test_a_restarted_server_is_not_read_before_it_has_settled(feed, sweeper, engines):
    """No flusher runs: the process that reads pages recovers the index."""
    await feed.follow(7, 1)
    await feed.post(1, "a")
    await note_restart(feed, engines)
    [shard] = await feed.index.stats()
    assert shard.state == "recovering"
    await sweeper.run_once(older_s=0)
    page = await feed.page(7)
    assert ([post.id for post in page.posts], page.is_slow) == (["a"], True)
    await wait_true(lambda: is_fast(feed), what="pages come from the index")
    [shard] = await feed.index.stats()
    assert shard.state == "ready"


async def test_a_build_that_a_restart_interrupted_starts_again(feed, engines):
    await feed.follow(7, 1)
    await feed.post(1, "a")
    key = meta_key(feed)
    token = await engines.valkey.command("HGET", key, "token")
    await engines.valkey.command("HSET", key, "state", "building", "run", "before")
    assert not await feed.valkey.finish(0, token.decode(), epoch=0)
    assert await feed.index.rebuild_now() == 2
    assert await is_fast(feed)
    assert await engines.valkey.command("HGET", key, "token") != token
    assert await feed.valkey.finish(0, "another", epoch=0) is False


@pytest.mark.slow
async def test_a_large_old_copy_is_rebuilt_by_a_job(feed, sweeper, engines, sql, app):
    await feed.post(1, "a")
    await sql("INSERT INTO headrace.feed_version SELECT 1, n, 1 FROM generate_series(10, 1100) n")
    await sql("UPDATE headrace.feed_index SET purged = 1000000")
    await note_restart(feed, engines)
    await sweeper.run_once(older_s=0, settle_s=0)

    async def is_enqueued():
        [row] = await sql("SELECT count(*) FROM headrace.job_ready")
        return row[0] == 1

    await wait_true(is_enqueued, what="the job")
    assert not await is_fast(feed)
    assert await drain(app) == {"done": 1}
    assert await is_fast(feed)


async def test_deferred_changes_share_a_log_line(feed):
    applier = Applier(feed.postgres, Unreachable())
    with capture_logs() as lines:
        for number in range(50):
            assert not await applier.apply_or_defer(
                [Change(ChangeKind.POSTS, 1, number, ["a"], [5_000])]
            )
    assert [line["event"] for line in lines] == ["feed_change_deferred"]


async def test_a_damaged_index_is_found_and_repaired_in_place(feed, engines):
    await feed.follow(7, [1, 2, 3])
    for author in (1, 2, 3):
        await feed.post(author, f"p{author}")
    start = meta_key(feed)[:-1]
    await engines.valkey.command("SREM", f"{start}f:7", 2)
    await engines.valkey.command("SADD", f"{start}f:7", 99)
    await engines.valkey.command("ZADD", f"{start}p:1", 2**52, "extra")
    for key in await engines.valkey.command("KEYS", f"{start}b:4:*"):
        await engines.valkey.command("SREM", key, 3)
    found = (await feed.index.verify()).differences
    assert {(each.kind, each.entity): (each.missing, each.extra) for each in found} == {
        ("follows", 7): (1, 1),
        ("posts", 3): (1, 0),
        ("posts", 1): (7, 1),
    }
    assert await feed.index.rebuild_now() == 4
    assert (await feed.index.verify()).is_equal
    assert [post.id for post in (await feed.page(7)).posts] == ["p3", "p2", "p1"]


async def test_the_number_of_shards_is_fixed(make_feed):
    await make_feed(shards=2).follow(7, 1)
    with pytest.raises(FeedShardsFixed, match="uses 2 shards"):
        await make_feed(shards=3).follow(7, 1)


async def test_functions_have_the_flags_of_their_kind(feed, engines):
    """Changes are made even if memory is full, and reads may be sent to a replica."""
    await feed.index.ready()
    reply = await engines.valkey.command("FUNCTION", "LIST", "LIBRARYNAME", "headrace_feed_*")
    libraries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in reply]
    flags = {}
    for entry in [function for library in libraries for function in library[b"functions"]]:
        function = dict(zip(entry[::2], entry[1::2], strict=True))
        flags[function[b"name"].decode().split("_", 2)[2]] = set(function[b"flags"])
    reads = {"page_v1", "status_v1", "posts_v1", "follows_v1"}
    assert {name for name, found in flags.items() if found == {b"no-writes"}} == reads
    assert {name for name, found in flags.items() if not found} == {"begin_v1", "finish_v1"}
