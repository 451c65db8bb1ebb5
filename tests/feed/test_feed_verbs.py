"""Posts, follows and lists: names, scheduled posts, deletion handlers, imports, limits."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from feed_world import NOON, ids, walk

from headrace.feed import NewPost, PostDeleted
from headrace.feed.errors import (
    InvalidFeedId,
    InvalidFollow,
    InvalidLimit,
    InvalidPost,
    PostTaken,
    PostUnknown,
    TooManyFollows,
)
from headrace.feed.model import MuteOrBlock
from headrace.kernel.signing import CursorInvalid
from headrace.testing import drain

NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001
INVALID_IDS = (0, -1, 2**63, True, 1.5, "", "a b", "x" * 129, None, "0", "-5", "007", "9" * 30)
WRONG_TYPES = (b"ab", bytearray(b"a"), None, 1.5, object())


async def test_viewers_and_authors_may_have_names(make_feed):
    feed = make_feed(shards=2)
    await feed.follow("anna", ["bob", "5", 6])
    await feed.posts.add([NewPost(author=a, id=f"p-{a}") for a in ("bob", 5, 6, "carl")])
    page = await make_feed(shards=2).page("anna")
    assert [(post.id, post.author) for post in page.posts] == [
        ("p-6", 6),
        ("p-5", 5),
        ("p-bob", "bob"),
    ]
    assert {p.id for p in (await feed.follows.following("anna")).people} == {"bob", 5, 6}
    assert [p.id for p in (await feed.follows.followers("bob")).people] == ["anna"]
    assert (await feed.page("nobody")).posts == []
    assert await feed.unfollow("anna", ["carl", "nobody"]) == 0
    assert (await feed.index.verify()).is_equal


async def test_a_post_id_belongs_to_its_first_author(feed):
    first = await feed.post(1, "a", ref="x")
    assert await feed.post(1, "a") == first, "as stored"
    with pytest.raises(PostTaken):
        await feed.posts.add([NewPost(author=2, id="a"), NewPost(author=2, id="b")])
    with pytest.raises(PostUnknown):
        await feed.posts.find("b")
    assert (await feed.posts.find("a")).ref == "x"


async def test_a_scheduled_post_appears_at_its_time(feed, app, sql):
    await feed.follow(7, 1)
    await feed.post(1, "a")
    later = datetime.now(UTC) + timedelta(hours=1)
    assert (await feed.post(1, "b", at=later)).is_waiting
    await feed.post(1, "dropped", at=later)
    assert await ids(feed, 7) == ["a"]
    await feed.delete("dropped")
    await sql("UPDATE headrace.feed_post SET visible_at = now() WHERE state = 1")
    await sql("UPDATE headrace.job_ready SET run_at = now()")
    await feed.post(1, "c")
    assert await drain(app) == {"done": 2}
    assert await ids(feed, 7) == ["b", "c", "a"], "new when it becomes visible"
    assert not (await feed.posts.find("b")).is_waiting
    assert (await feed.index.verify()).is_equal


async def test_each_deletion_handler_has_its_own_queue(make_feed, registry, app):
    feed, calls = make_feed(), []

    @feed.posts.on_deleted
    async def drop_comments(post: PostDeleted):
        calls.append(("comments", post.id, post.author, post.ref))

    @feed.posts.on_deleted
    def drop_likes(post: PostDeleted):
        assert threading.current_thread() is not threading.main_thread()
        calls.append(("likes", post.id, post.author, post.ref))

    feed.register(registry)
    await feed.post("bob", "a", ref="x")
    await feed.post(2, "b", at=datetime.now(UTC) + timedelta(hours=1))
    assert await feed.delete(["a", "b", "none"]) == 2
    assert await feed.delete("a") == 0
    assert await drain(app) == {"done": 4}
    assert set(calls) == {
        (handler, *post)
        for handler in ("comments", "likes")
        for post in (("a", "bob", "x"), ("b", 2, None))
    }


async def test_lists_are_paged_latest_first_with_totals(feed, sql):
    await feed.follow(7, list(range(1, 26)))
    await sql("UPDATE headrace.feed_follow SET followed_at = now() - author * interval '1 minute'")

    async def following(size, cursor):
        people = await feed.follows.following(7, size, cursor=cursor)
        assert people.total == 25
        return [person.id for person in people.people], people.next

    assert await walk(following, 10) == list(range(1, 26))
    await feed.follows.mute(7, [3, 4])
    await feed.follows.block(7, 5)
    muted = await feed.follows.list_kind(7, MuteOrBlock.MUTE)
    assert {person.id for person in muted.people} == {3, 4}
    assert (await feed.follows.list_kind(7, MuteOrBlock.BLOCK)).total == 1


async def test_imports_have_any_size(feed):
    new = (NewPost(author=1 + n % 3, id=f"p{n}", at=NOON) for n in range(2_500))
    assert await feed.posts.import_all(new) == 2_500
    follows = [(viewer, author, NOON) for viewer in range(10, 30) for author in (1, 2, "2")]
    assert await feed.follows.import_all(follows) == 40
    assert len(await ids(feed, 29, limit=200)) == 200
    assert (await feed.index.verify()).is_equal


async def require_refused(error, calls, match=None):
    """Each call raises the error."""
    for call in calls:
        with pytest.raises(error, match=match):
            await call


async def test_invalid_arguments_are_refused_in_our_words(make_feed):
    feed = make_feed(follows_max=3)
    await feed.follow(7, [1, 2])
    await require_refused(TooManyFollows, [feed.follow(7, [3, 4])], "limit of 3")
    for bad in INVALID_IDS:
        calls = [feed.page(bad), feed.follow(7, [bad]), feed.post(bad, "p")]
        await require_refused(InvalidFeedId, calls)
    for bad in WRONG_TYPES:
        verbs = (feed.follow, feed.unfollow, feed.follows.mute, feed.follows.unblock)
        await require_refused(InvalidFeedId, [*(v(7, bad) for v in verbs), feed.delete(bad)])
    ids = ("", "x" * 65, "a b", 5)
    await require_refused(InvalidFeedId, [*(feed.post(1, i) for i in ids), feed.posts.add(5)])
    await require_refused(InvalidLimit, [feed.page(7, bad) for bad in (0, 201, True, "5")])
    samples = (0, -1, "5", 2**70)
    await require_refused(InvalidLimit, [feed.index.verify(sample=s) for s in samples], "sample")
    far = datetime.now(UTC) + timedelta(days=400)
    two = [NewPost(author=1, id="a"), NewPost(author=1, id="b", at=far)]
    for call, match in (
        (feed.post(1, "a", at=NAIVE), "time zone"),
        (feed.posts.add([NewPost(author=1, id="a")] * 2), "twice"),
        (feed.posts.add(two), r"'b'.*within a year"),
        *((feed.post(1, "a", ref=bad), "ref") for bad in (5, b"x", "\ud800")),
        *((feed.post(1, "a", at=bad), "expected a moment") for bad in ("2026", NOON.date(), 5)),
        *(
            (feed.posts.add(bad), "expected a NewPost")
            for bad in (["a"], "ab", [None], [{"author": 1, "id": "a"}])
        ),
    ):
        await require_refused(InvalidPost, [call], match)
    since = (NOON.isoformat(), NOON.date(), 5, NAIVE)
    await require_refused(InvalidFollow, [feed.follows.import_all([(7, 1, s)]) for s in since])
    assert (await feed.follows.following(7)).total == 2
    assert (await feed.pages.author_posts(1)).posts == []


async def test_cursors_are_valid_only_for_their_viewer(feed):
    await feed.follow(7, [1, 2])
    await feed.posts.add([NewPost(author=1, id="a"), NewPost(author=2, id="b")])
    page = await feed.page(7, 1)
    for cursor in (page.next, page.newest, "x", ""):
        calls = [
            feed.page(8, cursor=cursor),
            feed.page("nobody", cursor=cursor),
            feed.page("nobody", since=cursor),
            feed.pages.author_posts("nobody", cursor=cursor),
            feed.follows.following("nobody", cursor=cursor),
            feed.pages.set_marker("nobody", cursor),
            feed.pages.watch("nobody", since=cursor),
        ]
        await require_refused(CursorInvalid, calls)
    await require_refused(CursorInvalid, [feed.page(7, cursor=bad) for bad in (5, b"x")])
    assert await feed.pages._ids.find("nobody") is None, "a refused call stores no name"


@pytest.mark.slow
async def test_mutes_and_blocks_are_limited(feed, sql):
    await feed.follow(7, [1, 2])
    for kind in MuteOrBlock:
        await sql(
            "INSERT INTO headrace.feed_mute_block (viewer, author, kind)"
            f" SELECT 7, n, '{kind}' FROM generate_series(1001, 10999) n"
        )
        with pytest.raises(TooManyFollows, match=f"limit of 10000 {kind}s"):
            await feed.follows.set_kind(7, [1, 2], kind, is_set=True)
        for authors, is_set, changed in (([1], True, 1), ([1, 1001], True, 0), ([1, 2], False, 1)):
            assert await feed.follows.set_kind(7, authors, kind, is_set=is_set) == changed
        assert (await feed.follows.list_kind(7, kind)).total == 9_999
