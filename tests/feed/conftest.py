"""Fixtures of the feed room: services on a database and keys of this test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.engines import Engines
from headrace.engines.multiplex import Multiplexer
from headrace.engines.sql import compile_query
from headrace.engines.valkey import ValkeyConfig
from headrace.feed import Feed, FeedConfig
from headrace.feed.worker import Sweeper
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.kernel.signing import derive_key

KEY = derive_key("a secret of the tests, 32 characters", "cursor")


@pytest.fixture
async def engines(running_engines, postgres, valkey, blobs):
    """All engines, with this test's database and prefix."""
    config = ValkeyConfig(prefix=valkey.prefix)
    line = Multiplexer(running_engines.endpoints.valkey_url, config)
    yield Engines(postgres, valkey, line, blobs)
    await line.close()


@pytest.fixture
def registry():
    """Tasks of this test."""
    return Registry()


@pytest.fixture
def jobs(postgres, registry):
    """The queue below."""
    jobs = Jobs(postgres, JobsConfig(poll_s=0.2), registry)
    registry.bind(lambda: jobs)
    return jobs


@pytest.fixture
def make_feed(engines, jobs):
    """`make_feed(shards=3)`: another instance of the service."""

    def make(**settings):
        return Feed(engines, jobs, FeedConfig(**settings), make_key=lambda: KEY)

    return make


@pytest.fixture
def feed(make_feed, registry):
    """The service."""
    feed = make_feed()
    feed.register(registry)
    return feed


@pytest.fixture
def app(jobs, engines):
    """As much of an app as `drain` needs."""
    return SimpleNamespace(jobs=jobs, engines=engines)


@pytest.fixture
def sweeper(feed):
    """A sweep; `await sweeper.run_once(older_s=0)`."""
    return Sweeper(feed)


@pytest.fixture
def sql(postgres):
    """Run any statement: `await sql("SELECT ...")` gives its rows."""

    async def run(text):
        return await postgres.all(compile_query("test", f"-- A statement of a test.\n{text}"))

    return run
