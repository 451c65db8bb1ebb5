"""One browser and one running system for all console tests; one tab per test."""

from __future__ import annotations

import pytest
from browser import browsing, running_chromium
from console_stack import ConsoleStack


@pytest.fixture(scope="session")
async def chromium():
    """The browser of this test run."""
    async with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
async def stack(tmp_path_factory):
    """The running system, with data in every room."""
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
