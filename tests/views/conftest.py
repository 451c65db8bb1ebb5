"""Fixtures of the views room: services and flushers on a database and keys of this test's own."""

from __future__ import annotations

import pytest

from headrace.engines import Engines
from headrace.engines.multiplex import Multiplexer
from headrace.engines.sql import compile_query
from headrace.engines.valkey import ValkeyConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.views import Views, ViewsConfig
from headrace.views.valkey_store import ValkeyStore
from headrace.views.worker import Flusher


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
def make_views(engines, jobs):
    """`make_views(time_zone="Asia/Tokyo")`: another instance of the service."""

    def make(**settings):
        return Views(engines, jobs, ViewsConfig(**settings))

    return make


@pytest.fixture
def views(make_views, registry):
    """The service."""
    views = make_views()
    views.register(registry)
    return views


@pytest.fixture
def make_flusher(engines):
    """`make_flusher()`: another flusher; it does nothing by itself."""

    def make(name="test", **settings):
        return Flusher(engines, ViewsConfig(**settings), name=name)

    return make


@pytest.fixture
def flusher(make_flusher):
    """A flusher; `await flusher.run_once()`."""
    return make_flusher()


@pytest.fixture
def valkey_store(engines):
    """The keys of this test."""
    return ValkeyStore(engines.valkey, engines.multiplexer)


@pytest.fixture
def sql(postgres):
    """Run any statement: `await sql("SELECT ...")` gives its rows."""

    async def run(text):
        return await postgres.all(compile_query("test", f"-- A statement of a test.\n{text}"))

    return run
