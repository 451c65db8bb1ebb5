"""Fixtures of views: services and flushers on the database and keys of one test."""

from __future__ import annotations

import pytest
from tests.views.room_harness import app, engines, jobs, registry, sql

from headrace.views import Views, ViewsConfig
from headrace.views.valkey_store import ValkeyStore
from headrace.views.worker import Flusher

__all__ = ["app", "engines", "jobs", "registry", "sql"]


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
    """`make_flusher()`: another flusher, which runs only when called."""

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
