"""Changes reach the index in order and once, by any writer, at any rate, after any loss."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs
from tests.kit.waiting import wait_true

from headrace.engines.valkey import ValkeyDown
from headrace.feed import NewPost, store
from headrace.feed.apply import Applier
from headrace.feed.errors import FeedShardsFixed
from headrace.feed.model import Change, Kind
from headrace.feed.worker import Sweeper
from headrace.testing import drain


@pytest.fixture
def applier(feed):
    """What brings changes."""
    return Applier(feed.postgres, feed.valkey)


async def ids(feed, viewer):
    return [post.id for post in (await feed.page(viewer)).posts]


async def is_fast(feed):
    return not (await feed.page(7)).is_slow


class Unreachable:
    """An index that this process alone cannot reach."""

    def __init__(self, error=None):
        self.error = error or ValkeyDown("cut off")

    def parts(self, change):
        raise self.error


async def left(sql):
    [row] = await sql("SELECT count(*) FROM headrace.feed_outbox WHERE NOT is_swept")
    return row[0]


async def test_a_change_comes_once_and_in_order(feed, applier):
    await feed.index.ready()
    first = Change(Kind.POSTS, 1, 1, ["a"], [5_000])
    assert await feed.valkey.change(0, Change(Kind.POSTS, 1, 2, ["b"], [6_000])) == ("gap", 0)
    assert await feed.valkey.change(0, first) == ("ok", 0)
    assert await feed.valkey.change(0, first) == ("old", 1)
    assert await feed.valkey.change(0, Change(Kind.POSTS, 1, 3, ["a"], [-1])) == ("gap", 1)


async def test_changes_that_arrive_the_other_way_round_end_as_they_were_committed(feed, applier):
    await feed.index.ready()
    await feed.post(1, "a")
    _, followed = await store.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    _, unfollowed = await store.unfollow(feed.postgres, 7, [1])
    _, again = await store.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    assert await applier.apply_or_defer([again, followed])
    assert await ids(feed, 7) == ["a"]
    assert await applier.apply_or_defer([unfollowed, followed, again])
    assert await ids(feed, 7) == ["a"]
    assert (await feed.index.verify()).is_equal


@pytest.mark.parametrize("is_swept", [True, False])
async def test_the_end_of_all_follows_names_none_and_is_brought_in_order(make_feed, is_swept):
    feed = make_feed(shards=3)
    for author in range(1, 7):
        await feed.post(author, f"p{author}")
    await feed.follow(7, list(range(1, 6)))
    assert len(await ids(feed, 7)) == 5
    changed, gone = await store.unfollow_all(feed.postgres, 7)
    assert (changed, gone.items, gone.is_snapshot) == (5, [], True)
    assert await store.unfollow_all(feed.postgres, 7) == (0, None)
    _, again = await store.follow(feed.postgres, 7, [6], ats=[None], follows_max=10)
    if is_swept:
        assert await Sweeper(feed).run_once(older_s=0) == 6
    else:
        applier = Applier(feed.postgres, feed.valkey)
        assert await applier.apply_or_defer([again])
        assert await applier.apply_or_defer([gone])
    assert await ids(feed, 7) == ["p6"]
    assert (await feed.index.verify()).is_equal


async def test_where_the_log_is_forgotten_the_whole_is_brought(feed, applier, sql):
    await feed.index.ready()
    await store.post(feed.postgres, ids=["a"], authors=[1], ats=[None], refs=[None])
    await sql("DELETE FROM headrace.feed_outbox")
    await feed.follow(7, 1)
    await feed.post(1, "b")
    assert await ids(feed, 7) == ["b", "a"]
    assert (await feed.index.verify()).is_equal


async def test_the_sweep_brings_what_a_writer_left(feed, sweeper, sql):
    await feed.index.ready()
    await feed.post(1, "a")
    await store.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    assert await ids(feed, 7) == []
    assert await sweeper.run_once(older_s=60) == 0
    assert await sweeper.run_once(older_s=0) == 1
    assert await ids(feed, 7) == ["a"]
    assert await left(sql) == 0
    assert await sweeper.run_once(older_s=0) == 0


async def test_swept_changes_are_forgotten_after_a_while(feed, sweeper, sql):
    await feed.post(1, "a")
    await sweeper.run_once(older_s=0)
    [row] = await sql("SELECT count(*) FROM headrace.feed_outbox")
    assert row[0] == 1
    await sql("UPDATE headrace.feed_outbox SET made_at = made_at - interval '1 hour'")
    await sweeper.run_once(older_s=0)
    [row] = await sql(
        "SELECT (SELECT count(*) FROM headrace.feed_outbox), purged FROM headrace.feed_index"
    )
    assert (row[0], row[1] > 0) == (0, True)


@pytest.mark.slow
async def test_a_server_that_lost_its_last_moments_gets_them_again(feed, sweeper, engines):
    """As after a power cut.

    The index is older than what was swept, and its server is another run.
    """
    await feed.follow(7, 1)
    await feed.post(1, "a")
    await sweeper.run_once(older_s=0)
    prefix = f"{engines.valkey.prefix}:{{f:0}}:"
    await engines.valkey.command("ZREM", f"{prefix}p:1", "a")
    await engines.valkey.command("ZADD", f"{prefix}p:1", 0, "")
    assert await ids(feed, 7) == []
    assert not (await feed.index.verify()).is_equal
    await engines.valkey.command("HSET", f"{prefix}m", "run", "the run before", "swept", 0)
    assert await sweeper.run_once(older_s=0, settle_s=0) == 1
    assert await ids(feed, 7) == ["a"]
    assert await is_fast(feed)


async def test_only_what_was_swept_lately_is_swept_again(feed, sweeper, sql, engines):
    for number in range(4):
        await feed.post(1, f"p{number}")
    await sweeper.run_once(older_s=0)
    rows = await sql("SELECT id FROM headrace.feed_outbox ORDER BY id")
    await sql(
        "UPDATE headrace.feed_outbox SET made_at = made_at - interval '5 minutes'"
        f" WHERE id <= {rows[1][0]}"
    )
    assert await store.mark_unswept(feed.postgres, swept=rows[2][0], late_s=60) == 2
    await sweeper.run_once(older_s=0)
    assert await store.mark_unswept(feed.postgres, swept=rows[1][0], late_s=60) == 4
    await sweeper.run_once(older_s=0)
    assert await store.mark_unswept(feed.postgres, swept=0, late_s=60) == 4


@pytest.mark.slow
async def test_a_server_that_came_back_is_not_read_before_it_has_settled(feed, sweeper, engines):
    """And then by whoever reads: nobody sweeps here."""
    await feed.follow(7, 1)
    await feed.post(1, "a")
    assert await is_fast(feed)
    await engines.valkey.command("HSET", f"{engines.valkey.prefix}:{{f:0}}:m", "run", "before")
    [told] = await feed.index.stats()
    assert told.state == "recovering"
    assert not await is_fast(feed)
    assert await ids(feed, 7) == ["a"]
    await sweeper.run_once(older_s=0)
    assert not await is_fast(feed)
    await wait_true(lambda: is_fast(feed), what="pages come from the index")
    [told] = await feed.index.stats()
    assert told.state == "ready"


@pytest.mark.slow
async def test_an_index_whose_building_was_cut_off_by_a_restart_is_begun_again(feed, engines):
    await feed.follow(7, 1)
    await feed.post(1, "a")
    key = f"{engines.valkey.prefix}:{{f:0}}:m"
    token = await engines.valkey.command("HGET", key, "token")
    await engines.valkey.command("HSET", key, "state", "building", "run", "before")
    assert not await feed.valkey.finish(0, token.decode())
    assert await feed.index.rebuild_now() == 2
    assert await is_fast(feed)
    assert await engines.valkey.command("HGET", key, "token") != token
    assert await feed.valkey.finish(0, "another") is False


@pytest.mark.slow
async def test_a_server_that_is_an_old_copy_is_dropped_and_built_anew(feed, sweeper, engines, sql):
    """One post is in the old copy alone; no sweep could know."""
    await feed.follow(7, 1)
    await feed.post(1, "a")
    await sweeper.run_once(older_s=0)
    await sql("UPDATE headrace.feed_index SET purged = 1000000")
    prefix = f"{engines.valkey.prefix}:{{f:0}}:"
    await engines.valkey.command("ZADD", f"{prefix}p:1", 2**52, "old")
    await engines.valkey.command("HSET", f"{prefix}m", "run", "the run before", "newest", 2**52)
    await sweeper.run_once(older_s=0, settle_s=0)
    assert await ids(feed, 7) == ["a"]
    await wait_true(lambda: is_fast(feed), what="pages come from the index")
    assert await ids(feed, 7) == ["a"]
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
async def test_a_large_old_copy_is_built_anew_by_a_job(feed, sweeper, engines, sql, app):
    await feed.post(1, "a")
    await sql("INSERT INTO headrace.feed_version SELECT 1, n, 1 FROM generate_series(10, 1100) n")
    await sql("UPDATE headrace.feed_index SET purged = 1000000")
    key = f"{engines.valkey.prefix}:{{f:0}}:m"
    await engines.valkey.command("HSET", key, "run", "the run before")
    await sweeper.run_once(older_s=0, settle_s=0)

    async def is_enqueued():
        [row] = await sql("SELECT count(*) FROM headrace.job_ready")
        return row[0] == 1

    await wait_true(is_enqueued, what="a job is to build it")
    assert not await is_fast(feed)
    assert await drain(app) == {"done": 1}
    assert await is_fast(feed)


async def test_changes_that_are_left_have_a_line_together(feed, applier):
    """With Valkey away each write leaves its change; thousands may come in a second."""
    applier._valkey = Unreachable()
    with capture_logs() as lines:
        for number in range(50):
            assert not await applier.apply_or_defer([Change(Kind.POSTS, 1, number, ["a"], [5_000])])
    assert [one["event"] for one in lines] == ["feed_change_deferred"]


@pytest.mark.slow
async def test_what_could_not_be_brought_is_read_from_the_truth_until_it_is(feed, make_feed):
    """This process alone knows that the index lacks it.

    It brings it by itself, and others see it then.
    """
    other = make_feed()
    await feed.follow(7, 1)
    await feed.posts.add([NewPost(author=1, id="a"), NewPost(author=1, id="b")])
    applier = feed.index.applier
    applier._valkey = Unreachable()
    assert await feed.delete("a") == 1
    assert applier.has_deferred
    assert await ids(feed, 7) == ["b"]
    assert not await is_fast(feed)
    assert await ids(other, 7) == ["b", "a"]
    applier._valkey = feed.valkey
    await wait_true(lambda: is_fast(feed), what="it was brought")
    assert not applier.has_deferred
    assert await ids(other, 7) == ["b"]
    assert await is_fast(other)


@pytest.mark.slow
async def test_a_writer_who_was_cancelled_in_the_middle_reads_what_he_wrote(feed):
    await feed.follow(7, 1)
    await feed.post(1, "a")
    applier = feed.index.applier
    applier._valkey = Unreachable(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await feed.delete("a")
    applier._valkey = feed.valkey
    assert await ids(feed, 7) == []
    await wait_true(lambda: is_fast(feed), what="it was brought")
    assert await ids(feed, 7) == []


async def test_an_index_that_was_damaged_is_proved_so_and_repaired_in_place(feed, engines):
    await feed.follow(7, [1, 2, 3])
    for author in (1, 2, 3):
        await feed.post(author, f"p{author}")
    prefix = f"{engines.valkey.prefix}:{{f:0}}:"
    await engines.valkey.command("SREM", f"{prefix}f:7", 2)
    await engines.valkey.command("SADD", f"{prefix}f:7", 99)
    await engines.valkey.command("ZADD", f"{prefix}p:1", 2**52, "extra")
    for key in await engines.valkey.command("KEYS", f"{prefix}b:4:*"):
        await engines.valkey.command("SREM", key, 3)
    verified = await feed.index.verify()
    told = {(each.kind, each.entity): (each.missing, each.extra) for each in verified.differences}
    assert told == {("follows", 7): (1, 1), ("posts", 3): (1, 0), ("posts", 1): (7, 1)}
    assert await feed.index.rebuild_now() == 4
    assert (await feed.index.verify()).is_equal
    assert await ids(feed, 7) == ["p3", "p2", "p1"]


async def test_shards_stay_as_they_were_begun(make_feed):
    await make_feed(shards=2).follow(7, 1)
    with pytest.raises(FeedShardsFixed, match="uses 2 shards"):
        await make_feed(shards=3).follow(7, 1)


async def test_the_functions_load_with_the_flags_that_they_say(feed, engines):
    """Changes are made in a full memory, and what only reads may be asked of a replica."""
    await feed.index.ready()
    reply = await engines.valkey.command("FUNCTION", "LIST", "LIBRARYNAME", "headrace_feed_*")
    libraries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in reply]
    flags = {}
    for entry in [function for library in libraries for function in library[b"functions"]]:
        function = dict(zip(entry[::2], entry[1::2], strict=True))
        flags[function[b"name"].decode().split("_", 2)[2]] = set(function[b"flags"])
    assert {name for name, found in flags.items() if found == {b"no-writes"}} == {
        "page_v1",
        "status_v1",
        "posts_v1",
        "follows_v1",
    }
    assert {name for name, found in flags.items() if not found} == {"begin_v1", "finish_v1"}
