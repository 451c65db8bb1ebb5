"""One browser and one running system for all tests of the console; a tab of its own a test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browser import WIDTHS, Screen, browsing, running_chromium
from console_stack import ConsoleStack

SHOTS = "SCREENSHOTS"
"""A folder: where it is named, `shoot` leaves pictures for the documentation."""


@pytest.fixture(scope="session")
async def chromium():
    """The browser of this run."""
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
    """A tab on the console, 1,280 pixels wide and light; the test fails where anything went wrong in it."""
    async with browsing(chromium, stack.api) as found:
        yield found


@pytest.fixture
def tab(chromium, stack):
    """`async with tab(width=360, scheme="dark", scripts=False) as screen`: one of another kind."""
    return lambda **options: browsing(chromium, stack.api, **options)


@pytest.fixture
def shoot(tab):
    """`await shoot(name, path)`: pictures of a path, light and dark, wide and narrow, where they are asked for."""

    async def run(name: str, path: str) -> None:
        folder = os.environ.get(SHOTS)
        if folder is None:
            return
        for size, scheme in (("laptop", "light"), ("laptop", "dark"), ("phone", "light")):
            async with tab(width=WIDTHS[size], scheme=scheme) as screen:
                await picture(screen, path, Path(folder) / f"{name}-{size}-{scheme}.png")

    return run


async def picture(screen: Screen, path: str, file: Path) -> None:
    """Leave a picture of the whole page."""
    await screen.open(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    await screen.page.screenshot(path=file, full_page=True)
