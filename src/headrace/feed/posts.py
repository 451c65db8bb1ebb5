"""Posts: add, publish later, delete with cascades.

Data, outbox and jobs are written in one transaction. The index is updated right after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.feed import store
from headrace.feed.errors import InvalidPost, PostTaken, PostUnknown
from headrace.feed.id_map import IdMap
from headrace.feed.index import Index
from headrace.feed.model import (
    POSTS_PER_CALL_MAX,
    ChangeKind,
    FeedId,
    NewPost,
    Post,
    PostDeleted,
    moment_of,
    require_many,
    require_post_ids,
    require_posts,
)
from headrace.feed.settings import posts_added
from headrace.feed.store import Stored
from headrace.jobs import Jobs, NewJob, Registry, Task
from headrace.jobs.errors import InvalidJob
from headrace.jobs.job_context import current_job
from headrace.jobs.tasks.payloads import is_async

PUBLISH_QUEUE: Final = "feed.publish"
DELETED_QUEUE: Final = "feed.deleted."
NOT_YET_S: Final = 5.0
OnDeleted: TypeAlias = Callable[[PostDeleted], Any]
Handler = TypeVar("Handler", bound=OnDeleted)


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the job that makes due posts visible."""

    posts: list[str]


class Cascade(NamedTuple):
    """A handler of deletions and its queue."""

    queue: str
    handler: OnDeleted


class Posts:
    """Add, find and delete posts."""

    def __init__(self, postgres: Postgres, jobs: Jobs, ids: IdMap, index: Index) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._ids = ids
        self._index = index
        self._cascades: list[Cascade] = []

    def on_deleted(self, handler: Handler, *, queue: str | None = None) -> Handler:
        """Call `handler(post)` for each deleted post, at least once. Use it before `register`.

        A `def` is called in a thread. Each handler has its own queue,
        `feed.deleted.<name of the handler>`.
        """
        name = queue or re.sub(r"\W", "_", getattr(handler, "__name__", type(handler).__name__))
        self._cascades.append(Cascade(DELETED_QUEUE + name, handler))
        return handler

    def register(self, registry: Registry) -> None:
        """Add the tasks of posts."""
        registry.add(Task(queue=PUBLISH_QUEUE, handler=self._publish, retries=20))
        for cascade in self._cascades:
            task = Task(queue=cascade.queue, handler=_calling(cascade.handler), retries=20)
            registry.add(task)

    async def post(
        self,
        author: FeedId,
        post_id: str,
        *,
        at: datetime | None = None,
        ref: str | None = None,
        kind: str | None = None,
    ) -> Post:
        """Add a post, visible to every follower on the next read. An existing post stays unchanged.

        `at` defaults to now; a later moment delays the post until then. `ref` is passed to
        `on_post_deleted` handlers. Pages can be filtered by `kind`, 1 to 16 of a-z 0-9 _ -. Raises:
        InvalidFeedId, InvalidPost, PostTaken, PostgresDown.
        """
        new = NewPost(author=author, id=post_id, at=at, ref=ref, kind=kind)
        return (await self.add([new]))[0]

    async def add(self, posts: Sequence[NewPost]) -> list[Post]:
        """Add up to 1,000 posts, all or none. Return each as stored, in order.

        Raises: as `post`, and TooManyAtOnce.
        """
        await self._index.ready()
        return await self._add(posts)

    async def import_all(self, posts: Iterable[NewPost]) -> int:
        """Add any number of posts in calls of 1,000. Return the number given. Safe to repeat.

        Raises: as `add`, at the first failing call; earlier calls stay.
        """
        await self._index.ready()
        count, part = 0, list[NewPost]()
        for post in require_many("post", posts, "a NewPost"):
            part.append(post)
            if len(part) == POSTS_PER_CALL_MAX:
                count, part = count + len(await self._add(part)), []
        return count + len(await self._add(part))

    async def delete(self, post_ids: str | Iterable[str]) -> int:
        """Delete a post, or up to 1,000, invisible on the next read. Return how many existed.

        Handlers of deletions are called for each. Raises: InvalidFeedId, TooManyAtOnce,
        PostgresDown.
        """
        await self._index.ready()
        ids = require_post_ids([post_ids] if isinstance(post_ids, str) else post_ids)
        if not ids:
            return 0
        async with self._postgres.transaction() as tx:
            gone, changes = await store.delete_posts(tx, ids)
            if gone and self._cascades:
                authors = await self._ids.external_ids([post.author for post in gone])
                deleted = [
                    PostDeleted(id=post.id, author=authors[post.author], ref=post.ref)
                    for post in gone
                ]
                for cascade in self._cascades:
                    jobs = [NewJob(queue=cascade.queue, payload=each) for each in deleted]
                    await self._jobs.enqueue_many(jobs, tx=tx)
        await self._index.applier.apply_or_defer(changes)
        if len(gone) < len(ids):
            # This call may repeat one that failed after its commit.
            earlier = await store.unswept_of_posts(self._postgres, ids)
            await self._index.applier.apply_or_defer(earlier)
        return len(gone)

    async def find(self, post_id: str) -> Post:
        """A stored post, also while it waits. Raises: InvalidFeedId, PostUnknown, PostgresDown."""
        ids = require_post_ids([post_id])
        found = await store.find_posts(self._postgres, ids)
        if not found:
            raise PostUnknown(ids[0])
        authors = await self._ids.external_ids([found[0].author])
        return _post_of(found[0], authors[found[0].author])

    async def _add(self, posts: Sequence[NewPost]) -> list[Post]:
        new = require_posts(posts)
        if not new:
            return []
        authors = await self._ids.find_or_create([post.author for post in new])
        columns: dict[str, Any] = {
            "ids": [post.id for post in new],
            "authors": authors,
            "ats": [post.at for post in new],
            "refs": [post.ref for post in new],
            "kinds": [post.kind for post in new],
        }
        if len(new) == 1 and new[0].at is None:
            stored, changes = await store.post(self._postgres, **columns)
            _require_own(stored, dict(zip(columns["ids"], authors, strict=True)))
        else:
            async with self._postgres.transaction() as tx:
                stored, changes = await store.post(tx, **columns)
                _require_own(stored, dict(zip(columns["ids"], authors, strict=True)))
                await self._schedule(tx, stored)
        await self._index.applier.apply_or_defer(changes)
        if repeated := sorted({post.author for post in stored if not post.is_new}):
            # This call may repeat one that failed after its commit.
            earlier = await store.unswept_of(self._postgres, ChangeKind.POSTS, repeated)
            await self._index.applier.apply_or_defer(earlier)
        posts_added.inc(sum(post.is_new for post in stored))
        found = {post.id: post for post in stored}
        return [_post_of(found[post.id], post.author) for post in new]

    async def _schedule(self, tx: Tx, stored: Sequence[Stored]) -> None:
        """Enqueue a job for each moment at which new posts become visible."""
        waiting: dict[datetime, list[str]] = {}
        for post in stored:
            if post.is_new and post.is_waiting:
                waiting.setdefault(post.visible_at, []).append(post.id)
        jobs = [
            NewJob(queue=PUBLISH_QUEUE, payload=Publish(posts=ids), at=at)
            for at, ids in waiting.items()
        ]
        if not jobs:
            return
        try:
            await self._jobs.enqueue_many(jobs, tx=tx)
        except InvalidJob as error:
            latest = max(waiting)
            raise InvalidPost(
                f"post {waiting[latest][0]!r}: at {latest:%Y-%m-%d}, expected a moment within a"
                " year from now; nothing was posted"
            ) from error

    async def _publish(self, request: Publish) -> None:
        """Make due posts visible; the handler of the job. Deleted posts are skipped."""
        changes = await store.publish(self._postgres, request.posts)
        await self._index.applier.apply_or_defer(changes)
        left = await store.find_posts(self._postgres, request.posts)
        if any(post.is_waiting for post in left):
            # The database's clock was set back after the job started.
            current_job().snooze(NOT_YET_S)


def _calling(handler: OnDeleted) -> Callable[[PostDeleted], Any]:
    """A handler with the annotation of its payload; a `def` stays one, for a thread."""

    async def call(post: PostDeleted) -> None:
        await handler(post)

    def call_blocking(post: PostDeleted) -> None:
        handler(post)

    return call if is_async(handler) else call_blocking


def _require_own(stored: Sequence[Stored], authors: dict[str, int]) -> None:
    for post in stored:
        if authors[post.id] != post.author:
            raise PostTaken(post.id)


def _post_of(post: Stored, author: FeedId) -> Post:
    return Post(
        id=post.id,
        author=author,
        at=post.visible_at if post.is_waiting else moment_of(post.score),
        is_waiting=post.is_waiting,
        ref=post.ref,
        kind=post.kind,
    )
