"""A seller's host, the fetch room on real engines, and a worker that drains its queues."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import httpx
import pytest
from click.testing import CliRunner
from origin import Origin
from tests.kit.waiting import wait_true

from headrace.fetch import Fetch, FetchConfig, Item, Run, http
from headrace.fetch.cli import fetch as fetch_command
from headrace.fetch.model import FINAL_STATES
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.jobs.worker import Worker
from headrace.kernel.config import load_config
from headrace.web.model import WebConfig
from headrace.web.server import create_api
from headrace.web.tokens import Tokens

JOBS = JobsConfig(poll_s=0.05, retry_first_s=0.1)


class Shop:
    """A customer, its host and the room; `items` is what the app's handler received."""

    def __init__(self, fetch: Fetch, jobs: Jobs, postgres, folder: Path, origin: Origin) -> None:
        self.fetch = fetch
        self.jobs = jobs
        self.postgres = postgres
        self.folder = folder
        self.origin = origin
        self.items: list[Item] = []

    async def run(self, text: str | bytes, *, name: str = "shop.csv", **options) -> Run:
        """Run a catalogue of this text; photos follow."""
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return await self.fetch.run_catalogue(path, "shop", **options)

    async def wait_done(self, run: Run) -> Run:
        """The run when all its items are published and delivered."""

        async def ask() -> Run | None:
            found = await self.fetch.runs.get(run.run)
            return found if found.state in FINAL_STATES else None

        found = await wait_true(ask, what=f"run {run.run} done")

        async def is_quiet() -> bool:
            rows = await self.jobs.queues.all()
            return not any(q.ready + q.leased + q.scheduled for q in rows)

        await wait_true(is_quiet, what="all delivered")
        return found

    async def run_to_end(self, text: str | bytes, **options) -> Run:
        return await self.wait_done(await self.run(text, **options))

    def told(self) -> list[tuple[str, str, int]]:
        """(action, item, version), since the last call."""
        told = sorted((item.action, item.id, item.version) for item in self.items)
        self.items.clear()
        return told


class Process:
    """Another process of the same site: its own registry, handlers and settings; works while
    entered.
    """

    def __init__(self, shop: Shop, blobs, config: FetchConfig, *handlers) -> None:
        registry = Registry()
        self.postgres = shop.postgres
        self.jobs = Jobs(self.postgres, JOBS, registry)
        registry.bind(lambda: self.jobs)
        self.fetch = Fetch(self.postgres, blobs, self.jobs, config)
        self.fetch.register(registry)
        for handler in handlers:
            self.fetch.on_item(handler)
        self._stop = asyncio.Event()

    @property
    def is_working(self) -> bool:
        """Whether its worker runs."""
        return not self._working.done()

    async def __aenter__(self) -> Self:
        worker = Worker(self.postgres, self.jobs, JOBS, host_name="other")
        self._working = asyncio.create_task(worker.run(self._stop))
        return self

    async def __aexit__(self, *_) -> None:
        self._stop.set()
        await asyncio.wait_for(self._working, 60)
        await self.fetch.close()


@pytest.fixture
def process(shop, blobs, config):
    """Make another process with these handlers: `async with process(handler) as other`."""
    return lambda *handlers, config=config: Process(shop, blobs, config, *handlers)


@pytest.fixture
async def origin():
    """A host that is running."""
    origin = Origin()
    await origin.start()
    yield origin
    await origin.close()


@pytest.fixture
def config(origin):
    """Settings that allow loopback, which only tests do."""
    return FetchConfig(allow_networks=("127.0.0.0/8",), allow_ports=(origin.port,), classes=(3.0,))


@pytest.fixture
async def shop(postgres, blobs, config, origin, tmp_path):
    """The room with customer `shop`, no worker."""
    registry = Registry()
    jobs = Jobs(postgres, JOBS, registry)
    registry.bind(lambda: jobs)
    fetch = Fetch(postgres, blobs, jobs, config)
    fetch.register(registry)
    found = Shop(fetch, jobs, postgres, tmp_path, origin)

    async def publish(item: Item) -> None:
        found.items.append(item)

    fetch.on_item(publish)
    await fetch.customers.set("shop", starts_max=100_000, window_s=60, connections=50)
    yield found
    await fetch.close()
    # Debts of a late request would charge the lane of the next test's customer.
    paying = [t for t in asyncio.all_tasks() if t.get_coro().__qualname__ == "TokenDebts._pay"]
    for task in paying:
        task.cancel()
    await asyncio.gather(*paying, return_exceptions=True)


@pytest.fixture
async def worker(shop, postgres):
    """A worker on the room's queues."""
    stop = asyncio.Event()
    running = asyncio.create_task(Worker(postgres, shop.jobs, JOBS, host_name="test").run(stop))
    yield running
    stop.set()
    await asyncio.wait_for(running, 60)


@pytest.fixture
async def client(shop, postgres):
    """The room's routes behind the real web floor."""
    house = SimpleNamespace(
        config=load_config({"web": WebConfig}, env={}),
        engines=SimpleNamespace(postgres=postgres),
        metrics_folder=None,
        version="0",
        services=lambda: {"fetch": shop.fetch},
        routes=lambda: http.ROUTES,
    )
    token = await Tokens(postgres).create("test", ("fetch:read", "fetch:write"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_api(house)),
        base_url="http://127.0.0.1",
        headers={"Authorization": f"Bearer {token.text}"},
    ) as client:
        yield client


class RecordingTerminal:
    """The terminal of a command: runs verbs on the test's loop, keeps what is shown."""

    is_json = False

    def __init__(self, service, loop) -> None:
        self.service, self.loop, self.shown = service, loop, []

    def run(self, kind, verb):
        assert isinstance(self.service, kind)
        return asyncio.run_coroutine_threadsafe(verb(self.service), self.loop).result(30)

    def show(self, value, text) -> None:
        self.shown.append((value, text))

    def progress(self, text) -> None:
        assert text


@pytest.fixture
async def command(shop):
    """Run `headrace fetch WORDS`: (exit code or our error, the text shown)."""

    async def run(*words: str):
        terminal = RecordingTerminal(shop.fetch, asyncio.get_running_loop())
        ended = await asyncio.to_thread(CliRunner().invoke, fetch_command, words, obj=terminal)
        text = terminal.shown[-1][1] if terminal.shown else ended.output
        return getattr(ended.exception, "code", ended.exit_code), text

    return run
