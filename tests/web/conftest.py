"""A small app with routes of its own, served on a real socket; one server for most tests."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from small_shop import ROUTES, Shop
from tests.kit.engines import NO_BACKUPS

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.kernel.config import load_config
from headrace.web.model import WebConfig
from headrace.web.serving import run_api
from headrace.web.tokens import Tokens


class SmallApp:
    """Implements `headrace.web.model.Application`."""

    version = "0.0.0"
    metrics_folder = None
    data_folder = Path("/nonexistent")

    def __init__(self, postgres, *, routes=None, valkey=None, blobs=None, **settings) -> None:
        loaded = load_config({"web": WebConfig}, env={})
        web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0), **settings)
        self.config = dataclasses.replace(loaded, sections={"web": web})
        self.engines = SimpleNamespace(postgres=postgres, valkey=valkey, blobs=blobs)
        self.shop = Shop()
        self._routes = ROUTES if routes is None else routes

    def services(self):
        return {"shop": self.shop, "backups": NO_BACKUPS}

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


@pytest.fixture(scope="session")
async def shared_postgres(running_engines):
    """A pool on a database that the tests share; they use tokens of their own."""
    async with running_engines.database() as url:
        postgres = Postgres(url, PostgresConfig())
        yield postgres
        await postgres.close()


@pytest.fixture(scope="session")
async def shared_app(shared_postgres):
    """The application that `at` serves."""
    return SmallApp(shared_postgres)


@pytest.fixture(scope="session")
async def at(shared_app):
    """The address of a server with default settings."""
    async with serving_at(shared_app) as at:
        yield at


@pytest.fixture
async def api(at):
    """A client of that server, without a token."""
    async with httpx.AsyncClient(
        base_url=f"http://{at.host}:{at.port}", verify=False, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="session")
def make_app(shared_postgres):
    """Make an app with settings of its own on the shared PostgreSQL."""
    return lambda **settings: SmallApp(shared_postgres, **settings)


@pytest.fixture(scope="session")
def new_token(shared_postgres):
    """`await new_token("jobs:read")`: the text of a new token."""

    async def create(*scopes, **options):
        name = f"t-{secrets.token_hex(4)}"
        return (await Tokens(shared_postgres).create(name, scopes, **options)).text

    return create


@pytest.fixture(scope="session")
async def token(new_token):
    """The header with a token for jobs."""
    return {"authorization": f"Bearer {await new_token('jobs:read', 'jobs:write')}"}


@pytest.fixture(scope="session")
async def root(new_token):
    """The header with a token for everything."""
    return {"authorization": f"Bearer {await new_token('*')}"}


@pytest.fixture(scope="session")
async def key(new_token):
    """A publishable key."""
    return await new_token("views:hit", publishable=True)


@pytest.fixture(scope="session")
async def secret(new_token):
    """The header of a secret token for views."""
    return {"authorization": f"Bearer {await new_token('views:hit')}"}


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


@pytest.fixture(scope="session")
def serve():
    """Serve an app; the client is closed and the server stopped when the block ends."""

    @asynccontextmanager
    async def run(app, **engines):
        vars(app.engines).update(engines)
        async with (
            serving_at(app) as at,
            httpx.AsyncClient(
                base_url=f"http://{at.host}:{at.port}", verify=False, timeout=60
            ) as client,
        ):
            client.at = at
            yield client

    return run


@pytest.fixture(scope="session")
def serving():
    """`async with serving(app) as at`: the address, the stop event and the task of a server."""
    return serving_at


@pytest.fixture(scope="session")
def talk():
    """`await talk(at, *pieces)`: raw bytes out, raw bytes back."""
    return converse
