"""A feed under load on separate engines, the kills of its parts, and a record of its answers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from tests.kit.processes import HeadraceProcess
from tests.kit.waiting import wait_true
from written_feed import AUTHORS, VIEWERS, open_feed

from headrace.app import PACKAGES
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.migrate import apply_migrations
from headrace.engines.sql import compile_query
from headrace.feed.errors import PostUnknown
from headrace.kernel.errors import Unavailable

PROGRAM = Path(__file__).with_name("written_feed.py")
WRITERS = 3
STEADY = 99
"""A viewer who follows everybody all the while."""
PREFIX, LAST = "storm", 5
BACKENDS = compile_query(
    "backends",
    "-- Who works for the writers.\n"
    "SELECT pid FROM pg_stat_activity"
    " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
)
LEFT = compile_query(
    "left", "-- Changes left.\nSELECT count(*) FROM headrace.feed_outbox WHERE NOT is_swept"
)


class Told:
    """A writer's file: what was answered to it so far."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.posted: list[str] = []
        self.deleting: set[str] = set()
        self.deleted: list[str] = []
        self._at = 0

    def read(self) -> None:
        """What came since; a line that is not whole yet is left."""
        with self.file.open("rb") as opened:
            opened.seek(self._at)
            lines = opened.read().rpartition(b"\n")
        self._at += len(lines[0]) + len(lines[1])
        for word, _, post in (line.partition(" ") for line in lines[0].decode().splitlines()):
            if word == "deleting":
                self.deleting.add(post)
            else:
                (self.posted if word == "posted" else self.deleted).append(post)


class FeedStorm:
    """Writers, a flusher and readers; `kill_<part>` for each part."""

    def __init__(self, folder, engines, endpoints, feed, postgres) -> None:
        self.folder, self.engines, self.feed, self.postgres = folder, engines, feed, postgres
        self.random = random.Random(20261122)
        self.told: list[Told] = []
        self.pages = self.refused = self.late = 0
        self._endpoints = endpoints
        self._writers: dict[int, tuple[subprocess.Popen, Told]] = {}
        self._started = 0
        self._flusher: HeadraceProcess | None = None

    def start_writer(self, slot: int, **env: str) -> subprocess.Popen:
        """One more writer, in the place of the one before."""
        self._started += 1
        told = Told(self.folder / f"told-{self._started}")
        told.file.touch()
        urls = [self._endpoints.postgres_url, self._endpoints.valkey_url]
        words = [*urls, PREFIX, str(told.file), str(self._started)]
        with (self.folder / "writers.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, *words],
                env={**os.environ, **env},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        if slot in self._writers:
            self._writers[slot][1].read()
        self.told.append(told)
        self._writers[slot] = process, told
        return process

    def start_flusher(self) -> None:
        """The sweep."""
        env = {
            "HEADRACE_POSTGRES_URL": self._endpoints.postgres_url,
            "HEADRACE_VALKEY_URL": self._endpoints.valkey_url,
            "HEADRACE_VALKEY_PREFIX": PREFIX,
            "HEADRACE_FEED_SHARDS": "2",
            "HEADRACE_FEED_SWEEP_EVERY": "100ms",
        }
        self._flusher = HeadraceProcess(["flusher"], folder=self.folder / "flusher", env=env)

    async def kill_crash(self) -> None:
        """A writer dies between its commit and the index."""
        slot = self._end_some_writer()
        chance = self.random.randint(1, 25)
        process = self.start_writer(slot, HEADRACE_CRASH_AT=f"feed.committed:{chance}")
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
        self.start_writer(slot)

    async def kill_writer(self) -> None:
        """A writer dies wherever it is."""
        self.start_writer(self._end_some_writer())

    async def kill_flusher(self) -> None:
        """The sweep dies wherever it is."""
        assert self._flusher is not None
        self._flusher.kill_all()
        self.start_flusher()

    async def kill_valkey(self) -> None:
        """Valkey dies, and is started again."""
        os.kill(self.engines.valkey_pid, signal.SIGKILL)
        await self.engines.restart("valkey")

    async def kill_backend(self) -> None:
        """One of PostgreSQL's processes dies, and with it every connection.

        It recovers by itself.
        """
        rows = await self.postgres.all(BACKENDS)
        os.kill(self.random.choice(rows)["pid"], signal.SIGKILL)

    async def kill_postgres(self) -> None:
        """PostgreSQL dies, and is started again."""
        os.kill(self.engines.postgres_pid, signal.SIGKILL)
        await self.engines.restart("postgres")

    def answered(self) -> int:
        """How many writes were answered."""
        for _, told in self._writers.values():
            told.read()
        return sum(len(told.posted) + len(told.deleted) for told in self.told)

    async def read(self, stop: asyncio.Event) -> None:
        """Pages, one after the other.

        Of what was answered before nothing is missing or there again.
        """
        while not stop.is_set():
            self.answered()
            posted = {p for _, told in self._writers.values() for p in told.posted[-LAST:]}
            deleted = {p for _, told in self._writers.values() for p in told.deleted[-LAST:]}
            if await self._is_wrong(posted, deleted):
                self.late += 1
                await wait_true(
                    lambda p=posted, d=deleted: self._is_right(p, d),
                    deadline_s=20,
                    what="a right page",
                )
            await asyncio.sleep(0)

    async def _is_right(self, posted, deleted) -> bool:
        return not await self._is_wrong(posted, deleted)

    async def _is_wrong(self, posted, deleted) -> bool:
        try:
            page = await self.feed.page(STEADY, 200)
            other = await self.feed.page(self.random.choice(VIEWERS), 20)
        except Unavailable:
            self.refused += 1
            return False
        self.pages += 2
        for each in (page, other):
            places = [(post.score, post.id) for post in each.posts]
            assert places == sorted(set(places), reverse=True)
            assert {post.author for post in each.posts} <= set(AUTHORS)
        shown = {post.id for post in page.posts}
        self.answered()
        going = set().union(*[told.deleting for told in self.told])
        missing = posted - going - shown
        return bool(deleted & shown) or any([await self._is_due(p, page) for p in missing])

    async def _is_due(self, post_id, page) -> bool:
        """Whether a post that is not on a page would have its place there."""
        try:
            post = await self.feed.posts.find(post_id)
        except PostUnknown:
            return True
        except Unavailable:
            return False
        return len(page.posts) < 200 or post.at > page.posts[-1].at

    async def settle(self) -> None:
        """No more writes; all that was committed is in the index."""
        for process, _ in self._writers.values():
            process.kill()
            process.wait()
        await wait_true(self._is_swept, what="all is swept")

    def end(self) -> None:
        """Whatever runs still."""
        for process, _ in self._writers.values():
            process.kill()
            process.wait()
        if self._flusher is not None:
            self._flusher.kill_all()

    def _end_some_writer(self) -> int:
        slot = self.random.randrange(WRITERS)
        process, _ = self._writers[slot]
        assert process.poll() is None, "a writer ended by itself"
        process.kill()
        process.wait()
        return slot

    async def _is_swept(self) -> bool:
        return await self.postgres.value(LEFT) == 0 and not (await self.feed.page(STEADY)).is_slow


@asynccontextmanager
async def feed_storm(folder: Path):
    """Everything started, STEADY follows all; ends with the block."""
    engines = EmbeddedEngines(folder / "data", durable=False)
    endpoints = await engines.start()
    feed, opened = open_feed(endpoints.postgres_url, endpoints.valkey_url, PREFIX, folder)
    storm = FeedStorm(folder, engines, endpoints, feed, opened.postgres)
    try:
        await apply_migrations(opened.postgres, PACKAGES)
        await feed.follow(STEADY, list(AUTHORS))
        for slot in range(WRITERS):
            storm.start_writer(slot)
        storm.start_flusher()
        yield storm
    finally:
        storm.end()
        await opened.close()
        await engines.stop()
