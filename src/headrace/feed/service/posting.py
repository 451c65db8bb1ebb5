"""Posts: added, shown later, deleted with what hangs on them.

Truth, outbox and jobs are one transaction; the index is told right after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.errors import InvalidPost, PostTaken, PostUnknown
from headrace.feed.model import (
    FeedId,
    Post,
    PostDeleted,
    moment_of,
    require_post_ids,
    require_posts,
)
from headrace.feed.names import Names
from headrace.feed.store.posts import Stored
from headrace.jobs import Jobs, NewJob, Registry, Task
from headrace.jobs.errors import InvalidJob
from headrace.jobs.job_context import current_job

PUBLISH_QUEUE: Final = "feed.publish"
DELETED_QUEUE: Final = "feed.deleted."
NOT_YET_S: Final = 5.0
OnDeleted: TypeAlias = Callable[[PostDeleted], Awaitable[None]]


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the job that shows posts whose moment has come."""

    posts: list[str]


class Cascade(NamedTuple):
    """A handler of deletions and its queue."""

    queue: str
    handler: OnDeleted


class Posting:
    """Works on posts."""

    def __init__(self, postgres: Postgres, jobs: Jobs, names: Names, applier: Applier) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._names = names
        self._applier = applier
        self.cascades: list[Cascade] = []

    def register(self, registry: Registry) -> None:
        """Add the room's tasks for posts."""
        registry.add(Task(queue=PUBLISH_QUEUE, handler=self._publish, retries=20))
        for cascade in self.cascades:
            task = Task(queue=cascade.queue, handler=_calling(cascade.handler), retries=20)
            registry.add(task)

    async def posts(self, posts: Iterable[object]) -> list[Post]:
        """Add posts; each as it is then, in order."""
        wanted = require_posts(posts)
        if not wanted:
            return []
        authors = await self._names.make([post.author for post in wanted])
        columns: dict[str, Any] = {
            "ids": [post.id for post in wanted],
            "authors": authors,
            "ats": [post.at for post in wanted],
            "refs": [post.ref for post in wanted],
        }
        if len(wanted) == 1 and wanted[0].at is None:
            stored, changes = await store.posts.post(self._postgres, **columns)
            _require_own(stored, dict(zip(columns["ids"], authors, strict=True)))
        else:
            async with self._postgres.transaction() as tx:
                stored, changes = await store.posts.post(tx, **columns)
                _require_own(stored, dict(zip(columns["ids"], authors, strict=True)))
                await self._plan(tx, stored)
        await self._applier.bring(changes)
        found = {post.id: post for post in stored}
        return [_told(found[post.id], post.author, post.ref) for post in wanted]

    async def delete(self, ids: Iterable[str]) -> int:
        """Remove posts; how many there were."""
        wanted = require_post_ids(ids)
        if not wanted:
            return 0
        async with self._postgres.transaction() as tx:
            gone, changes = await store.posts.delete_posts(tx, wanted)
            if gone and self.cascades:
                told = await self._names.told([author for _, author, _ in gone])
                deleted = [PostDeleted(id=i, author=told[author], ref=r) for i, author, r in gone]
                for cascade in self.cascades:
                    jobs = [NewJob(queue=cascade.queue, payload=each) for each in deleted]
                    await self._jobs.enqueue_many(jobs, tx=tx)
        await self._applier.bring(changes)
        return len(gone)

    async def find(self, post_id: str) -> Post:
        """One post as it is kept."""
        [wanted] = require_post_ids([post_id])
        found = await store.posts.find_posts(self._postgres, [wanted])
        if not found:
            raise PostUnknown(wanted)
        told = await self._names.told([found[0].author])
        return _told(found[0], told[found[0].author], found[0].ref)

    async def _plan(self, tx: Tx, stored: Sequence[Stored]) -> None:
        """A job for each moment at which new posts are to be shown."""
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
                f"post {waiting[latest][0]!r}: at {latest:%Y-%m-%d}, expected a moment within a year from now; nothing"
                " was posted"
            ) from error

    async def _publish(self, wanted: Publish) -> None:
        """Show posts; what was deleted meanwhile is left alone."""
        await self._applier.bring(await store.posts.publish(self._postgres, wanted.posts))
        left = await store.posts.find_posts(self._postgres, wanted.posts)
        if any(post.is_waiting for post in left):
            # The database's clock was set back after the job began.
            current_job().snooze(NOT_YET_S)


def _calling(handler: OnDeleted) -> Callable[[PostDeleted], Awaitable[None]]:
    async def call(post: PostDeleted) -> None:
        await handler(post)

    return call


def _require_own(stored: Sequence[Stored], authors: dict[str, int]) -> None:
    for post in stored:
        if authors[post.id] != post.author:
            raise PostTaken(post.id)


def _told(post: Stored, author: FeedId, ref: str | None) -> Post:
    return Post(
        id=post.id,
        author=author,
        at=post.visible_at if post.is_waiting else moment_of(post.score),
        is_waiting=post.is_waiting,
        ref=ref,
    )
