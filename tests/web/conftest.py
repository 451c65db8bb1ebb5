"""A small app with routes of its own, served on a real socket over the test's PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from small_shop import ROUTES, Shop

from headrace.kernel.config import load_config
from headrace.web.model import WebConfig
from headrace.web.server import run_api
from headrace.web.tokens import Tokens


class SmallApp:
    """Implements `headrace.web.model.Application`."""

    version = "0.0.0"
    metrics_folder = None

    def __init__(self, postgres, *, routes=None, valkey=None, blobs=None, **settings) -> None:
        loaded = load_config({"web": WebConfig}, env={})
        web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0), **settings)
        self.config = dataclasses.replace(loaded, sections={"web": web})
        self.engines = SimpleNamespace(postgres=postgres, valkey=valkey, blobs=blobs)
        self.shop = Shop()
        self._routes = ROUTES if routes is None else routes

    def services(self):
        return {"shop": self.shop}

    def routes(self):
        return list(self._routes)


@asynccontextmanager
async def serving_at(app):
    """`app` on a free port; yields the address and the event that stops it."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_api(app, stop, lambda *at: ready.set_result(at)))
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    host, port = ready.result()
    try:
        yield SimpleNamespace(host=host, port=port, stop=stop, task=task)
    finally:
        stop.set()
        app.shop.go_on.set()
        await task


@pytest.fixture
def make_app(postgres):
    """Make an app of its own settings, over this test's PostgreSQL."""

    def make(**settings):
        return SmallApp(postgres, **settings)

    return make


@pytest.fixture
async def app(make_app):
    """The application that `api` serves."""
    return make_app()


@pytest.fixture
async def api(app):
    """A client of a running API, without a token."""
    async with (
        serving_at(app) as at,
        httpx.AsyncClient(base_url=f"http://{at.host}:{at.port}", verify=False) as client,
    ):
        yield client


@pytest.fixture
async def token(postgres):
    """The header with a token for jobs."""
    made = await Tokens(postgres).create("tester", ("jobs:read", "jobs:write"))
    return {"authorization": f"Bearer {made.text}"}


@pytest.fixture
async def root(postgres):
    """The header with a token for everything."""
    made = await Tokens(postgres).create("root", ("*",))
    return {"authorization": f"Bearer {made.text}"}


async def converse(at, *pieces: bytes, wait_s: float = 5.0) -> bytes:
    """Send raw bytes and read until the server closes, or is silent for `wait_s`."""
    reader, writer = await asyncio.open_connection(at.host, at.port)
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(wait_s):
            while chunk := await reader.read(65536):
                answer += chunk
    except (TimeoutError, ConnectionError):
        answer += b" (not closed)"
    finally:
        writer.close()
    return answer


@pytest.fixture
def serve():
    """Serve an app; the client is closed and the server stopped when the block ends."""

    @asynccontextmanager
    async def run(app, **engines):
        vars(app.engines).update(engines)
        async with (
            serving_at(app) as at,
            httpx.AsyncClient(base_url=f"http://{at.host}:{at.port}", verify=False) as client,
        ):
            client.at = at
            yield client

    return run


@pytest.fixture
def serving():
    """`async with serving(app) as at`: the address, the stop event and the task of a server."""
    return serving_at


@pytest.fixture
def talk():
    """`await talk(at, *pieces)`: raw bytes out, raw bytes back."""
    return converse
