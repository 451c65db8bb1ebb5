"""Screenshots of the console: those of the documentation, and a gallery of every screen.

`make screenshots` writes the documentation's. `GALLERY=FOLDER pytest -n 0` of this file writes
every screen in every state of `gallery`, at three widths, dark and light; `-k busy` writes one
state. Without a folder, each procedure takes one sample, to keep it working.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import gallery
import pytest
from browser import WIDTHS, browsing
from console_stack import TRACK, ConsoleStack
from PIL import Image
from tests.kit.waiting import wait_true

SHOTS = "SCREENSHOTS"
"""Environment variable with the output folder."""
GALLERY = "GALLERY"
"""Environment variable with the folder of the gallery."""
GALLERY_HEIGHT = 900
SCHEMES = ("light", "dark")
FAST_PNG = {"format": "png", "optimizeForSpeed": True}
"""Takes half of the processor time of Playwright's own screenshot."""
TABS = 4
"""Pages that the gallery takes at once."""
DRAWN_HEIGHT = """new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(
  () => done(document.documentElement.scrollHeight))))"""
DOCS = Path(__file__).parents[2] / "docs"
FOLDER_BYTES_MAX = 1_500_000
HEIGHT = 640
COLOURS = 256
LOADED = "Promise.all([...document.images].map((image) => image.decode()))"
ENDED = """document.querySelectorAll('[data-chart="jobs-ended"] .u-value')[1]?.textContent ?? '0'"""
"""Jobs that ended in the last minute of their chart."""
BUSY = ("overview", "fleet")
"""Pictures of the gallery's busy shop; the others show what the stack of the tests has."""
SAMPLE = "run"
"""The screenshot that a test run takes."""
pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Picture:
    """A page with window width and color scheme."""

    path: str
    size: str = "laptop"
    scheme: str = "light"


PICTURES = {
    "fleet": Picture("/console/jobs", scheme="dark"),
    "retry": Picture("/console/do/jobs.bulk_retry?queue=broken&state=failed", size="phone"),
    "run": Picture("/console/fetch/runs/{run}"),
    "photos": Picture("/console/fetch/photos?customer=bike-shop", scheme="dark"),
    "top": Picture("/console/views?limit=20"),
    "why": Picture("/console/feed/why?viewer=anna&post=loud-1"),
    "object": Picture(f"/console/media/object?key={TRACK}", size="phone", scheme="dark"),
    "overview": Picture("/console"),
}


def small(png: bytes) -> bytes:
    """The screenshot with a reduced palette, at a third of its size."""
    out = io.BytesIO()
    found = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    found.save(out, "PNG", optimize=True)
    return out.getvalue()


async def whole_page(page, width, height):
    """A screenshot of a window as high as its page, so that nothing in it scrolls."""
    needed, session = height, await page.context.new_cdp_session(page)
    for _ in range(5):
        height = needed
        await page.set_viewport_size({"width": width, "height": height})
        needed = await page.evaluate(DRAWN_HEIGHT)
        if needed > height:
            continue
        taken = await session.send("Page.captureScreenshot", FAST_PNG)
        needed = await page.evaluate(DRAWN_HEIGHT)
        if needed <= height:  # else a live page has grown meanwhile
            await session.detach()
            return base64.b64decode(taken["data"])
    raise AssertionError(f"{page.url} grows with its window: {needed} px at {height} px")


async def work(screen, stack):
    """Create load until the overview shows rates and a full minute of jobs."""

    async def is_measured():
        stack.call("POST", "/v1/views", json=[{"id": "ad:1", "viewer": "v", "class": "human"}] * 9)
        stack.call("GET", "/v1/feed/viewers/anna")
        await screen.open("/console")
        has_rates = "measuring" not in await screen.text("main")
        return has_rates and await screen.page.evaluate(ENDED) != "0"

    await wait_true(is_measured, what="the overview has measured its rates", deadline_s=200)


@pytest.mark.parametrize("name", PICTURES.keys() - BUSY if SHOTS in os.environ else [SAMPLE])
async def test_a_screenshot_is_taken(tab, stack, tmp_path, name):
    run = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1]["run"]
    await take(tab, name, Path(os.environ.get(SHOTS) or tmp_path), run=run)


@pytest.mark.skipif(SHOTS not in os.environ, reason="starts a site of its own for two pictures")
async def test_screenshots_of_a_busy_site_are_taken(chromium, tmp_path):
    stack = ConsoleStack(tmp_path, site=gallery.SITE)

    def tab(**options):
        return browsing(chromium, stack.api, cookies=stack.cookies, **options)

    try:
        stack.start()
        async with gallery.bring_into(stack, "busy"):
            async with tab() as screen:
                await work(screen, stack)
            for name in BUSY:
                await take(tab, name, Path(os.environ[SHOTS]))
    finally:
        stack.close()


async def take(tab, name, folder, **given):
    """Write the picture `name` to the folder."""
    picture = PICTURES[name]
    folder.mkdir(parents=True, exist_ok=True)
    async with tab(width=WIDTHS[picture.size], scheme=picture.scheme) as screen:
        await screen.open(picture.path.format(**given))
        await screen.page.evaluate(LOADED)
        if await screen.page.locator("main[data-page]").count():
            await screen.wait_live()
        png = small(await whole_page(screen.page, WIDTHS[picture.size], HEIGHT))
        (folder / f"{name}.png").write_bytes(png)
    assert len(png) < FOLDER_BYTES_MAX / len(PICTURES)


async def photograph(tab, folder, paths):
    """Take each page at each width in both schemes; return what does not fit its window.

    A page is loaded once, as on a phone, where menus scroll to the current item. Its other
    pictures follow from the width and the scheme of the window. While one tab waits for an
    engine that does not answer, the others work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, faults = list(paths.items()), []

    async def work():
        async with tab(width=WIDTHS["phone"]) as screen:
            # Pages of the gallery may be refusals.
            screen.allow("status of [45]|answer 50")
            while waiting:
                name, path = waiting.pop(0)
                faults.extend(await take_views(screen, folder, name, path))

    async with asyncio.TaskGroup() as tabs:
        for _ in range(TABS):
            tabs.create_task(work())
    return faults


async def take_views(screen, folder, name, path):
    """Take one page at each width in both schemes; return what does not fit its window."""
    if name == gallery.LOGIN:
        await screen.context.clear_cookies()
    await screen.page.set_viewport_size({"width": WIDTHS["phone"], "height": GALLERY_HEIGHT})
    await screen.open(path)
    faults = []
    for width in WIDTHS.values():
        for scheme in SCHEMES:
            await screen.page.emulate_media(color_scheme=scheme)
            png = await whole_page(screen.page, width, GALLERY_HEIGHT)
            (folder / f"{name}-{width}-{scheme}.png").write_bytes(png)
        if await screen.overflow():
            faults.append(f"{path} at {width} px: wider than the window")
        if width == WIDTHS["phone"]:
            faults += [f"{path} at {width} px: {fault}" for fault in await screen.phone_faults()]
    return faults


async def test_the_gallery_takes_a_screen_at_every_width_and_scheme(tab, stack, tmp_path):
    paths = {"jobs": "/console/jobs", gallery.LOGIN: "/console/login"}
    assert await photograph(tab, tmp_path, paths) == []
    assert len(list(tmp_path.glob("*.png"))) == len(paths) * len(WIDTHS) * 2
    assert gallery.screens(stack, "empty").keys() > {"overview", "fetch-review", "media-traces"}


@pytest.mark.skipif(GALLERY not in os.environ, reason="writes 800 pictures for people")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("state", gallery.STATES)
async def test_every_screen_is_in_the_gallery(chromium, tmp_path, state):
    stack = ConsoleStack(tmp_path, site="" if state == "empty" else gallery.SITE)
    try:
        stack.start()
        async with gallery.bring_into(stack, state):
            too_wide = await photograph(
                lambda **options: browsing(chromium, stack.api, cookies=stack.cookies, **options),
                Path(os.environ[GALLERY]) / state,
                gallery.screens(stack, state),
            )
    finally:
        stack.close()
    assert too_wide == []


def test_every_screenshot_is_stored_used_and_small():
    files = {file.stem: file for file in (DOCS / "screenshots").iterdir()}
    assert files.keys() == PICTURES.keys()
    shown = re.findall(r"!\[[^\]]+\]\(screenshots/(\w+)\.png\)", (DOCS / "console.md").read_text())
    assert sorted(shown) == sorted(PICTURES)
    assert sum(file.stat().st_size for file in files.values()) < FOLDER_BYTES_MAX
