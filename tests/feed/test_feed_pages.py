"""A page: the newest posts of those whom a viewer follows, at once, whole, in order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from headrace.feed import NewPost

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


async def ids(feed, viewer, **options):
    return [post.id for post in (await feed.page(viewer, **options)).posts]


async def test_a_page_shows_the_newest_posts_of_the_followed(feed):
    await feed.follow(7, [1, 2])
    for number, author in enumerate([1, 2, 3, 1]):
        await feed.post(author, f"p{number}")
    page = await feed.page(7)
    assert [(post.id, post.author) for post in page.posts] == [("p3", 1), ("p1", 2), ("p0", 1)]
    assert page.next is None
    assert not page.is_slow
    assert await ids(feed, 8) == []


async def test_pages_go_on_where_the_last_one_ended(feed):
    await feed.follow(7, [1, 2])
    posts = [
        NewPost(author=1 + n % 2, id=f"p{n:02}", at=NOON + timedelta(seconds=n)) for n in range(25)
    ]
    await feed.posts.add(posts)
    seen, cursor = [], None
    while True:
        page = await feed.page(7, 10, cursor=cursor)
        seen += [post.id for post in page.posts]
        cursor = page.next
        if cursor is None:
            break
    assert seen == [f"p{n:02}" for n in reversed(range(25))]


async def test_what_is_undone_is_gone_on_the_next_read(feed):
    await feed.follow(7, [1, 2])
    await feed.post(1, "a")
    await feed.post(2, "b")
    assert await feed.delete("a") == 1
    assert await ids(feed, 7) == ["b"]
    assert await feed.unfollow(7, 2) == 1
    assert await ids(feed, 7) == []
    assert await feed.follow(7, 2) == 1
    assert await ids(feed, 7) == ["b"]
    assert await feed.follows.mute(7, 2) == 1
    assert await ids(feed, 7) == []
    assert await feed.follows.unmute(7, 2) == 1
    assert await ids(feed, 7) == ["b"]
    assert await feed.follows.block(2, 7) == 1
    assert await ids(feed, 7) == []
    assert await feed.follows.unblock(2, 7) == 1
    assert await feed.follows.unfollow_all(7) == 2
    assert await ids(feed, 7) == []
