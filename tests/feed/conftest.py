"""Fixtures of the feed: services on the database and keys of one test."""

from __future__ import annotations

import pytest
from tests.views.room_harness import app, engines, jobs, registry, sql

from headrace.feed import Feed, FeedConfig
from headrace.feed.worker import Sweeper
from headrace.kernel.signing import derive_key

__all__ = ["app", "engines", "jobs", "registry", "sql"]
KEY = derive_key("a secret of the tests, 32 characters", "cursor")


@pytest.fixture
def make_feed(engines, jobs):
    """`make_feed(shards=3)`: another instance of the service."""

    def make(*, engines=engines, **settings):
        return Feed(engines, jobs, FeedConfig(**settings), make_key=lambda: KEY)

    return make


@pytest.fixture
def feed(make_feed, registry):
    """The service."""
    feed = make_feed()
    feed.register(registry)
    return feed


@pytest.fixture
def sweeper(feed):
    """A sweep; `await sweeper.run_once(older_s=0)`."""
    return Sweeper(feed)
