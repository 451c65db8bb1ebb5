"""Fixtures: real engines started once per run; a database, key prefix and folder per test."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator
from compileall import compile_dir
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from tests.kit import run_cleanup
from tests.kit.engines import engines_folder
from tests.kit.hosts import hosts
from tests.kit.own_cluster import own_cluster
from tests.kit.own_postgres import SERVERS as POSTGRES_SERVERS
from tests.kit.own_postgres import OwnPostgres
from tests.kit.own_s3 import SERVERS as S3_SERVERS
from tests.kit.own_s3 import S3Proxy, client_env, own_s3
from tests.kit.own_sentinels import sentinel_servers
from tests.kit.processes import NEVER_RETRIEVED
from tests.kit.stock_valkey import SERVERS as VALKEY_SERVERS
from tests.kit.stock_valkey import StockValkey

import headrace
from headrace.app import PACKAGES
from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.endpoints import Endpoints
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.testing.databases import EnginesForTests, engines_for_tests, template_on

# The time of an example depends on other load of the machine.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


SOURCES = str(Path(headrace.__file__).parent)


def pytest_addoption(parser):
    """Run the tests on other servers than the embedded ones; `make soak` does."""
    parser.addoption("--postgres", default="embedded", choices=("embedded", *POSTGRES_SERVERS))
    parser.addoption("--valkey", default="embedded", choices=("embedded", *VALKEY_SERVERS))
    parser.addoption("--s3", default="moto", choices=S3_SERVERS)


def pytest_configure(config):
    """Compile Headrace once, because read-only processes cannot, and start the run's cleanup."""
    if not hasattr(config, "workerinput"):
        compile_dir(Path(headrace.__file__).parent, quiet=2, workers=0)
        config.pluginmanager.register(run_cleanup.start())
        # Short whatever the user is called: the path of a Unix socket has 107 bytes.
        config.option.basetemp = config.option.basetemp or f"{os.environ['TMPDIR']}/t"


@pytest.fixture(autouse=True)
def _logs_as_before():
    """A command run in this process configures the logs of all: put them back."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _errors_are_looked_at():
    """Fail if a task of Headrace fails and its error is never read; asyncio logs that."""
    forgotten = []

    class Forgotten(logging.Handler):
        def emit(self, record):
            text = logging.Formatter().format(record)
            if NEVER_RETRIEVED in text and SOURCES in text:
                forgotten.append(text)

    handler = Forgotten()
    logging.getLogger("asyncio").addHandler(handler)
    yield
    logging.getLogger("asyncio").removeHandler(handler)
    assert forgotten == [], f"a task failed and nobody looked: {forgotten[0]}"


@pytest.fixture
def servers_folder():
    """A folder for servers of this test's own."""
    with engines_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
async def running_engines(request):
    """The engines of this run: the embedded ones, or those that --postgres and --valkey name."""
    postgres, valkey = (request.config.getoption(name) for name in ("--postgres", "--valkey"))
    with engines_folder() as folder:
        if postgres == valkey == "embedded":
            async with engines_for_tests(folder, PACKAGES) as engines:
                yield engines
        else:
            async with stock_engines(folder, postgres, valkey) as engines:
                yield engines


@asynccontextmanager
async def stock_engines(folder: Path, postgres: str, valkey: str) -> AsyncIterator[EnginesForTests]:
    """Servers as they are installed, with their own configurations."""
    versions = {"embedded": "18"}
    server = OwnPostgres(folder / "postgres", versions.get(postgres, postgres))
    names = {"embedded": "valkey9"}
    hot = StockValkey(folder / "valkey", names.get(valkey, valkey))
    try:
        await server.make()
        await server.start()
        hot.start()
        endpoints = Endpoints(server.socket_url, hot.url, (folder / "blobs").as_uri())
        async with template_on(endpoints, PACKAGES) as engines:
            yield engines
    finally:
        hot.end()
        server.end()


@pytest.fixture(scope="session")
def cluster():
    """A Valkey Cluster of three primaries; a test that breaks it repairs it."""
    with engines_folder() as folder, own_cluster(folder) as cluster:
        yield cluster


@pytest.fixture
def own_primaries():
    """A cluster of this test's own, whose hash slots need not be put back."""
    with engines_folder() as folder, own_cluster(folder) as cluster:
        yield cluster


@pytest.fixture
def replicated():
    """A cluster of this test's own, and a replica of its first primary."""
    with engines_folder() as folder, own_cluster(folder) as cluster:
        yield cluster, cluster.add_replica(cluster.primaries[0])


@pytest.fixture
def net():
    """A network of hosts, or a skip with the reason."""
    with hosts() as net:
        yield net


@pytest.fixture
def spread(net):
    """A cluster of this test's own: three primaries and three replicas, each on its own host."""
    with engines_folder() as folder, own_cluster(folder, net=net) as cluster:
        for primary in cluster.primaries:
            cluster.add_replica(primary)
        cluster.wait_serving()
        yield cluster


@pytest.fixture
def watched(net):
    """Three servers and three Sentinels of this test's own, a pair on each of three hosts."""
    with engines_folder() as folder, sentinel_servers(folder, net) as servers:
        yield servers


OWN_SERVERS = ("replicated", "own_primaries", "spread", "watched")


@pytest.fixture
async def cluster_engines(request, postgres, blobs):
    """All engines, with a key prefix per test in the shared cluster, or with the test's servers."""
    own = [name for name in OWN_SERVERS if name in request.fixturenames]
    found = request.getfixturevalue(own[0] if own else "cluster")
    url = (found[0] if isinstance(found, tuple) else found).url
    config = ValkeyConfig(prefix=f"test-{secrets.token_hex(4)}")
    engines = Engines(postgres, Valkey(url, config), Multiplexer(url, config), blobs)
    yield engines
    await engines.multiplexer.close()
    await engines.valkey.close()


@pytest.fixture(scope="session")
def s3(request):
    """An S3 server with an empty bucket: moto, or the one that --s3 names."""
    with engines_folder() as folder, own_s3(folder, request.config.getoption("--s3")) as server:
        yield server


@pytest.fixture
async def s3_proxy(s3, monkeypatch):
    """A proxy in front of it, which S3 clients of this test use."""
    proxy = S3Proxy(s3.port)
    await proxy.start()
    for name, value in client_env(proxy.port).items():
        monkeypatch.setenv(name, value)
    yield proxy
    await proxy.stop()


@pytest.fixture
async def database_url(running_engines):
    """A migrated database of this test's own."""
    async with running_engines.database() as url:
        yield url


@pytest.fixture
async def postgres(database_url):
    """A pool on this test's database."""
    postgres = Postgres(database_url, PostgresConfig())
    yield postgres
    await postgres.close()


@pytest.fixture
async def valkey(running_engines):
    """A client whose keys nobody else uses."""
    config = ValkeyConfig(prefix=f"test-{secrets.token_hex(4)}")
    valkey = Valkey(running_engines.endpoints.valkey_url, config)
    yield valkey
    await valkey.close()


@pytest.fixture
async def blobs(tmp_path: Path):
    """An empty object store in a folder."""
    blobs = Blobs((tmp_path / "blobs").as_uri())
    yield blobs
    await blobs.close()
