"""Examples of the feed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from headrace import Headrace
from headrace.feed import NewPost

app = Headrace()


async def main() -> None:
    """Every call, in an order that works."""
    await posts_and_pages()
    await follows_and_index()
    await app.close()


async def posts_and_pages() -> None:
    """`app.feed.posts` and `app.feed.pages`."""
    #: app.feed.follows.follow
    await app.feed.follow(7, [1, 2, 3])  # viewer 7 follows three authors
    #: app.feed.posts.post
    await app.feed.post(1, "item:1", kind="photo")
    #: app.feed.posts.add
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    await app.feed.posts.add(
        [NewPost(author=2, id="item:2"), NewPost(author=2, id="item:3", at=tomorrow)]
    )
    #: app.feed.posts.import_all
    count = await app.feed.posts.import_all(NewPost(author=3, id=f"old:{n}") for n in range(3))
    #: app.feed.posts.find
    post = await app.feed.posts.find("item:3")
    print(post.is_waiting)
    #: app.feed.pages.page
    page = await app.feed.page(7, limit=20)
    following = await app.feed.page(7, cursor=page.next) if page.next else None
    #: app.feed.pages.why
    why = await app.feed.pages.why(7, "item:3")
    print(why.is_shown, [reason.text for reason in why.reasons])
    #: app.feed.pages.unread
    unread = (await app.feed.pages.unread(7)).count
    #: app.feed.pages.set_marker
    await app.feed.pages.set_marker(7, page.newest)
    #: app.feed.pages.marker
    marker = await app.feed.pages.marker(7)
    #: app.feed.pages.author_posts
    own = await app.feed.pages.author_posts(1, limit=20)
    #: app.feed.pages.watch
    live = await app.feed.pages.watch(7, since=page.newest)
    #: -
    assert (count, len(page.posts), following, unread) == (3, 5, None, 5)
    assert marker.position
    assert len(own.posts) == 1
    assert live


async def follows_and_index() -> None:
    """`app.feed.follows` and `app.feed.index`."""
    #: app.feed.posts.delete
    await app.feed.delete("item:1")
    #: app.feed.follows.following
    people = await app.feed.follows.following(7)
    print(people.total, [person.id for person in people.people])
    #: app.feed.follows.followers
    followers = (await app.feed.follows.followers(1)).total
    #: app.feed.follows.mute
    await app.feed.follows.mute(7, 2)
    #: app.feed.follows.muted
    muted = [person.id for person in (await app.feed.follows.muted(7)).people]
    #: app.feed.follows.unmute
    await app.feed.follows.unmute(7, 2)
    #: app.feed.follows.block
    await app.feed.follows.block(7, 3)
    #: app.feed.follows.blocked
    blocked = [person.id for person in (await app.feed.follows.blocked(7)).people]
    #: app.feed.follows.unblock
    await app.feed.follows.unblock(7, 3)
    #: app.feed.follows.unfollow
    await app.feed.unfollow(7, [1, 2])
    #: app.feed.follows.unfollow_all
    await app.feed.follows.unfollow_all(7)
    #: app.feed.follows.import_all
    follows = await app.feed.follows.import_all([(7, 1), (7, 2, datetime(2026, 1, 1, tzinfo=UTC))])
    #: -
    assert (followers, muted, blocked, follows) == (1, [2], [3], 2)
    #: app.feed.index.stats
    for shard in await app.feed.index.stats():
        print(shard.shard, shard.state)
    #: app.feed.index.verify
    verified = await app.feed.index.verify(sample=100)
    #: app.feed.index.rebuild
    job_id = await app.feed.index.rebuild()
    #: app.feed.index.rebuild_now
    entities = await app.feed.index.rebuild_now()
    #: -
    assert verified
    assert job_id
    assert entities
