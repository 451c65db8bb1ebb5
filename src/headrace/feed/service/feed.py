"""The feed, the verbs: `await app.feed.page(viewer)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Final, TypeVar

from headrace.engines import Engines
from headrace.feed.apply import Applier
from headrace.feed.hot import Hot
from headrace.feed.merge import Merge, SlowPages
from headrace.feed.model import (
    Bar,
    FeedId,
    FeedVerified,
    Marker,
    NewPost,
    Page,
    People,
    Post,
    ShardState,
    Unread,
    require_feed_id,
    require_limit,
    require_many,
    require_since,
)
from headrace.feed.names import Names
from headrace.feed.reasons import PostWhy
from headrace.feed.rebuild import Progress, Rebuild
from headrace.feed.service.explaining import Explaining
from headrace.feed.service.following import Following
from headrace.feed.service.index import Index
from headrace.feed.service.places import Places
from headrace.feed.service.posting import DELETED_QUEUE, Cascade, OnDeleted, Posting
from headrace.feed.service.reading import Reading
from headrace.feed.service.watching import Watch
from headrace.feed.settings import FeedConfig
from headrace.jobs import Jobs, Registry
from headrace.kernel.signing import Key

Follow = tuple[FeedId, FeedId] | tuple[FeedId, FeedId, datetime | None]
"""A viewer, an author, and since when."""
IMPORT_STEP: Final = 1_000
SAMPLE_MAX: Final = 1_000_000
Handler = TypeVar("Handler", bound=OnDeleted)


class Feed:
    """The room's handle; opens nothing by itself."""

    def __init__(
        self, engines: Engines, jobs: Jobs, config: FeedConfig, *, make_key: Callable[[], Key]
    ) -> None:
        self.config = config
        self.postgres = engines.postgres
        self.hot = Hot(engines.valkey, engines.multiplexer, config.shards)
        applier = Applier(self.postgres, self.hot, self.want_ready)
        names, places = Names(self.postgres), Places(make_key)
        rebuild = Rebuild(self.postgres, self.hot, applier, index_for_s=config.index_for_s)
        self._index = Index(
            self.postgres, self.hot, jobs, names, applier=applier, rebuild=rebuild, config=config
        )
        self._posting = Posting(self.postgres, jobs, names, applier)
        self._following = Following(
            self.postgres, names, applier, places=places, follows_max=config.follows_max
        )
        slow_pages = SlowPages(self.postgres, config.slow_pages_max)
        merge = Merge(slow_pages, self.hot, applier, self.want_ready)
        self._reading = Reading(self.postgres, names, merge, places)
        self._explaining = Explaining(self.postgres, names, merge)

    def register(self, registry: Registry) -> None:
        """Add the room's tasks; every process that enqueues or works needs them."""
        self._posting.register(registry)
        self._index.register(registry)

    def on_post_deleted(self, handler: Handler, *, queue: str | None = None) -> Handler:
        """Call `handler(post)` for each post that is deleted, at least once, in a queue of its own.

        The queue is `feed.deleted.<name of the handler>`. To be said before `register`.
        """
        name = queue or re.sub(r"\W", "_", getattr(handler, "__name__", type(handler).__name__))
        self._posting.cascades.append(Cascade(DELETED_QUEUE + name, handler))
        return handler

    async def ready(self) -> None:
        """Make sure that the index is begun, with the right number of shards.

        Every verb does it first. Raises: FeedShardsFixed.
        """
        if not self._index.is_ready:
            await self._index.open()

    async def post(
        self, author: FeedId, post_id: str, *, at: datetime | None = None, ref: str | None = None
    ) -> Post:
        """Add a post; every follower has it on the next read. Again: nothing changes, the post as it is.

        `at`: its moment, now if left out; a later one: it is shown then, as new then. `ref` is the caller's own note,
        given to handlers of its deletion. Raises: InvalidFeedId, InvalidPost, PostTaken, PostgresDown.
        """
        return (await self.posts([NewPost(author=author, id=post_id, at=at, ref=ref)]))[0]

    async def posts(self, posts: Sequence[NewPost]) -> list[Post]:
        """Add up to 1,000 posts, all or none; each as it is then, in order. Raises: as `post`, and TooManyAtOnce."""
        await self.ready()
        return await self._posting.posts(posts)

    async def find(self, post_id: str) -> Post:
        """One post as it is kept. Raises: InvalidFeedId, PostUnknown, PostgresDown."""
        return await self._posting.find(post_id)

    async def delete(self, post_ids: str | Iterable[str]) -> int:
        """Delete a post, or up to 1,000; nobody sees them on the next read. How many there were.

        Handlers of deletions are called for each. Raises: InvalidFeedId, TooManyAtOnce, PostgresDown.
        """
        await self.ready()
        return await self._posting.delete([post_ids] if isinstance(post_ids, str) else post_ids)

    async def follow(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Follow an author, or up to 10,000, all or none; how many are new.

        Raises: InvalidFeedId, TooManyAtOnce, TooManyFollows, PostgresDown.
        """
        await self.ready()
        return await self._following.follow(viewer, _each(authors))

    async def unfollow(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Unfollow authors; how many were followed. Raises: InvalidFeedId, TooManyAtOnce, PostgresDown."""
        await self.ready()
        return await self._following.unfollow(viewer, _each(authors))

    async def unfollow_all(self, viewer: FeedId) -> int:
        """Unfollow everybody; how many that were. Raises: InvalidFeedId, PostgresDown."""
        await self.ready()
        return await self._following.unfollow(viewer, None)

    async def bar(
        self, viewer: FeedId, authors: FeedId | Iterable[FeedId], kind: Bar, *, is_set: bool
    ) -> int:
        """Mute or block authors, or end it; how many changed.

        A mute: the viewer is not shown the author, followed or not, now or later. A block: neither of the two is shown
        the other. Follows stay as they are, in both directions. Raises: InvalidFeedId, TooManyAtOnce, PostgresDown.
        """
        await self.ready()
        return await self._following.bar(viewer, _each(authors), kind, is_set=is_set)

    async def mute(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Do not show authors to a viewer; how many were not muted yet. Raises: as `bar`."""
        return await self.bar(viewer, authors, Bar.MUTE, is_set=True)

    async def unmute(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """End mutes; how many there were. Raises: as `bar`."""
        return await self.bar(viewer, authors, Bar.MUTE, is_set=False)

    async def block(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """Show neither of the two to the other; how many were not blocked yet. Raises: as `bar`."""
        return await self.bar(viewer, authors, Bar.BLOCK, is_set=True)

    async def unblock(self, viewer: FeedId, authors: FeedId | Iterable[FeedId]) -> int:
        """End blocks; how many there were. Raises: as `bar`."""
        return await self.bar(viewer, authors, Bar.BLOCK, is_set=False)

    async def page(
        self,
        viewer: FeedId,
        limit: int = 20,
        *,
        cursor: str | None = None,
        since: str | None = None,
    ) -> Page:
        """The newest posts of those whom a viewer follows, up to 200, newest first.

        `cursor` is `next` of the page before; `since` is `newest` of an earlier page (or a marker's `place`): only what is
        newer. The end is where `next` is None. Without Valkey it is made from PostgreSQL, more slowly.
        Raises: InvalidFeedId, InvalidLimit, CursorInvalid, PostgresDown where neither can tell, SlowPagesBusy where too many are.
        """
        if not self._index.is_ready:
            await self._index.open()
        return await self._reading.page(viewer, limit, cursor, since)

    async def author_posts(
        self, author: FeedId, limit: int = 20, *, cursor: str | None = None
    ) -> Page:
        """An author's own shown posts, newest first, whoever asks.

        Raises: InvalidFeedId, InvalidLimit, CursorInvalid, PostgresDown.
        """
        return await self._reading.author_posts(author, limit, cursor)

    async def why(self, viewer: FeedId, post_id: str) -> PostWhy:
        """Whether a viewer's pages show a post, and why. Raises: InvalidFeedId, PostgresDown."""
        await self.ready()
        return await self._explaining.why(viewer, post_id)

    async def watch(self, viewer: FeedId, *, since: str | None = None) -> Watch:
        """Tell what is new from now on, or after a place: `await watch.look()` every now and then.

        Raises: InvalidFeedId, CursorInvalid, PostgresDown.
        """
        await self.ready()
        return await self._reading.watch(viewer, since)

    async def marker(self, viewer: FeedId) -> Marker:
        """Up to where a viewer has read. Raises: InvalidFeedId, PostgresDown."""
        return await self._reading.marker(viewer)

    async def set_marker(self, viewer: FeedId, place: str | None = None) -> Marker:
        """Note up to where a viewer has read, never back: `newest` or `next` of a page, or all there is now.

        Raises: InvalidFeedId, CursorInvalid, PostgresDown.
        """
        await self.ready()
        return await self._reading.set_marker(viewer, place)

    async def unread(self, viewer: FeedId) -> Unread:
        """How many posts are newer than the marker, counted up to 100. Raises: InvalidFeedId, PostgresDown."""
        await self.ready()
        return await self._reading.unread(viewer)

    async def following(
        self, viewer: FeedId, limit: int = 100, *, cursor: str | None = None
    ) -> People:
        """Whom a viewer follows, latest first, up to 1,000 a page, and how many in all.

        Raises: InvalidFeedId, InvalidLimit, CursorInvalid, PostgresDown.
        """
        return await self._following.following(viewer, limit, cursor)

    async def followers(
        self, author: FeedId, limit: int = 100, *, cursor: str | None = None
    ) -> People:
        """Who follows an author, latest first, and how many in all. Raises: as `following`."""
        return await self._following.followers(author, limit, cursor)

    async def barred(
        self, viewer: FeedId, kind: Bar, limit: int = 100, *, cursor: str | None = None
    ) -> People:
        """Whom a viewer mutes or blocks. Raises: as `following`."""
        return await self._following.barred(viewer, kind, limit, cursor)

    async def import_posts(self, posts: Iterable[NewPost]) -> int:
        """Add any number of posts, in calls of 1,000; how many were given. Again: nothing changes.

        Raises: as `posts`, at the first call that fails; those before it are in.
        """
        await self.ready()
        count, part = 0, list[NewPost]()
        for post in posts:
            part.append(post)
            if len(part) == IMPORT_STEP:
                count, part = count + len(await self._posting.posts(part)), []
        return count + len(await self._posting.posts(part))

    async def import_follows(self, follows: Iterable[Follow]) -> int:
        """Follow any number of times: (viewer, author) or (viewer, author, since when); how many are new.

        Those of a viewer are best given together: each run of them is a call. Raises: as `follow`.
        """
        await self.ready()
        count, viewer, part = 0, None, dict[FeedId, datetime | None]()
        for who, whom, *since in follows:
            if part and (who != viewer or len(part) == IMPORT_STEP):
                count += await self._following.follow(viewer, list(part), list(part.values()))
                part = {}
            viewer = who
            part.setdefault(
                require_feed_id("author", whom), require_since(whom, since[0] if since else None)
            )
        if part:
            count += await self._following.follow(viewer, list(part), list(part.values()))
        return count

    async def rebuild(self) -> int:
        """Enqueue the job that builds the index from the truth; its id. Pages go on meanwhile. Raises: PostgresDown."""
        return await self._index.enqueue_build()

    async def rebuild_now(self, *, clean: bool = False, on_progress: Progress | None = None) -> int:
        """Build the index here; how many viewers and authors it has. `clean`: drop it first, pages are slow until then.

        Raises: PostgresDown, ValkeyDown.
        """
        await self.ready()
        return await self._index.build(clean=clean, on_progress=on_progress)

    async def verify(
        self, *, sample: int | None = None, on_progress: Progress | None = None
    ) -> FeedVerified:
        """Prove that the index is the truth, for all or for `sample` viewers and authors, or say which are not.

        Raises: InvalidLimit, PostgresDown, ValkeyDown.
        """
        if sample is not None:
            require_limit(sample, SAMPLE_MAX, what="sample")
        await self.ready()
        return await self._index.verify(sample=sample, on_progress=on_progress)

    async def stats(self) -> list[ShardState]:
        """How each shard of the index stands. Raises: ValkeyDown."""
        return await self._index.shards()

    def want_ready(self) -> None:
        """Have the index made ready, where it was found not to be: built here if it is small, else by a job; or brought back."""
        self._index.want_ready()


def _each(given: FeedId | Iterable[FeedId]) -> Iterable[FeedId]:
    return [given] if isinstance(given, int | str) else require_many("author", given)
