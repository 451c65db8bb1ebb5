"""Pages, markers, live positions and reasons: each write is visible on the next read."""

from __future__ import annotations

import asyncio
import random
import sys
from datetime import UTC, datetime, timedelta

import pytest
from feed_world import NOON, ids, walk

from headrace.feed import NewPost, merge, ranking, store
from headrace.feed.errors import (
    InvalidFeedId,
    InvalidKind,
    InvalidPost,
    InvalidRanking,
    RankingFailed,
    RankingUnknown,
)
from headrace.feed.model import PAGE_MAX
from headrace.feed.worker import Sweeper
from headrace.kernel.signing import CursorInvalid

DAY = timedelta(days=1)
DAY_S = 86_400.0


def series(author, count, step, *, last=NOON):
    """Posts of an author, newest first, `step` apart."""
    return [NewPost(author=author, id=f"p{n:03}", at=last - n * step) for n in range(count)]


async def test_a_page_has_the_newest_posts_of_followed_authors(feed):
    await feed.follow(7, [1, 2])
    for number, author in enumerate([1, 2, 3, 1]):
        await feed.post(author, f"p{number}")
    page = await feed.page(7)
    assert [(post.id, post.author) for post in page.posts] == [("p3", 1), ("p1", 2), ("p0", 1)]
    assert (page.next, page.is_slow) == (None, False)
    assert await ids(feed, 8) == []


async def test_pages_continue_where_the_last_one_ended(feed):
    await feed.follow(7, [1, 2])
    posts = [NewPost(author=1 + n % 2, id=p.id, at=p.at) for n, p in enumerate(series(1, 25, DAY))]
    await feed.posts.add(posts)

    async def own(size, cursor):
        page = await feed.pages.author_posts(2, size, cursor=cursor)
        return [post.id for post in page.posts], page.next

    async def all_of(size, cursor):
        page = await feed.page(7, size, cursor=cursor)
        return [post.id for post in page.posts], page.next

    assert await walk(all_of, 10) == [post.id for post in posts]
    assert await walk(own, 5) == [post.id for post in posts[1::2]]


async def test_pages_of_rare_kinds_continue_until_the_end(feed, make_feed, monkeypatch):
    monkeypatch.setattr(merge, "SCANNED_MAX", 400)
    await feed.follow(7, [1, "ann"])
    at = [NOON - n * timedelta(minutes=1) for n in range(900)]
    kinds = {0: "video", 500: "video", 899: "video"}
    await feed.posts.add(
        [
            NewPost(author=1 if n % 2 else "ann", id=f"p{n}", at=at[n], kind=kinds.get(n, "text"))
            for n in range(900)
        ]
    )

    async def videos(size, cursor):
        page = await feed.page(7, size, cursor=cursor, kinds=["video"])
        return [(post.id, post.kind) for post in page.posts], page.next

    expected = [("p0", "video"), ("p500", "video"), ("p899", "video")]
    for size in (1, 2, 20):
        assert await walk(videos, size) == expected
    await feed.valkey.drop()
    assert (await feed.page(7, kinds=["video"])).is_slow
    assert await walk(videos, 2) == expected
    assert [p.id for p in (await feed.pages.author_posts(1, kinds=["video"])).posts] == ["p899"]
    assert await feed.delete(["p0", "p899"]) == 2
    assert await walk(videos, 2) == [("p500", "video")]
    for wrong in ("", "Video", "a b", "x" * 17, ["a"] * 17, [], [1], ["a", ""], "a\0"):
        with pytest.raises(InvalidKind):
            await feed.page(7, kinds=wrong)
        if isinstance(wrong, str):
            with pytest.raises(InvalidPost):
                await feed.post(1, "new", kind=wrong)


async def test_unread_of_rare_kinds_counts_to_the_limit_of_the_scan(feed, monkeypatch):
    await feed.follow(7, [1])
    await feed.posts.add(
        [
            NewPost(author=1, id=f"p{n}", at=NOON - n * timedelta(minutes=1), kind=kind)
            for n, kind in enumerate(["video", *["text"] * 298, "video"])
        ]
    )

    async def unread():
        found = await feed.pages.unread(7, kinds=["video"])
        return found.count, found.has_more

    await feed.index.rebuild_now()
    assert await unread() == (2, False)
    monkeypatch.setattr(merge, "SCANNED_MAX", PAGE_MAX)
    assert await unread() == (1, True)


async def test_the_index_equals_postgres_with_kinds_after_a_rebuild(feed):
    await feed.posts.add([NewPost(author=1, id=f"p{n}", kind="photo") for n in range(3)])
    await feed.post(1, "plain")
    assert (await feed.index.verify(sample=None)).is_equal
    await feed.valkey.drop()
    await feed.index.rebuild_now()
    assert (await feed.index.verify(sample=None)).is_equal
    await feed.follow(7, 1)
    newest = (await feed.page(7, 1)).newest
    assert await ids(feed, 7, since=newest) == []
    await feed.post(1, "later", kind="photo")
    newest = (await feed.page(7, 1)).newest
    assert await ids(feed, 7, since=newest) == []


async def test_a_ranking_orders_windows_of_the_newest_posts(feed):
    calls = []

    async def by_id(viewer, posts):
        calls.append((viewer, len(posts)))
        return sorted((post for post in posts if post.id != "p005"), key=lambda post: post.id)

    feed.pages.rankings.define("by-id", by_id, newest=10)
    await feed.follow(7, 1)
    await feed.posts.add(series(1, 25, DAY))

    async def ranked(size, cursor):
        page = await feed.page(7, size, cursor=cursor, rank="by-id")
        return [post.id for post in page.posts], page.next

    expected = [f"p{n:03}" for n in range(25) if n != 5]
    assert await walk(ranked, 4) == expected
    assert calls[0] == (7, 10)
    assert (await feed.page(7, 1, rank="by-id")).posts[0].id == "p000"
    # New and deleted posts do not repeat or omit others of a window that is being read.
    first = await feed.page(7, 4, rank="by-id")
    await feed.post(1, "new")
    await feed.delete(["p001", "p003"])
    second = await feed.page(7, 4, rank="by-id", cursor=first.next)
    assert [post.id for post in second.posts] == ["p004", "p006", "p007", "p008"]
    assert await ids(feed, 8, rank="by-id") == []


async def test_a_ranking_that_changes_its_order_repeats_and_omits_nothing(feed):
    shuffle = random.Random(1)
    feed.pages.rankings.define(
        "random", lambda _, posts: shuffle.sample(posts, len(posts)), newest=200
    )
    await feed.follow(7, 1)
    await feed.posts.add(series(1, 450, DAY / 24))

    async def ranked(size, cursor):
        page = await feed.page(7, size, cursor=cursor, rank="random")
        assert page.next is None or len(page.next) < 2_048
        return [post.id for post in page.posts], page.next

    for size in (1, 30, 200):
        found = await walk(ranked, size)
        assert sorted(found) == sorted(set(found)) == [f"p{n:03}" for n in range(450)]


async def test_faults_of_rankings_are_named(feed, monkeypatch):
    with pytest.raises(RankingUnknown):
        await feed.page(7, rank="hot")
    await feed.follow(7, 1)
    await feed.posts.add(series(1, 3, DAY))
    rankings = feed.pages.rankings
    rankings.define("twice", lambda _, posts: [*posts, posts[0]], newest=10)
    rankings.define("reversed", lambda _, posts: posts[::-1], newest=10)
    faults = {
        "twice": "returned a post that it was not given, or one twice",
        "exits": "raised SystemExit",
        "raises": "raised KeyError",
        "nothing": "returned a NoneType",
        "slow": "did not end within 0 s",
    }
    monkeypatch.setattr(ranking, "TIMEOUT_S", 0.05)

    async def slow(viewer, posts):
        await asyncio.Event().wait()

    rankings.define("exits", lambda *_: sys.exit(3), newest=10)
    rankings.define("raises", lambda *_: {}["x"], newest=10)
    rankings.define("nothing", lambda *_: None, newest=10)
    rankings.define("slow", slow, newest=10)
    for name, fault in faults.items():
        with pytest.raises(RankingFailed, match=f"{name!r} {fault}"):
            await feed.page(7, rank=name)
    with pytest.raises(
        RankingUnknown, match="defined: exits, nothing, raises, reversed, slow, twice"
    ):
        await feed.page(7, rank="hot")
    for name, newest in (("twice", 10), ("A", 10), ("", 10), ("x", 0), ("x", 201), ("x", True)):
        with pytest.raises(InvalidRanking):
            rankings.define(name, lambda _, posts: posts, newest=newest)
    plain = (await feed.page(7, 1)).next
    ranked = (await feed.page(7, 1, rank="reversed")).next
    for cursor, rank in ((plain, "reversed"), (ranked, None), (ranked, "twice"), ("x", "reversed")):
        with pytest.raises(CursorInvalid):
            await feed.page(7, 1, rank=rank, cursor=cursor)


async def test_every_write_is_visible_on_the_next_read(feed):
    await feed.follow(7, [1, 2])
    await feed.post(1, "a")
    await feed.post(2, "b")
    follows = feed.follows
    for call, changed, shown in (
        (lambda: feed.delete("a"), 1, ["b"]),
        (lambda: feed.unfollow(7, 2), 1, []),
        (lambda: feed.follow(7, 2), 1, ["b"]),
        (lambda: follows.mute(7, 2), 1, []),
        (lambda: follows.unmute(7, 2), 1, ["b"]),
        (lambda: follows.block(2, 7), 1, []),
        (lambda: follows.unblock(2, 7), 1, ["b"]),
        (lambda: follows.unfollow_all(7), 2, []),
    ):
        assert await call() == changed
        assert await ids(feed, 7) == shown


async def test_marker_and_unread(feed):
    await feed.follow(7, 1)
    assert (await feed.pages.unread(7)).count == 0
    await feed.posts.add(series(1, 150, timedelta(seconds=1)))
    unread = await feed.pages.unread(7)
    assert (unread.count, unread.has_more) == (100, True)
    page = await feed.page(7, 5)
    assert (await feed.pages.set_marker(7, page.next)).post == "p004"
    assert (await feed.pages.unread(7)).count == 4
    assert (await feed.pages.set_marker(7)).post == "p000"
    assert (await feed.pages.set_marker(7, page.next)).post == "p000", "never back"
    assert (await feed.pages.unread(7)).count == 0
    await feed.post(1, "new")
    assert await ids(feed, 7, since=(await feed.pages.marker(7)).position) == ["new"]


async def test_a_watch_returns_new_posts_once(feed):
    await feed.follow(7, 1)
    await feed.post(1, "old")
    watch = await feed.pages.watch(7)
    assert (await watch.poll()).posts == []
    await feed.post(1, "a")
    await feed.post(2, "other")
    assert [post.id for post in (await watch.poll()).posts] == ["a"]
    assert (await watch.poll()).posts == []
    await feed.post(1, "b")
    again = await feed.pages.watch(7, since=watch.position)
    assert [post.id for post in (await again.poll()).posts] == ["b"]


@pytest.mark.slow
async def test_posts_older_than_the_index_are_read_from_postgres_by_followers_of_their_author(
    make_feed,
):
    feed = make_feed(index_for_s=30 * DAY_S, shards=2)
    await feed.index.rebuild_now(clean=True)
    now = datetime.now(UTC)
    viewers = (1, 2, 3, 4)
    for viewer in viewers:
        await feed.follow(viewer, viewer)
        await feed.posts.add(
            [NewPost(author=viewer, id=f"p{viewer}-{d}", at=now - d * DAY) for d in (1, 9)]
        )

    async def slow():
        return [viewer for viewer in viewers if (await feed.page(viewer)).is_slow]

    await feed.post(1, "old", at=now - 100 * DAY)
    assert await slow() == [1]
    assert await ids(feed, 1) == ["p1-1", "p1-9", "old"]
    await feed.follow(2, 1)
    assert await ids(feed, 2, limit=9) == ["p2-1", "p1-1", "p2-9", "p1-9", "old"]
    await feed.delete("p3-9")
    await Sweeper(make_feed(index_for_s=5 * DAY_S, shards=2)).trim()
    assert await slow() == [1, 2, 3, 4]
    assert await ids(feed, 4) == ["p4-1", "p4-9"]
    await feed.delete("p4-9")
    await feed.index.rebuild_now(clean=True)
    assert await slow() == [1, 2]


async def test_old_posts_are_trimmed_from_the_index_and_still_on_pages(make_feed, engines):
    feed, older = make_feed(index_for_s=10 * DAY_S, keep_for_s=60 * DAY_S), make_feed()
    await older.follow(7, 1)
    posts = series(1, 100, DAY, last=datetime.now(UTC))
    await older.posts.add(posts)
    before = len(await engines.valkey.command("KEYS", f"{engines.valkey.prefix}:*"))
    await Sweeper(feed).trim()
    start = f"{engines.valkey.prefix}:{{f:0}}:"
    assert 11 <= await engines.valkey.command("ZCARD", f"{start}p:1") <= 12
    assert len(await engines.valkey.command("KEYS", f"{start}b:*")) < before / 2
    first = await feed.page(7, 9)
    second = await feed.page(7, 20, cursor=first.next)
    assert (first.is_slow, second.is_slow) == (False, True)
    assert [post.id for post in [*first.posts, *second.posts]] == [p.id for p in posts[:29]]
    assert (await feed.index.verify()).is_equal
    await feed.index.retain()
    assert await ids(feed, 7, limit=200) == [post.id for post in posts[:60]]


async def codes(feed, viewer, post):
    """Whether a post is shown, and the reasons."""
    why = await feed.pages.why(viewer, post)
    return why.is_shown, [reason.code for reason in why.reasons]


async def test_why_names_every_reason_that_hides_a_post(feed):
    await feed.post(1, "later", at=datetime.now(UTC) + DAY / 24)
    await feed.follows.mute(7, 1)
    await feed.follows.block(7, 1)
    await feed.follows.block(1, 7)
    reasons = ["waits", "not_followed", "muted", "blocked", "blocked_by_author"]
    assert await codes(feed, 7, "later") == (False, reasons)
    why = await feed.pages.why(7, "later")
    assert why.reasons[0].at == why.at
    assert all(reason.at for reason in why.reasons if reason.code != "not_followed")
    await feed.follow(8, [1, 2])
    for author, post in ((1, "a"), (2, "a-"), (1, "aa"), (2, "b")):
        await feed.post(author, post, at=NOON)
    for post in ("a", "a-", "aa", "b"):
        assert await codes(feed, 8, post) == (True, ["followed"]), "one moment, four posts"


async def test_why_names_an_index_that_differs(feed, sweeper, engines):
    await feed.index.ready()
    await feed.post(1, "a")
    await store.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    assert await codes(feed, 7, "a") == (False, ["index_behind"])
    await sweeper.run_once(older_s=0)
    assert await codes(feed, 7, "a") == (True, ["followed"])
    await store.unfollow(feed.postgres, 7, [1])
    assert await codes(feed, 7, "a") == (True, ["not_followed", "index_behind"])
    await feed.follow(8, 1)
    await store.delete_posts(feed.postgres, ["a"])
    assert await codes(feed, 8, "a") == (False, ["unknown"])
    await feed.post(1, "b")
    await engines.valkey.command("DEL", f"{engines.valkey.prefix}:{{f:0}}:m")
    why = await feed.pages.why(8, "b")
    assert (why.is_shown, why.is_slow) == (True, True)
    for viewer, post in (("b b", "a"), (7, "a b"), (7, "x" * 65)):
        with pytest.raises(InvalidFeedId):
            await feed.pages.why(viewer, post)
