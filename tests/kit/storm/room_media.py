"""The media room under faults: nodes over a bucket, and clients that check every byte.

The nodes use neither PostgreSQL nor Valkey. Each workload reads old objects and one new object, so
that it needs the bucket. Afterwards every node must serve every object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import httpx
from tests.kit.chaos import ChaosProxy
from tests.kit.checkers import Finding
from tests.kit.processes import is_alive
from tests.kit.storm.bucket import Bucket
from tests.kit.storm.media_cluster import Node, Traffic, content, running_cluster
from tests.kit.storm.storm import Storm, Tally

OBJECTS = 6
WRONG = "WRONG BYTES"


class MediaRoom:
    """See the module."""

    name = "media"
    roles = ()

    def __init__(self, **settings: str) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._put = 0

    async def begin(self, storm: Storm) -> None:
        """Start the nodes."""
        self.storm = storm
        bucket = Bucket()
        await bucket.start()
        self.proxy = self._stack.enter_context(ChaosProxy(f"http://127.0.0.1:{bucket.port}"))
        bucket.endpoint = self.proxy.url
        settings = {"SIGNED": "off", **self._settings}
        folder = storm.disk / "media"
        running = running_cluster(folder, keys=OBJECTS, bucket=bucket, **settings)
        self.cluster = await self._stack.enter_async_context(running)
        await self.cluster.warm()
        self.traffic = Traffic(self.cluster, seed=storm.chance.getrandbits(32))

    def keep_up(self) -> None:
        """Restart the nodes that ended."""
        for node in self.cluster.nodes:
            if node.process is None or not is_alive(node.process.pid):
                if node.process is not None:
                    node.kill()
                node.start()

    def pick(self) -> Node:
        """A node."""
        return self.storm.chance.choice(self.cluster.nodes)

    def clients(self) -> list[Callable[[asyncio.Event], Awaitable[None]]]:
        return [self._read]

    async def _read(self, stop: asyncio.Event) -> None:
        self._put += 1
        key = f"run/{self._put}.mp3"
        self.cluster.put(key)
        self.cluster.keys = [*self.cluster.keys, key][-OBJECTS:]
        async with self.traffic:
            await stop.wait()

    async def is_settled(self) -> bool:
        return True

    async def findings(self) -> list[Finding]:
        faults, self.traffic.faults = self.traffic.faults, []
        found = [Finding("wrong bytes", text, "") for text in faults if WRONG in text]
        for node in self.cluster.nodes:
            for key in self.cluster.keys:
                answer = await self.cluster.get(node, key)
                if answer.status_code != 200:
                    text = f"{answer.status_code} {answer.text[:200]}"
                    found.append(Finding("lost", f"{node.name} {key}", text))
                elif answer.content != content(key):
                    found.append(Finding("wrong bytes", f"{node.name} {key}", "after the fault"))
        return found

    async def last_findings(self) -> list[Finding]:
        return []

    def tally(self) -> Tally:
        seen = self.traffic
        counts = seen.reads + seen.unanswered, seen.reads - seen.refused, seen.unanswered
        seen.reads = seen.refused = seen.unanswered = 0
        return Tally(*counts)

    def require_work(self) -> None:
        assert self.traffic.reads

    async def round_trip(self) -> bool:
        """Read an object through every node."""
        key = self.cluster.keys[-1]
        with suppress(httpx.HTTPError):
            answers = [await self.cluster.get(node, key) for node in self.cluster.nodes]
            return all(answer.content == content(key) for answer in answers)
        return False

    async def close(self) -> None:
        await self._stack.aclose()
