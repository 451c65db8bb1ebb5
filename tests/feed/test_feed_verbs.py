"""What goes with pages.

Names, later posts, deletions and what hangs on them, markers, lists, imports, bounds.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from headrace.feed import NewPost, PostDeleted
from headrace.feed.errors import (
    InvalidFeedId,
    InvalidFollow,
    InvalidLimit,
    InvalidPost,
    PostTaken,
    PostUnknown,
    TooManyFollows,
    TooManyMutesBlocks,
)
from headrace.feed.model import MuteOrBlock
from headrace.feed.worker import Sweeper
from headrace.kernel.signing import CursorInvalid
from headrace.testing import drain

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


async def ids(feed, viewer, **options):
    return [post.id for post in (await feed.page(viewer, **options)).posts]


async def test_names_stand_for_viewers_and_authors(make_feed):
    feed = make_feed(shards=2)
    await feed.follow("anna", ["bob", "5", 6])
    await feed.posts.add([NewPost(author=a, id=f"p-{a}") for a in ("bob", 5, 6, "carl")])
    page = await make_feed(shards=2).page("anna")
    assert [(post.id, post.author) for post in page.posts] == [
        ("p-6", 6),
        ("p-5", 5),
        ("p-bob", "bob"),
    ]
    people = await feed.follows.following("anna")
    assert {person.id for person in people.people} == {"bob", 5, 6}
    assert [person.id for person in (await feed.follows.followers("bob")).people] == ["anna"]
    assert (await feed.page("nobody")).posts == []
    assert await feed.unfollow("anna", ["carl", "nobody"]) == 0
    assert (await feed.index.verify()).is_equal


async def test_a_post_again_changes_nothing_and_another_authors_is_refused(feed):
    first = await feed.post(1, "a", ref="x")
    assert (await feed.post(1, "a")).at == first.at
    with pytest.raises(PostTaken):
        await feed.posts.add([NewPost(author=2, id="a"), NewPost(author=2, id="b")])
    with pytest.raises(PostUnknown):
        await feed.posts.find("b")
    assert (await feed.posts.find("a")).ref == "x"


async def test_a_later_post_is_shown_when_its_moment_comes(feed, app, sql):
    await feed.follow(7, 1)
    await feed.post(1, "a")
    later = await feed.post(1, "b", at=datetime.now(UTC) + timedelta(hours=1))
    await feed.post(1, "dropped", at=datetime.now(UTC) + timedelta(hours=1))
    assert later.is_waiting
    assert await ids(feed, 7) == ["a"]
    await feed.delete("dropped")
    await sql("UPDATE headrace.feed_post SET visible_at = now() WHERE state = 1")
    await sql("UPDATE headrace.job_ready SET run_at = now()")
    await feed.post(1, "c")
    assert await drain(app) == {"done": 2}
    assert await ids(feed, 7) == ["b", "c", "a"], "it is new when it is shown"
    assert not (await feed.posts.find("b")).is_waiting
    assert (await feed.index.verify()).is_equal


async def test_each_handler_of_deletions_has_a_queue_of_its_own(make_feed, registry, app):
    feed, told = make_feed(), []

    @feed.posts.on_deleted
    async def drop_comments(post: PostDeleted):
        told.append(("comments", post.id, post.author, post.ref))

    @feed.posts.on_deleted
    async def drop_likes(post: PostDeleted):
        told.append(("likes", post.id, post.author, post.ref))

    feed.register(registry)
    await feed.post("bob", "a", ref="x")
    await feed.post(2, "b", at=datetime.now(UTC) + timedelta(hours=1))
    assert await feed.delete(["a", "b", "none"]) == 2
    assert await feed.delete("a") == 0
    assert await drain(app) == {"done": 4}
    assert sorted(told, key=str) == sorted(
        [
            (each, *post)
            for each in ("comments", "likes")
            for post in (("a", "bob", "x"), ("b", 2, None))
        ],
        key=str,
    )


async def test_marker_and_unread(feed):
    await feed.follow(7, 1)
    assert (await feed.pages.unread(7)).count == 0
    await feed.posts.add(
        [NewPost(author=1, id=f"p{n:03}", at=NOON + timedelta(seconds=n)) for n in range(150)]
    )
    unread = await feed.pages.unread(7)
    assert (unread.count, unread.has_more) == (100, True)
    page = await feed.page(7, 5)
    marker = await feed.pages.set_marker(7, page.next)
    assert (marker.post, (await feed.pages.unread(7)).count) == ("p145", 4)
    assert (await feed.pages.set_marker(7)).post == "p149"
    assert (await feed.pages.set_marker(7, page.next)).post == "p149", "never back"
    assert (await feed.pages.unread(7)).count == 0
    await feed.post(1, "new")
    assert await ids(feed, 7, since=(await feed.pages.marker(7)).position) == ["new"]


async def test_lists_are_paged_latest_first_with_totals(feed, sql):
    await feed.follow(7, list(range(1, 26)))
    await sql("UPDATE headrace.feed_follow SET followed_at = now() - author * interval '1 minute'")
    seen, cursor = [], None
    while True:
        people = await feed.follows.following(7, 10, cursor=cursor)
        assert people.total == 25
        seen += [person.id for person in people.people]
        cursor = people.next
        if cursor is None:
            break
    assert seen == list(range(1, 26))
    await feed.follows.mute(7, [3, 4])
    await feed.follows.block(7, 5)
    assert {person.id for person in (await feed.follows.list_kind(7, MuteOrBlock.MUTE)).people} == {
        3,
        4,
    }
    assert (await feed.follows.list_kind(7, MuteOrBlock.BLOCK)).total == 1


async def test_an_authors_own_posts_are_paged(feed):
    await feed.posts.add(
        [NewPost(author=1, id=f"p{n}", at=NOON + timedelta(seconds=n)) for n in range(5)]
    )
    page = await feed.pages.author_posts(1, 3)
    assert [post.id for post in page.posts] == ["p4", "p3", "p2"]
    page = await feed.pages.author_posts(1, 3, cursor=page.next)
    assert [post.id for post in page.posts] == ["p1", "p0"]
    assert page.next is None


async def test_imports_of_any_size(feed):
    new = (NewPost(author=1 + n % 3, id=f"p{n}", at=NOON) for n in range(2_500))
    assert await feed.posts.import_all(new) == 2_500
    follows = [(viewer, author, NOON) for viewer in range(10, 30) for author in (1, 2, "2")]
    assert await feed.follows.import_all(follows) == 40
    assert len(await ids(feed, 29, limit=200)) == 200
    assert (await feed.index.verify()).is_equal


async def test_a_watcher_is_told_of_what_is_new_once(feed):
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


async def test_old_posts_are_read_from_postgresql(make_feed):
    feed = make_feed(index_for_s=86_400.0 * 30)
    await feed.index.rebuild_now(clean=True)
    await feed.follow(7, 1)
    now = datetime.now(UTC)
    await feed.posts.add(
        [NewPost(author=1, id=f"d{day:03}", at=now - timedelta(days=day)) for day in range(100)]
    )
    page = await feed.page(7, 20)
    assert not page.is_slow
    page = await feed.page(7, 20, cursor=page.next)
    assert page.is_slow
    assert [post.id for post in page.posts] == [f"d{day:03}" for day in range(20, 40)]
    await feed.index.rebuild_now(clean=True)
    assert len((await feed.page(7, 200)).posts) == 100
    assert (await feed.index.verify()).is_equal


@pytest.mark.slow
async def test_an_old_post_makes_slow_only_pages_of_those_who_follow_its_author(make_feed):
    """Posts from before the index, of one author: added, or left behind by a floor that rose."""
    feed = make_feed(index_for_s=86_400.0 * 30, shards=2)
    await feed.index.rebuild_now(clean=True)
    now = datetime.now(UTC)
    for viewer in (1, 2, 3, 4):
        await feed.follow(viewer, viewer)
        await feed.posts.add(
            [
                NewPost(author=viewer, id=f"p{viewer}-{d}", at=now - timedelta(days=d))
                for d in (1, 9)
            ]
        )
    await feed.post(1, "old", at=now - timedelta(days=100))
    slow = [(await feed.page(viewer)).is_slow for viewer in (1, 2, 3, 4)]
    assert slow == [True, False, False, False]
    assert await ids(feed, 1) == ["p1-1", "p1-9", "old"]
    await feed.follow(2, 1)
    assert await ids(feed, 2, limit=9) == ["p2-1", "p1-1", "p2-9", "p1-9", "old"]
    await feed.delete("p3-9")
    await Sweeper(make_feed(index_for_s=86_400.0 * 5, shards=2)).trim()
    slow = [(await feed.page(viewer)).is_slow for viewer in (1, 2, 3, 4)]
    assert slow == [True, True, True, True]
    assert await ids(feed, 4) == ["p4-1", "p4-9"]
    await feed.delete("p4-9")
    await feed.index.rebuild_now(clean=True)
    slow = [(await feed.page(viewer)).is_slow for viewer in (1, 2, 3, 4)]
    assert slow == [True, True, False, False]


async def test_what_is_too_old_for_the_index_is_trimmed_from_it(make_feed, engines):
    feed, older = make_feed(index_for_s=86_400.0 * 10), make_feed()
    await older.follow(7, 1)
    now = datetime.now(UTC)
    days = [NewPost(author=1, id=f"d{day:02}", at=now - timedelta(days=day)) for day in range(30)]
    await older.posts.add(days)
    before = len(await engines.valkey.command("KEYS", f"{engines.valkey.prefix}:*"))
    await Sweeper(feed).trim()
    prefix = f"{engines.valkey.prefix}:{{f:0}}:"
    assert 11 <= await engines.valkey.command("ZCARD", f"{prefix}p:1") <= 12
    assert len(await engines.valkey.command("KEYS", f"{prefix}b:*")) < before / 2
    assert await ids(feed, 7, limit=50) == [post.id for post in days]
    assert (await feed.index.verify()).is_equal


async def test_posts_older_than_they_are_kept_go(make_feed):
    feed = make_feed(index_for_s=86_400.0 * 30, keep_for_s=86_400.0 * 60)
    await feed.index.rebuild_now(clean=True)
    await feed.follow(7, 1)
    now = datetime.now(UTC)
    await feed.posts.add(
        [NewPost(author=1, id=f"d{day}", at=now - timedelta(days=day)) for day in (1, 50, 70)]
    )
    await feed.index.retain()
    assert await ids(feed, 7) == ["d1", "d50"]


async def test_bounds(make_feed):
    feed = make_feed(follows_max=3)
    await feed.follow(7, [1, 2])
    with pytest.raises(TooManyFollows, match="limit of 3"):
        await feed.follow(7, [3, 4])
    assert (await feed.follows.following(7)).total == 2
    for bad in (0, -1, 2**63, True, 1.5, "", "a b", "x" * 129, None, "0", "-5", "007", "9" * 30):
        with pytest.raises(InvalidFeedId):
            await feed.page(bad)
        with pytest.raises(InvalidFeedId):
            await feed.follow(7, [bad])
        with pytest.raises(InvalidFeedId):
            await feed.post(bad, "p")
    for bad in ("", "x" * 65, "a b", 5):
        with pytest.raises(InvalidFeedId):
            await feed.post(1, bad)
    for bad in (0, 201, True, "5"):
        with pytest.raises(InvalidLimit):
            await feed.page(7, bad)
    for bad in (0, -1, "5", 2**70):
        with pytest.raises(InvalidLimit, match="sample"):
            await feed.index.verify(sample=bad)
    with pytest.raises(InvalidPost, match="time zone"):
        await feed.post(1, "a", at=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidPost, match="twice"):
        await feed.posts.add([NewPost(author=1, id="a")] * 2)
    page = await feed.page(7)
    for bad in ("", "nonsense", (await feed.pages.set_marker(7)).position or "x"):
        with pytest.raises(CursorInvalid):
            await feed.page(8, cursor=bad)
    assert page.posts == []


async def test_wrong_types_are_refused_in_our_words(feed):
    """Never in those of a driver, and nothing is done."""
    for bad in (b"ab", bytearray(b"a"), None, 1.5, object()):
        for verb in (feed.follow, feed.unfollow, feed.follows.mute, feed.follows.unblock):
            with pytest.raises(InvalidFeedId):
                await verb(7, bad)
        with pytest.raises(InvalidFeedId):
            await feed.delete(bad)
    for bad in (NOON.isoformat(), NOON.date(), 5):
        with pytest.raises(InvalidPost, match="expected a moment"):
            await feed.post(1, "a", at=bad)
        with pytest.raises(InvalidFollow):
            await feed.follows.import_all([(7, 1, bad)])
    with pytest.raises(InvalidFollow):
        await feed.follows.import_all([(7, 1, datetime(2026, 1, 1))])  # noqa: DTZ001
    for bad in (5, b"x", "\ud800"):
        with pytest.raises(InvalidPost, match="ref"):
            await feed.post(1, "a", ref=bad)
    for bad in (["a"], "ab", [None], [{"author": 1, "id": "a"}]):
        with pytest.raises(InvalidPost, match="expected a NewPost"):
            await feed.posts.add(bad)
    with pytest.raises(InvalidFeedId):
        await feed.posts.add(5)
    for bad in (5, b"x"):
        with pytest.raises(CursorInvalid):
            await feed.page(7, cursor=bad)
    assert (await feed.follows.following(7)).total == 0
    assert (await feed.pages.author_posts(1)).posts == []


async def test_a_moment_too_far_ahead_is_refused_and_nothing_is_posted(feed):
    far = datetime.now(UTC) + timedelta(days=400)
    with pytest.raises(InvalidPost, match=r"'b'.*within a year"):
        await feed.posts.add([NewPost(author=1, id="a"), NewPost(author=1, id="b", at=far)])
    with pytest.raises(PostUnknown):
        await feed.posts.find("a")


async def test_nobody_can_have_a_cursor_of_a_name_that_was_never_met(feed):
    await feed.follow(7, [1, 2])
    await feed.posts.add([NewPost(author=1, id="a"), NewPost(author=2, id="b")])
    page = await feed.page(7, 1)
    for told in (page.next, page.newest, "x", ""):
        for asked in (
            feed.page("nobody", cursor=told),
            feed.page("nobody", since=told),
            feed.pages.author_posts("nobody", cursor=told),
            feed.follows.following("nobody", cursor=told),
            feed.pages.set_marker("nobody", told),
            feed.pages.watch("nobody", since=told),
        ):
            with pytest.raises(CursorInvalid):
                await asked
    assert await feed.pages._ids.find("nobody") is None


@pytest.mark.slow
async def test_mutes_and_blocks_are_bounded(feed, sql):
    await feed.follow(7, [1, 2])
    for kind in MuteOrBlock:
        await sql(
            "INSERT INTO headrace.feed_mute_block (viewer, author, kind)"
            f" SELECT 7, n, '{kind}' FROM generate_series(1001, 10999) n"
        )
        with pytest.raises(TooManyMutesBlocks, match=f"limit of 10000 {kind}s"):
            await feed.follows.set_kind(7, [1, 2], kind, is_set=True)
        assert await feed.follows.set_kind(7, [1], kind, is_set=True) == 1
        assert await feed.follows.set_kind(7, [1, 1001], kind, is_set=True) == 0
        assert (await feed.follows.list_kind(7, kind)).total == 10_000
        assert await feed.follows.set_kind(7, [1, 2], kind, is_set=False) == 1
