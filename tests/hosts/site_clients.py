"""Clients of a site under load, and what they were answered.

Each room has one client that repeats a round trip: write, then wait until the effect is visible.
`trips` has the times of each, so that the length of an outage is known per room. Two more clients
enqueue jobs as fast as they are answered. A write without a response is sent again, as the docs
advise: with its Idempotency-Key, or under the same id. `refused` has every request that failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
from tests.kit.site import photo
from tests.kit.waiting import wait_true

from headrace.engines.postgres import Postgres
from headrace.engines.sql import compile_query
from headrace.kernel.errors import Unavailable
from headrace.web.tokens import Tokens

AUTHOR, VIEWER, AD, SHOP = "author", "viewer", "ad:1", "shop"
DONE = compile_query(
    "done",
    "-- The texts of jobs that are done.\n"
    "SELECT convert_from(payload, 'UTF8')::jsonb->>'text' AS text FROM headrace.job_done",
)
PAUSE_S: Final = 0.2
ANSWER_S: Final = 2.0
"""How long a client waits before it sends a write again."""
PHOTOS: Final = 3
"""Items of a catalogue, with one photo each."""
TRACK_BYTES: Final = 600_000


@cache
def track(name: str) -> bytes:
    """The bytes of an object: no other object has them at the same offset."""
    return hashlib.shake_128(name.encode()).digest(TRACK_BYTES)


class SiteClients:
    """The clients of a site and the history of their requests.

    `received`: the folder where handlers append what they receive; `photos`: the URL of a host
    with a photo at every path.
    """

    rooms: tuple[str, ...] = ("jobs", "fetch", "views", "feed")

    def __init__(self, received: Path, postgres: Postgres) -> None:
        self.received, self.postgres = received, postgres
        self.api_url = self.media_url = self.photos_url = ""
        self.trips: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Per room, when a round trip began and ended."""
        self.acknowledged: dict[str, set[str]] = defaultdict(set)
        """Per kind of write, what was answered with success."""
        self.done: dict[str, float] = {}
        """Texts of jobs that were seen done, with the time after the read."""
        self.refused: list[str] = []
        """Requests that failed, with the reason."""
        self._hits = Counter[str]()
        self._headers: dict[str, str] = {}

    async def make_token(self) -> None:
        """Let the clients log in; the schema exists."""
        token = (await Tokens(self.postgres).create("caller", ("*",))).text
        self._headers = {"authorization": f"Bearer {token}"}

    async def begin(self) -> None:
        """Wait until the API answers, and make what the clients use."""
        async with self.client() as client:
            await wait_true(lambda: self._is_ready(client), what="the API answers")
            await self._write(client, f"/v1/feed/viewers/{VIEWER}/follows", json=[AUTHOR])
            rate = {"rate": "6000/m", "connections": 8}
            answer = await client.put(f"/v1/fetch/customers/{SHOP}", json=rate)
            assert answer.is_success, answer.text
        self.refused.clear()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.api_url, headers=self._headers, timeout=60, trust_env=False
        )

    def require_running(self) -> None:
        """Fail if a part of the site ended that should run."""

    @asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        """All clients send inside the block; after it every client has had its last answer."""
        stop = asyncio.Event()
        async with self.client() as client:
            loops = [
                self._repeat(room, getattr(self, f"_use_{room}"), client, stop)
                for room in self.rooms
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

    async def wait_back(
        self, since_s: float, *, rooms: Sequence[str] | None = None, deadline_s: float = 90
    ) -> dict[str, float]:
        """Wait until each room began and completed a round trip; the seconds since this time."""
        wanted = self.rooms if rooms is None else rooms

        def ends_of(room: str) -> list[float]:
            return [end_s for began_s, end_s in self.trips[room] if began_s > since_s]

        def missing() -> list[str]:
            return [room for room in wanted if not ends_of(room)]

        def back() -> dict[str, float] | None:
            self.require_running()
            if missing():
                return None
            return {room: ends_of(room)[0] - since_s for room in wanted}

        try:
            return await wait_true(back, what="every room is back", deadline_s=deadline_s)
        except AssertionError as error:
            error.add_note(f"not back: {missing()}; refused: {self.refused[-5:]}")
            raise

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
            page = await wait_true(
                lambda: self._read(client, f"/v1/feed/viewers/{VIEWER}", limit=100), what="a page"
            )
            posts = [post["id"] for post in page["posts"]]
            newest = sorted(self.acknowledged["feed"], reverse=True)[: len(posts)]
            assert len(set(posts)) == len(posts)
            assert set(newest) <= set(posts)
            hits = self._hits
            await wait_true(
                lambda: self._flushed_at_least(client, hits["answered"]), what="hits are flushed"
            )
            found = await wait_true(lambda: self._read(client, "/v1/views/verify"), what="totals")
            assert found["differences"] == []
            assert await self._flushed(client) <= hits["sent"]
            await wait_true(lambda: self._is_index_equal(client), what="the feed's index is equal")
            for name in self.acknowledged["media"]:
                assert (await client.get(self._object_url(name))).content == track(name)
            for row in self._lines("items.jsonl"):
                for key, url in row["photos"]:
                    path = url.removeprefix(self.photos_url)
                    found = await client.get(f"{self.media_url}/m/{key}")
                    assert found.content == photo(path.strip("/").removesuffix(".jpg")), url

    # The clients

    async def _repeat(self, room: str, use: Callable[..., Awaitable[None]], client, stop) -> None:
        for number in range(1_000_000):
            if stop.is_set():
                return
            began_s = time.monotonic()
            await use(client, f"{number:06}")
            self.trips[room].append((began_s, time.monotonic()))

    async def _use_jobs(self, client, name: str) -> None:
        text = f"probe-{name}"
        await self._add_job(client, text)
        await wait_true(
            lambda: any(row["text"] == text for row in self._lines("notes.jsonl")[-200:]),
            what=f"job {text} ran",
            deadline_s=60,
        )

    async def _use_fetch(self, client, name: str) -> None:
        row = {"customer": SHOP, "item": name, "fields": {"name": name, "price": "5"}}
        await self._write(client, "/v1/fetch/items", json=[row])
        self.acknowledged["fetch"].add(name)
        await wait_true(
            lambda: any(row["item"] == name for row in self._lines("items.jsonl")[-50:]),
            what=f"item {name} was published",
            deadline_s=60,
        )

    async def _use_photos(self, client, name: str) -> None:
        """A catalogue of a seller of its own, whose photos are new."""
        shop = f"shop-{name}"
        items = [f"{name}-{number}" for number in range(PHOTOS)]
        rows = [f"{item},Item,100,{self.photos_url}/{item}.jpg" for item in items]
        await self._write(
            client, f"/v1/fetch/customers/{shop}", "PUT", json={"rate": "6000/m", "connections": 8}
        )
        await self._write(
            client,
            f"/v1/fetch/customers/{shop}/catalogues",
            content="\n".join(["id,name,price,photos", *rows, ""]),
            headers={"Idempotency-Key": f"catalogue-{name}"},
        )
        self.acknowledged["fetch"] |= set(items)
        await wait_true(
            lambda: (
                {row["item"] for row in self._lines("items.jsonl")[-100:] if row["photos"]}
                >= set(items)
            ),
            what=f"catalogue {name} was published with its photos",
            deadline_s=90,
        )

    async def _use_views(self, client, name: str) -> None:
        params = {"class": "human", "viewer": name}
        while True:
            # A hit without an answer may be counted: the next one is another hit.
            self._hits["sent"] += 1
            if await self._answer(client, "POST", f"/v1/views/items/{AD}", params=params):
                break
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

    async def _use_media(self, client, name: str) -> None:
        """Store an object by the API, and read ranges of it and an older one by the entry."""
        await self._write(client, f"/v1/media/objects/tracks/{name}", "PUT", content=track(name))
        self.acknowledged["media"].add(name)
        older = min(self.acknowledged["media"])
        for key, first in ((name, 0), (older, 300_000), (name, TRACK_BYTES - 1000)):
            last = min(first + 299_999, TRACK_BYTES - 1)
            expected = track(key)[first : last + 1]
            ask = {"headers": {"Range": f"bytes={first}-{last}"}}
            while (
                answer := await self._answer(client, "GET", self._object_url(key), **ask)
            ) is None:
                await _pause()
            assert answer.content == expected, f"wrong bytes of {key} from {first}"

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
            # A read may wait for a connection, and jobs run meanwhile.
            answered_s = time.monotonic()
            for row in rows:
                self.done.setdefault(row["text"], answered_s)

    async def _write(self, client, path: str, method: str = "POST", **options: Any) -> None:
        """Send a write until it succeeds."""
        while await self._answer(client, method, path, **options) is None:
            await _pause()

    async def _answer(self, client, method: str, path: str, **options: Any) -> Any:
        """The response, or None if there is none or the server cannot answer now."""
        try:
            answer = await client.request(method, path, timeout=ANSWER_S, **options)
        except httpx.TransportError as error:
            self.refused.append(f"{method} {path}: {error!r}")
            return None
        if answer.is_success:
            return answer
        # 502 and 504 are HAProxy's. After a timeout here the first request may still run.
        is_running = "web.idempotency_in_flight" in answer.text
        assert is_running or answer.status_code in (502, 503, 504), (
            f"{path}: {answer.status_code} {answer.text}"
        )
        self.refused.append(f"{method} {path}: {answer.status_code} {answer.text[:200]}")
        return None

    async def _read(self, client, path: str, **params: Any) -> Any:
        """The document, or None while it cannot be read."""
        answer = await self._answer(client, "GET", path, params=params)
        return None if answer is None else answer.json()

    # What was stored

    def _object_url(self, name: str) -> str:
        return f"{self.media_url}/m/tracks/{name}"

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
        file = self.received / name
        if not file.exists():
            return []
        whole = file.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


async def _pause() -> None:
    """The pace of a client."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PAUSE_S):
            await asyncio.Event().wait()
