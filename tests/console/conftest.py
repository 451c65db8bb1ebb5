"""One browser and one running system for all console tests; one tab per test."""

from __future__ import annotations

import pytest
from browser import browsing, running_chromium
from console_stack import ConsoleStack
from served import app_of, serving, visiting

from headrace.engines.endpoints import Endpoints


@pytest.fixture(scope="session")
async def chromium():
    """The browser of this test run."""
    async with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
async def stack(tmp_path_factory):
    """The running system with engines of its own, with data in every room."""
    stack = ConsoleStack(tmp_path_factory.mktemp("console") / "site")
    try:
        stack.start()
        await stack.seed()
        yield stack
    finally:
        stack.close()


@pytest.fixture
async def screen(chromium, stack):
    """A light tab, 1,280 pixels wide; the test fails on any fault in it."""
    async with browsing(chromium, stack.api, cookies=stack.cookies) as found:
        yield found


@pytest.fixture
def tab(chromium, stack):
    """`async with tab(width=360, scheme="dark", scripts=False) as screen`: one of another kind."""
    return lambda **options: browsing(
        chromium, stack.api, **{**options, "cookies": [*stack.cookies, *options.get("cookies", [])]}
    )


@pytest.fixture(scope="session")
async def served(tmp_path_factory, running_engines):
    """An application with all rooms, served in this process, and its address."""
    folder = tmp_path_factory.mktemp("served")
    async with running_engines.database() as url:
        valkey_url = running_engines.endpoints.valkey_url
        app = app_of(folder, Endpoints(url, valkey_url, (folder / "blobs").as_uri()))
        async with serving(app) as address:
            yield app, address


@pytest.fixture
async def at(served):
    """A logged-in client of the served console."""
    async with visiting(*served) as visitor:
        yield visitor


@pytest.fixture
async def guarded(served):
    """A client without a session."""
    async with visiting(*served, logged_in=False) as visitor:
        yield visitor
