"""Pages, markers, live positions and reasons: each write is visible on the next read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from feed_world import NOON, ids, walk

from headrace.feed import NewPost, store
from headrace.feed.errors import InvalidFeedId
from headrace.feed.worker import Sweeper

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
