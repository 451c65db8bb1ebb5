"""Changes get into the index in order and once, whoever brings them, however often, whatever was lost."""

from __future__ import annotations

import pytest

from penstock.feed import store
from penstock.feed.apply import Applier
from penstock.feed.errors import FeedShardsFixed
from penstock.feed.model import Change, Kind
from penstock.testing import drain


@pytest.fixture
def applier(feed):
    """What brings changes."""
    return Applier(feed.postgres, feed.hot)


async def ids(feed, viewer):
    return [post.id for post in (await feed.page(viewer)).posts]


async def left(sql):
    [row] = await sql("SELECT count(*) FROM penstock.feed_outbox WHERE NOT is_swept")
    return row[0]


async def test_a_change_comes_once_and_in_order(feed, applier):
    await feed.ready()
    first = Change(Kind.POSTS, 1, 1, ["a"], [5_000])
    assert await feed.hot.change(0, Change(Kind.POSTS, 1, 2, ["b"], [6_000])) == ("gap", 0)
    assert await feed.hot.change(0, first) == ("ok", 0)
    assert await feed.hot.change(0, first) == ("old", 1)
    assert await feed.hot.change(0, Change(Kind.POSTS, 1, 3, ["a"], [-1])) == ("gap", 1)


async def test_changes_that_arrive_the_other_way_round_end_as_they_were_committed(feed, applier):
    await feed.ready()
    await feed.post(1, "a")
    _, followed = await store.follows.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    _, unfollowed = await store.follows.unfollow(feed.postgres, 7, [1])
    _, again = await store.follows.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    assert await applier.bring([again, followed])
    assert await ids(feed, 7) == ["a"]
    assert await applier.bring([unfollowed, followed, again])
    assert await ids(feed, 7) == ["a"]
    assert (await feed.verify()).is_equal


async def test_where_the_log_is_forgotten_the_whole_is_brought(feed, applier, sql):
    await feed.ready()
    await store.posts.post(feed.postgres, ids=["a"], authors=[1], ats=[None], refs=[None])
    await sql("DELETE FROM penstock.feed_outbox")
    await feed.follow(7, 1)
    await feed.post(1, "b")
    assert await ids(feed, 7) == ["b", "a"]
    assert (await feed.verify()).is_equal


async def test_the_sweep_brings_what_a_writer_left(feed, sweeper, sql):
    await feed.ready()
    await feed.post(1, "a")
    await store.follows.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    assert await ids(feed, 7) == []
    assert await sweeper.run_once(older_s=60) == 0
    assert await sweeper.run_once(older_s=0) == 1
    assert await ids(feed, 7) == ["a"]
    assert await left(sql) == 0
    assert await sweeper.run_once(older_s=0) == 0


async def test_swept_changes_are_forgotten_after_a_while(feed, sweeper, sql):
    await feed.post(1, "a")
    await sweeper.run_once(older_s=0)
    [row] = await sql("SELECT count(*) FROM penstock.feed_outbox")
    assert row[0] == 1
    await sql("UPDATE penstock.feed_outbox SET made_at = made_at - interval '1 hour'")
    await sweeper.run_once(older_s=0)
    [row] = await sql(
        "SELECT (SELECT count(*) FROM penstock.feed_outbox), forgotten FROM penstock.feed_index"
    )
    assert (row[0], row[1] > 0) == (0, True)


@pytest.mark.slow
async def test_a_server_that_lost_its_last_moments_gets_them_again(feed, sweeper, engines):
    """As after a power cut: the index is older than what was swept, and its server is another run."""
    await feed.follow(7, 1)
    await feed.post(1, "a")
    await sweeper.run_once(older_s=0)
    prefix = f"{engines.valkey.prefix}:{{f:0}}:"
    await engines.valkey.command("ZREM", f"{prefix}p:1", "a")
    await engines.valkey.command("ZADD", f"{prefix}p:1", 0, "")
    assert await ids(feed, 7) == []
    assert not (await feed.verify()).is_equal
    await engines.valkey.command("HSET", f"{prefix}m", "run", "the run before")
    assert await sweeper.run_once(older_s=0) == 1
    assert await ids(feed, 7) == ["a"]


async def test_a_server_that_is_an_old_copy_is_built_anew(feed, sweeper, engines, sql, app):
    await feed.post(1, "a")
    await sweeper.run_once(older_s=0)
    await sql("UPDATE penstock.feed_index SET forgotten = 1000000")
    prefix = f"{engines.valkey.prefix}:{{f:0}}:"
    await engines.valkey.command("HSET", f"{prefix}m", "run", "the run before")
    await sweeper.run_once(older_s=0)
    [row] = await sql("SELECT count(*) FROM penstock.job_ready")
    assert row[0] == 1
    assert await drain(app) == {"done": 1}


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
    verified = await feed.verify()
    told = {(each.kind, each.entity): (each.missing, each.extra) for each in verified.differences}
    assert told == {("follows", 7): (1, 1), ("posts", 3): (1, 0), ("posts", 1): (7, 1)}
    assert await feed.rebuild_now() == 4
    assert (await feed.verify()).is_equal
    assert await ids(feed, 7) == ["p3", "p2", "p1"]


async def test_shards_stay_as_they_were_begun(make_feed):
    await make_feed(shards=2).follow(7, 1)
    with pytest.raises(FeedShardsFixed, match="begun with 2"):
        await make_feed(shards=3).follow(7, 1)


async def test_the_functions_load_with_the_flags_that_they_say(feed, engines):
    """Changes are made in a full memory, and what only reads may be asked of a replica."""
    await feed.ready()
    reply = await engines.valkey.command("FUNCTION", "LIST", "LIBRARYNAME", "penstock_feed_v1")
    [library] = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in reply]
    flags = {}
    for entry in library[b"functions"]:
        function = dict(zip(entry[::2], entry[1::2], strict=True))
        flags[function[b"name"].decode().split("_", 2)[2]] = set(function[b"flags"])
    assert {name for name, found in flags.items() if found == {b"no-writes"}} == {
        "page_v1",
        "look_v1",
        "posts_v1",
        "follows_v1",
    }
    assert {name for name, found in flags.items() if not found} == {"begin_v1", "finish_v1"}
