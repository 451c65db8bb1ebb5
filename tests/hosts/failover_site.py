"""A site on several hosts under load, and what its clients were answered.

Each room has one client that repeats a round trip: write, then wait until the effect is visible.
`ends` has the time of each, so that the length of an outage is known per room. Two more clients
enqueue jobs as fast as they are answered. A write without a response is sent again, as the docs
advise: with its Idempotency-Key, or under the same id.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
from tests.kit.hosts import Host, Hosts
from tests.kit.processes import HeadraceProcess, is_alive
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.kernel.errors import Unavailable
from headrace.web.tokens import Tokens

ROLES: Final = {
    "agent": ("agent", "failover_app:app"),
    "api": ("api", "failover_app:app"),
    "scheduler": ("scheduler", "failover_app:app"),
    "flusher": ("flusher",),
}
ROOMS: Final = ("jobs", "fetch", "views", "feed")
AUTHOR, VIEWER, AD = "author", "viewer", "ad:1"
DONE = compile_query(
    "done",
    "-- The texts of jobs that are done.\n"
    "SELECT convert_from(payload, 'UTF8')::jsonb->>'text' AS text FROM headrace.job_done",
)
PAUSE_S: Final = 0.2
ANSWER_S: Final = 2.0
"""How long a client waits before it sends a write again."""


class FailoverSite:
    """The roles on their hosts, the clients, and the history of both."""

    def __init__(self, folder: Path, net: Hosts, env: dict[str, str]) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {"work": net.add("work"), "front": net.add("front")}
        self._address = f"{self.hosts['front'].address}:8080"
        self._env = {
            "HEADRACE_SECRET": "the secret of a site, thirty-two characters",
            "HEADRACE_BLOBS_URL": (folder / "blobs").as_uri(),
            "HEADRACE_WEB_LISTEN": self._address,
            "PYTHONPATH": str(Path(__file__).parent),
            **env,
        }
        (folder / "blobs").mkdir(parents=True)
        self.postgres = Postgres(env["HEADRACE_POSTGRES_URL"], PostgresConfig())
        self.roles: dict[str, HeadraceProcess] = {}
        self.ends: dict[str, list[float]] = defaultdict(list)
        """Per room, when a round trip ended."""
        self.acknowledged: dict[str, set[str]] = defaultdict(set)
        """Per kind of write, what was answered with success."""
        self.done: dict[str, float] = {}
        """Texts of jobs that were seen done, with the time after the read."""
        self._hits = Counter[str]()

    async def start(self) -> None:
        """Migrate and start the roles; wait until the API answers."""
        await apply_migrations(self.postgres, PACKAGES)
        token = (await Tokens(self.postgres).create("caller", ("*",))).text
        self._headers = {"authorization": f"Bearer {token}"}
        pythons = {name: host.python(self.folder) for name, host in self.hosts.items()}
        for name, words in ROLES.items():
            python = pythons["work" if name == "agent" else "front"]
            more = ["--name", "work"] if name == "agent" else []
            self.roles[name] = HeadraceProcess(
                [*words, *more], folder=self.folder, env=self._env, python=python
            )
        async with self.client() as client:
            await wait_true(lambda: self._is_ready(client), what="the API answers")
            await self._write(client, f"/v1/feed/viewers/{VIEWER}/follows", json=[AUTHOR])
            rate = {"rate": "6000/m", "connections": 8}
            answer = await client.put("/v1/fetch/customers/shop", json=rate)
            assert answer.is_success, answer.text

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"http://{self._address}",
            headers=self._headers,
            timeout=60,
            trust_env=False,
        )

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """All clients send inside the block; after it every client has had its last answer."""
        stop = asyncio.Event()
        rooms = [getattr(self, f"_use_{room}") for room in ROOMS]
        async with self.client() as client:
            loops = [
                self._repeat(room, use, client, stop)
                for room, use in zip(ROOMS, rooms, strict=True)
            ]
            loops += [self._enqueue(client, n, stop) for n in range(2)]
            loops += [self._watch_done(stop)]
            async with asyncio.TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop)
                try:
                    yield
                finally:
                    stop.set()

    async def wait_back(self, since_s: float, *, deadline_s: float = 90) -> dict[str, float]:
        """Wait until each room completed a round trip after this time; the seconds it took."""

        def back() -> dict[str, float] | None:
            self.require_running()
            found = {
                room: next((end_s - since_s for end_s in self.ends[room] if end_s > since_s), None)
                for room in ROOMS
            }
            return found if None not in found.values() else None

        return await wait_true(back, what="every room is back", deadline_s=deadline_s)

    def require_running(self) -> None:
        """No role ended or was restarted."""
        for name, process in self.roles.items():
            if not is_alive(process.pid):
                text = f"{process.wait_exit()}: {process.out[-800:]}{process.err[-3000:]}"
                raise AssertionError(f"{name} ended with {text}")

    async def require_all_kept(self) -> None:
        """Nothing that was acknowledged is lost or doubled."""
        self.require_running()
        jobs = self.acknowledged["jobs"]
        await wait_true(lambda: self._are_done(jobs), what="every acknowledged job is done")
        rows = Counter([row["text"] for row in await self.postgres.all(DONE)])
        assert [text for text in rows if rows[text] > 1] == [], "one key made two jobs"
        again = [
            row
            for row in self._lines("notes.jsonl")
            if row["at_s"] > self.done.get(row["text"], float("inf"))
        ]
        assert again == [], "jobs ran after their end was visible"
        async with self.client() as client:
            items = {row["item"] for row in self._lines("items.jsonl")}
            assert self.acknowledged["fetch"] <= items
            page = await self._read(client, f"/v1/feed/viewers/{VIEWER}", limit=100)
            posts = [post["id"] for post in page["posts"]]
            newest = sorted(self.acknowledged["feed"], reverse=True)[: len(posts)]
            assert len(set(posts)) == len(posts)
            assert set(newest) <= set(posts)
            hits = self._hits
            await wait_true(
                lambda: self._flushed_at_least(client, hits["answered"]), what="hits are flushed"
            )
            assert (await self._read(client, "/v1/views/verify"))["differences"] == []
            assert await self._flushed(client) <= hits["sent"]
            await wait_true(lambda: self._is_index_equal(client), what="the feed's index is equal")

    async def end(self) -> None:
        for process in self.roles.values():
            process.end()
        await self.postgres.close()

    # The clients

    async def _repeat(self, room: str, use: Callable[..., Awaitable[None]], client, stop) -> None:
        for number in range(1_000_000):
            if stop.is_set():
                return
            await use(client, f"{number:06}")
            self.ends[room].append(time.monotonic())

    async def _use_jobs(self, client, name: str) -> None:
        text = f"probe-{name}"
        await self._add_job(client, text)
        await wait_true(
            lambda: any(row["text"] == text for row in self._lines("notes.jsonl")[-200:]),
            what=f"job {text} ran",
            deadline_s=60,
        )

    async def _use_fetch(self, client, name: str) -> None:
        row = {"customer": "shop", "item": name, "fields": {"name": name, "price": "5"}}
        await self._write(client, "/v1/fetch/items", json=[row])
        self.acknowledged["fetch"].add(name)
        await wait_true(
            lambda: any(row["item"] == name for row in self._lines("items.jsonl")[-50:]),
            what=f"item {name} was published",
            deadline_s=60,
        )

    async def _use_views(self, client, name: str) -> None:
        params = {"class": "human", "viewer": name}
        while True:
            self._hits["sent"] += 1
            answer = await client.post(f"/v1/views/items/{AD}", params=params)
            if answer.is_success:
                break
            assert answer.status_code == 503, answer.text
            await _pause()
        self._hits["answered"] += 1
        hits = self._hits["answered"]
        await wait_true(
            lambda: self._flushed_at_least(client, hits), what="a hit is flushed", deadline_s=60
        )

    async def _use_feed(self, client, name: str) -> None:
        await self._write(client, "/v1/feed/posts", json={"author": AUTHOR, "id": name})
        self.acknowledged["feed"].add(name)

        async def is_read() -> bool:
            page = await self._read(client, f"/v1/feed/viewers/{VIEWER}")
            return page is not None and page["posts"][0]["id"] == name

        await wait_true(is_read, what=f"post {name} is read", deadline_s=60)

    async def _enqueue(self, client, number: int, stop) -> None:
        count = 0
        while not stop.is_set():
            await self._add_job(client, f"load-{number}-{count}")
            count += 1

    async def _add_job(self, client, text: str) -> None:
        body = {"payload": {"text": text}}
        key = {"Idempotency-Key": text}
        await self._write(client, "/v1/queues/notes/jobs", json=body, headers=key)
        self.acknowledged["jobs"].add(text)

    async def _watch_done(self, stop) -> None:
        """Note which jobs are done for a reader of the primary."""
        while not stop.is_set():
            await _pause()
            try:
                rows = await self.postgres.all(DONE)
            except Unavailable:
                rows = []
            seen_s = time.monotonic()
            for row in rows:
                self.done.setdefault(row["text"], seen_s)

    async def _write(self, client, path: str, **options: Any) -> None:
        """Send a write until it succeeds."""
        while True:
            try:
                answer = await client.post(path, timeout=ANSWER_S, **options)
            except httpx.TransportError:
                continue
            if answer.is_success:
                return
            assert answer.status_code == 503, f"{path}: {answer.status_code} {answer.text}"
            await _pause()

    async def _read(self, client, path: str, **params: Any) -> Any:
        """The document, or None while an engine is away."""
        answer = await client.get(path, params=params)
        assert answer.status_code in (200, 503), f"{path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.is_success else None

    # What was stored

    async def _is_ready(self, client) -> bool:
        self.require_running()
        try:
            return (await client.get("/readyz")).is_success
        except httpx.TransportError:
            return False

    async def _are_done(self, texts: set[str]) -> bool:
        self.require_running()
        return texts <= {row["text"] for row in await self.postgres.all(DONE)}

    async def _flushed(self, client) -> int:
        series = await self._read(client, f"/v1/views/items/{AD}/series", by="day")
        return sum(point["human"] for point in series or ())

    async def _flushed_at_least(self, client, hits: int) -> bool:
        return await self._flushed(client) >= hits

    async def _is_index_equal(self, client) -> bool:
        found = await self._read(client, "/v1/feed/verify")
        return found is not None and not found.get("differences", True)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        if not file.exists():
            return []
        whole = file.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


async def _pause() -> None:
    """Do not send more often than a client with Retry-After would."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), PAUSE_S)
