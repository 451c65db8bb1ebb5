"""The fetch room on real engines with one customer, as tests drive it."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import httpx
from click.testing import CliRunner
from origin import Origin
from tests.kit.engines import NO_BACKUPS
from tests.kit.waiting import wait_true
from tests.kit.ways_in import bare

from headrace.engines.sql import compile_query
from headrace.fetch import Fetch, FetchConfig, Item, Run, http
from headrace.fetch.cli import fetch as fetch_command
from headrace.fetch.model import FINAL_STATES
from headrace.fetch.service.sellers import SELLER_USE, LinkSigning
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.jobs.worker import Worker
from headrace.kernel.config import load_config
from headrace.kernel.signing import Key, derive_key
from headrace.web.model import WebConfig
from headrace.web.server import create_api
from headrace.web.tokens import Tokens

JOBS = JobsConfig(poll_s=0.05, retry_first_s=0.1)
HEAD = "id,name,price,photos\n"
LIMITS = {"starts_max": 100_000, "window_s": 60, "connections": 50}
DUE_NOW = compile_query(
    "due_now",
    "-- Jobs that wait for their time become due.\n"
    "WITH ready AS (UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now() RETURNING 1),"
    " lanes AS (UPDATE headrace.lane_job SET run_at = now() WHERE run_at > now() RETURNING 1)"
    " SELECT (SELECT count(*) FROM ready) + (SELECT count(*) FROM lanes)",
)


def rows(count: int, start: int = 0, *, price: int = 5, photo: str = "") -> str:
    """Rows of the items `i000`, `i001` and so on."""
    return "".join(f"i{n:03},Item {n},{price},{photo}\n" for n in range(start, start + count))


class Shop:
    """A customer, its host and the room; `items` are what the app's handler received."""

    def __init__(self, fetch: Fetch, jobs: Jobs, postgres, folder: Path, origin: Origin) -> None:
        self.fetch = fetch
        self.jobs = jobs
        self.postgres = postgres
        self.folder = folder
        self.origin = origin
        self.items: list[Item] = []

    async def run(
        self, text: str | bytes, *, name: str = "shop.csv", customer: str = "shop", **options
    ) -> Run:
        """Run a catalogue of this text; its photos follow."""
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return await self.fetch.run_catalogue(path, customer, **options)

    async def wait_done(self, run: Run, *, hurries: bool = False) -> Run:
        """Wait until all items of the run are published and delivered."""

        hurried_s = 0.0

        async def is_over() -> Run | None:
            nonlocal hurried_s
            if hurries and time.monotonic() > hurried_s + 0.1:
                await self.due_now()
                hurried_s = time.monotonic()
            found = await self.fetch.runs.get(run.run)
            if found.state not in FINAL_STATES:
                return None
            queues = await self.jobs.queues.all()
            return None if any(q.ready + q.leased + q.scheduled for q in queues) else found

        return await wait_true(is_over, what=f"run {run.run} done and delivered")

    async def run_to_end(self, text: str | bytes, **options) -> Run:
        return await self.wait_done(await self.run(text, **options))

    async def due_now(self) -> int:
        """Make jobs due that wait for their time; return how many."""
        return await self.postgres.value(DUE_NOW)

    async def sql(self, text: str, **values) -> list:
        """The rows of a statement; `#` is the schema's prefix."""
        query = compile_query("of_a_test", f"-- Of a test.\n{text.replace('#', 'headrace.')}")
        return await self.postgres.all(query, **values)

    async def count(self, table: str) -> int:
        [[count]] = await self.sql(f"SELECT count(*) FROM #{table}")
        return count

    async def problems(self, run: Run) -> list[tuple[str | None, str, str]]:
        """(item, field, code) of each fault of a row."""
        found = await self.fetch.reports.problems(run.run)
        return [(p.item, p.field, p.code) for _, p in found]

    def urls(self, *paths: str) -> str:
        """The links to these paths as one cell."""
        return "|".join(map(self.origin.url, paths))

    def published(self) -> list[tuple[str, str, int]]:
        """(action, item, version) since the last call."""
        found = sorted((item.action, item.id, item.version) for item in self.items)
        self.items.clear()
        return found


def seller_key() -> Key:
    """The key of links to sellers' pages."""
    return derive_key("seller" * 8, SELLER_USE)


def new_room(postgres, blobs, config: FetchConfig, *handlers, check=None) -> tuple[Fetch, Jobs]:
    """A room with its own registry, these handlers of items, and a `before_publish` handler.

    `check` is that handler and the fields that it may change.
    """
    registry = Registry()
    jobs = Jobs(postgres, JOBS, registry)
    registry.bind(lambda: jobs)
    fetch = Fetch(postgres, blobs, jobs, config, link_signing=LinkSigning(seller_key))
    if check is not None:
        fetch.before_publish(changes=check[1])(check[0])
    fetch.register(registry)
    for handler in handlers:
        fetch.on_item(handler)
    return fetch, jobs


@asynccontextmanager
async def working(postgres, jobs: Jobs, name: str = "test"):
    """A worker on all queues of `jobs`; yields its task."""
    stop = asyncio.Event()
    task = asyncio.create_task(Worker(postgres, jobs, JOBS, host_name=name).run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


class Process:
    """Another process of the site, with its handlers and settings; works while entered."""

    def __init__(self, shop: Shop, blobs, config: FetchConfig, *handlers) -> None:
        self.fetch, jobs = new_room(shop.postgres, blobs, config, *handlers)
        self._working = working(shop.postgres, jobs, "other")

    @property
    def is_working(self) -> bool:
        """Whether its worker runs."""
        return not self._task.done()

    async def __aenter__(self) -> Self:
        self._task = await self._working.__aenter__()
        return self

    async def __aexit__(self, *_) -> None:
        await self._working.__aexit__(None, None, None)
        await self.fetch.close()


async def api_client(fetch: Fetch, postgres) -> httpx.AsyncClient:
    """A client of the room's routes behind the real web layer."""
    app = SimpleNamespace(
        config=load_config({"web": WebConfig}, env={}),
        engines=SimpleNamespace(postgres=postgres),
        metrics_folder=None,
        version="0",
        services=lambda: {"fetch": fetch, "backups": NO_BACKUPS},
        routes=lambda: http.ROUTES,
    )
    token = await Tokens(postgres).create("test", ("fetch:read", "fetch:write"))
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_api(app)),
        base_url="http://127.0.0.1",
        headers={"Authorization": f"Bearer {token.text}"},
    )


class Terminal:
    """The terminal of a command: runs verbs on the test's loop, stores what is shown."""

    def __init__(self, service, *, is_json: bool = False) -> None:
        self.is_json = is_json
        self.value = self.text = None
        self._service, self._loop = service, asyncio.get_running_loop()

    def run(self, kind, verb):
        assert isinstance(self._service, kind)
        return asyncio.run_coroutine_threadsafe(verb(self._service), self._loop).result(30)

    def show(self, value, text) -> None:
        assert text
        self.value, self.text = bare(value) if self.is_json else value, text

    def progress(self, text, *_) -> None:
        assert text

    async def type(self, *words):
        """Run `headrace fetch WORDS`; return the ended command."""
        typed = [str(word) for word in words]
        return await asyncio.to_thread(CliRunner().invoke, fetch_command, typed, obj=self)
