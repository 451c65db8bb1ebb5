"""The feed room in a storm: random writes through an API that dies, and readers of pages.

Of all that was answered nothing may be missing on the next page of a viewer who follows everybody,
and nothing deleted may be there. Another process that could not reach Valkey may be late; its log
then has `feed_change_deferred`. In the end pages and index equal PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import httpx
from tests.kit.checkers import Finding
from tests.kit.storm.room_views import open_engines
from tests.kit.storm.storm import PREFIX, Storm, Tally, pause
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.feed import Feed, FeedConfig
from headrace.feed.errors import PostUnknown
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.kernel.errors import Unavailable
from headrace.kernel.signing import derive_key

VIEWERS = range(1, 9)
AUTHORS = range(1, 31)
STEADY = 99
"""A viewer who follows everybody all the time."""
LAST = 5
KEY = derive_key("a secret of the tests, 32 characters", "cursor")
TRUTH = compile_query(
    "truth",
    "-- A viewer's whole feed.\n"
    "SELECT p.id FROM headrace.feed_follow f JOIN headrace.feed_post p ON p.author = f.author"
    " WHERE f.viewer = :viewer AND f.is_shown AND p.state = 0 ORDER BY p.score DESC, p.id DESC",
)
POSTS = compile_query("posts", "-- Posts.\nSELECT id FROM headrace.feed_post")
LEFT = compile_query(
    "left", "-- Changes left.\nSELECT count(*) FROM headrace.feed_outbox WHERE NOT is_swept"
)


def open_feed(postgres_url, valkey_url, prefix, folder):
    """A feed and its engines."""
    engines = open_engines(postgres_url, valkey_url, folder, prefix=prefix)
    registry = Registry()
    jobs = Jobs(engines.postgres, JobsConfig(), registry)
    registry.bind(lambda: jobs)
    feed = Feed(engines, jobs, FeedConfig(shards=2), make_key=lambda: KEY)
    feed.register(registry)
    return feed, engines


class FeedRoom:
    """See the module."""

    name = "feed"
    roles = ("flusher", "api")

    async def begin(self, storm: Storm) -> None:
        """STEADY follows all authors."""
        self.storm = storm
        urls = (storm.endpoints.postgres_url, storm.endpoints.valkey_url)
        self.feed, self._engines = open_feed(*urls, PREFIX, storm.folder)
        self.posted: list[str] = []
        self.deleting: set[str] = set()
        self.deleted: list[str] = []
        self.pages = self.late = self._made = 0
        self._sent = self._answered = self._refused = 0
        await self.feed.follow(STEADY, list(AUTHORS))

    def clients(self) -> list[Callable[[asyncio.Event], Awaitable[None]]]:
        draws = [Random(self.storm.chance.random()) for _ in range(3)]
        writers = [lambda stop, d=draw: self._write(stop, d) for draw in draws]
        return [*writers, self._read]

    async def _write(self, stop: asyncio.Event, draw: Random) -> None:
        own: list[str] = []
        async with self.storm.client() as client:
            while not stop.is_set():
                verb = draw.choices(["post", "delete", "PUT", "DELETE"], [6, 2, 4, 2])[0]
                if verb == "post":
                    await self._post(client, own, draw.choice(AUTHORS))
                elif verb == "delete" and own:
                    await self._delete(client, own.pop(draw.randrange(len(own))))
                elif verb != "delete":
                    kind = draw.choices(["follows", "mutes"], [2, 1])[0]
                    viewer, author = draw.choice(VIEWERS), draw.choice(AUTHORS)
                    await self._ask(client, verb, f"/v1/feed/viewers/{viewer}/{kind}/{author}")
                await pause(stop, 0.01)

    async def _post(self, client, own: list[str], author: int) -> None:
        self._made += 1
        post = f"w-{self._made}"
        body = {"author": author, "id": post}
        if await self._ask(client, "POST", "/v1/feed/posts", json=body):
            own.append(post)
            self.posted.append(post)

    async def _delete(self, client, post: str) -> None:
        self.deleting.add(post)
        if await self._ask(client, "DELETE", f"/v1/feed/posts/{post}"):
            self.deleted.append(post)

    async def _read(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            posted, deleted = set(self.posted[-LAST:]), set(self.deleted[-LAST:])
            if not await self._is_right(posted, deleted):
                self.late += 1
                await wait_true(
                    lambda p=posted, d=deleted: self._is_right(p, d),
                    deadline_s=20,
                    what="a right page",
                )
            await pause(stop, 0.01)

    async def _is_right(self, posted: set[str], deleted: set[str]) -> bool:
        try:
            page = await self.feed.page(STEADY, 200)
            other = await self.feed.page(self.storm.chance.choice(VIEWERS), 20)
        except Unavailable:
            await asyncio.sleep(0)
            return True
        self.pages += 2
        for each in (page, other):
            times = [post.at for post in each.posts]
            assert times == sorted(times, reverse=True)
            assert len({post.id for post in each.posts}) == len(times)
            assert {post.author for post in each.posts} <= set(AUTHORS)
        shown = {post.id for post in page.posts}
        missing = posted - self.deleting - shown
        return not deleted & shown and not any([await self._is_due(p, page) for p in missing])

    async def _is_due(self, post_id: str, page) -> bool:
        """Whether a post that is not on a page has its place there."""
        try:
            post = await self.feed.posts.find(post_id)
        except PostUnknown:
            return True
        except Unavailable:
            return False
        return len(page.posts) < 200 or post.at > page.posts[-1].at

    async def is_settled(self) -> bool:
        if await self.storm.postgres.value(LEFT):
            return False
        return not (await self.feed.page(STEADY)).is_slow

    async def findings(self) -> list[Finding]:
        verified = await self.feed.index.verify()
        found = [Finding("wrong index", text, "differs") for text in map(str, verified.differences)]
        for viewer in (*VIEWERS, STEADY):
            rows = await self.storm.postgres.all(TRUTH, viewer=viewer)
            expected, pages = [row["id"] for row in rows], await _feed_of(self.feed, viewer)
            if pages != expected:
                text = f"pages {pages[:20]} of {len(pages)}, stored {expected[:20]}"
                found.append(Finding("wrong pages", viewer, f"{text} of {len(expected)}"))
        stored = {row["id"] for row in await self.storm.postgres.all(POSTS)}
        lost = set(self.posted) - self.deleting - stored
        found += [Finding("lost", post, "it was acknowledged") for post in sorted(lost)]
        back = set(self.deleted) & stored
        found += [Finding("wrong state", post, "it was deleted") for post in sorted(back)]
        logs = [file.read_text() for file in self.storm.folder.glob("err-*.txt")]
        if self.late and not any("feed_change_deferred" in log for log in logs):
            found.append(Finding("late", "pages", f"{self.late} pages lacked an answered write"))
        return found

    async def last_findings(self) -> list[Finding]:
        return []

    def tally(self) -> Tally:
        counts = self._sent, self._answered, self._sent - self._answered - self._refused
        self._sent = self._answered = self._refused = 0
        return Tally(*counts)

    def require_work(self) -> None:
        assert self.pages > 10

    async def round_trip(self) -> bool:
        """Post, and read it from the index, as all viewers read their pages: each shard works."""
        async with self.storm.client() as client:
            own: list[str] = []
            await self._post(client, own, AUTHORS[0])
        pages = [await self.feed.page(viewer, 100) for viewer in (*VIEWERS, STEADY)]
        is_fast = not any(page.is_slow for page in pages)
        return bool(own) and is_fast and own[0] in {post.id for post in pages[-1].posts}

    async def _ask(self, client: httpx.AsyncClient, method: str, path: str, **options) -> bool:
        """Whether a request succeeded; refused and lost requests are not repeated."""
        self._sent += 1
        try:
            answer = await client.request(method, path, **options)
        except httpx.TransportError:
            return False
        assert answer.is_success or answer.status_code in {404, 429, 503}, answer.text
        self._answered += answer.is_success
        self._refused += answer.status_code in {404, 429}
        return answer.is_success

    async def close(self) -> None:
        await self._engines.close()


async def _feed_of(feed: Feed, viewer: int) -> list[str]:
    found, cursor = [], None
    while True:
        page = await feed.page(viewer, 200, cursor=cursor)
        assert not page.is_slow, "from the index"
        found += [post.id for post in page.posts]
        cursor = page.next
        if cursor is None:
            return found
