"""Fixtures of the promises: a fleet of workers, and a site as users have it."""

from __future__ import annotations

import pytest
from tests.kit.site import Site
from tests.kit.storm.fleet import SETTINGS, SLOT_SETTINGS, open_fleet

ROOMS = ("jobs", "fetch", "views", "feed", "media")
pytest.register_assert_rewrite(
    "tests.kit.storm.storm", *(f"tests.kit.storm.room_{room}" for room in ROOMS)
)


@pytest.fixture
def fleet(tmp_path, running_engines, postgres, database_url):
    fleet = open_fleet(tmp_path / "fleet", running_engines, postgres, database_url, **SETTINGS)
    yield fleet
    fleet.end()


@pytest.fixture
def host(tmp_path, running_engines, postgres, database_url):
    """The same with long leases, for agents with few slots."""
    host = open_fleet(tmp_path / "host", running_engines, postgres, database_url, **SLOT_SETTINGS)
    yield host
    host.end()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site for the tests of a module; it may run already."""
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.end()
