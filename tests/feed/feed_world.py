"""The oracle of pages: a feed as plain dictionaries, and random writes to it and the service."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from headrace.engines.sql import compile_query
from headrace.feed import NewPost
from headrace.feed.model import moment_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


async def ids(feed, viewer, **options):
    """The ids of a page."""
    return [post.id for post in (await feed.page(viewer, **options)).posts]


async def walk(read, size):
    """All entries of a paged list: `read(size, cursor=...)` returns the entries and a cursor."""
    found, cursor = [], None
    while True:
        entries, cursor = await read(size, cursor=cursor)
        found += entries
        if cursor is None:
            return found


@dataclass
class World:
    """The oracle."""

    posts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By id: score and author."""
    kinds: dict[str, str | None] = field(default_factory=dict)
    follows: set[tuple[int, int]] = field(default_factory=set)
    mutes: set[tuple[int, int]] = field(default_factory=set)
    blocks: set[tuple[int, int]] = field(default_factory=set)

    def sees(self, viewer, author):
        """Whether a viewer's pages have the posts of an author."""
        return (
            (viewer, author) in self.follows
            and (viewer, author) not in self.mutes
            and (viewer, author) not in self.blocks
            and (author, viewer) not in self.blocks
        )

    def page(self, viewer, limit, before=None, after=None, kinds=None):
        """Scores and ids, newest first, of the posts of some kinds between two positions."""
        found = sorted(
            (
                (score, post)
                for post, (score, author) in self.posts.items()
                if self.sees(viewer, author)
                and (before is None or (score, post) < before)
                and (after is None or (score, post) > after)
                and (kinds is None or self.kinds[post] in kinds)
            ),
            reverse=True,
        )
        return found[:limit]


class History:
    """Random writes to the service and to the oracle."""

    def __init__(
        self,
        feed,
        seed,
        *,
        authors=12,
        viewers=6,
        most=6,
        moments=5,
        days=40,
        burst=8,
        until=NOON,
    ):
        self.feed, self.world = feed, World()
        self.random = random.Random(seed)
        self.authors, self.viewers = list(range(1, authors + 1)), list(range(1, viewers + 1))
        self.moments = [
            until - timedelta(days=self.random.uniform(0, days)) for _ in range(moments)
        ]
        self.most, self.burst = most, burst
        self.made = 0

    async def step(self):
        """One write."""
        verb = self.random.choices(
            [
                self.post,
                self.delete,
                self.follow,
                self.unfollow,
                self.mute_or_block,
                self.end_mute_or_block,
                self.unfollow_all,
            ],
            [30, 12, 20, 8, 6, 6, 1],
        )[0]
        await verb()

    async def post(self, count=None):
        """Add some posts, many of them at equal moments."""
        new = []
        for _ in range(count or self.random.choice([1, 1, 1, 2, self.burst])):
            self.made += 1
            at = self.random.choice([None, *self.moments, *self.moments])
            name = f"{self.random.choice('aAzZ_~')}{self.made}"
            self.world.kinds[name] = kind = self.random.choice([None, None, "photo", "video", "z"])
            author = self.random.choice(self.authors)
            new.append(NewPost(author=author, id=name, at=at, kind=kind))
        for post, stored in zip(new, await self.feed.posts.add(new), strict=True):
            assert stored.id == post.id
        for row in await self.feed.postgres.all(self.feed_posts([post.id for post in new])):
            self.world.posts[row["id"]] = (row["score"], row["author"])

    def feed_posts(self, ids):
        """The stored posts; the database sets their scores."""
        names = ", ".join(f"'{each}'" for each in ids)
        return compile_query(
            "posts",
            f"-- Posts.\nSELECT id, score, author FROM headrace.feed_post WHERE id IN ({names})",
        )

    async def delete(self):
        """Delete some posts."""
        ids = self.random.sample(
            sorted(self.world.posts), min(len(self.world.posts), self.random.choice([1, 3]))
        )
        assert await self.feed.delete(ids) == len(ids)
        for each in ids:
            del self.world.posts[each]

    async def follow(self):
        """Follow some authors."""
        viewer, authors = self._pairs(self.most)
        new = {(viewer, a) for a in authors} - self.world.follows
        assert await self.feed.follow(viewer, authors) == len(new)
        self.world.follows |= new

    async def unfollow(self):
        """Unfollow some authors."""
        viewer, authors = self._pairs(self.most // 2)
        old = {(viewer, a) for a in authors} & self.world.follows
        assert await self.feed.unfollow(viewer, authors) == len(old)
        self.world.follows -= old

    async def unfollow_all(self):
        """Unfollow all authors of a viewer."""
        viewer = self.random.choice(self.viewers)
        old = {pair for pair in self.world.follows if pair[0] == viewer}
        assert await self.feed.follows.unfollow_all(viewer) == len(old)
        self.world.follows -= old

    async def mute_or_block(self):
        """Mute or block some authors."""
        viewer, authors = self._pairs(2)
        kind, verb = self._kind(self.feed.follows.mute, self.feed.follows.block)
        new = {(viewer, a) for a in authors} - kind
        assert await verb(viewer, authors) == len(new)
        kind |= new

    async def end_mute_or_block(self):
        """End some mutes or blocks."""
        viewer, authors = self._pairs(4)
        kind, verb = self._kind(self.feed.follows.unmute, self.feed.follows.unblock)
        old = {(viewer, a) for a in authors} & kind
        assert await verb(viewer, authors) == len(old)
        kind -= old

    def _pairs(self, most):
        authors = self.random.sample(self.authors, self.random.randint(1, most))
        return self.random.choice(self.viewers), authors

    def _kind(self, mute, block):
        return (
            (self.world.mutes, mute) if self.random.random() < 0.5 else (self.world.blocks, block)
        )

    async def check(self, pages):
        """Compare random pages with the oracle. Return their number."""
        for _ in range(pages):
            viewer, limit = self.random.choice(self.viewers), self.random.choice([1, 2, 5, 20, 200])
            before, after = self._place(0.6), self._place(0.25)
            cursor, since = self._signed(viewer, before), self._signed(viewer, after)
            kinds = self.random.choice([None, None, ["video"], ["photo", "z"]])
            page = await self.feed.page(viewer, limit, cursor=cursor, since=since, kinds=kinds)
            found = [(post.at, post.id) for post in page.posts]
            places = self.world.page(viewer, limit, before, after, kinds)
            expected = [(moment_of(score), post_id) for score, post_id in places]
            assert found == expected, (viewer, limit, before, after, kinds)
            assert all(post.kind == self.world.kinds[post.id] for post in page.posts)
            assert len(found) == limit or page.next is None
        return pages

    def _signed(self, viewer, place):
        return place and self.feed.pages._cursors.sign("feed", viewer, place)

    def _place(self, share):
        """The position of a present or deleted post, or near it; None: no position."""
        if self.random.random() > share:
            return None
        scores = [score for score, _ in self.world.posts.values()] or [0]
        score = self.random.choice(scores) + self.random.choice([0, 0, 0, 1, -1])
        names = [*self.world.posts, "a", "~", "", "deleted"]
        return (score, self.random.choice(names))
