"""Screenshots of the console: those of the documentation, and a gallery of every screen.

`make screenshots` writes the documentation's. `GALLERY=FOLDER pytest -n 0` of this file writes
every screen in every state of `gallery`, at three widths, dark and light; `-k busy` writes one
state. Without a folder, each procedure takes one sample, to keep it working.
"""

from __future__ import annotations

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
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
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
    for _ in range(5):
        await page.set_viewport_size({"width": width, "height": height})
        await page.evaluate(DRAWN)
        png = await page.screenshot(full_page=True)
        needed = await page.evaluate("document.documentElement.scrollHeight")
        if needed <= height:
            break
        height = needed  # a live page may have grown meanwhile
    return png


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
    """Take each page at each width in both schemes; return those wider than their window."""
    folder.mkdir(parents=True, exist_ok=True)
    too_wide = []
    for scheme in ("light", "dark"):
        async with tab(scheme=scheme) as screen:
            # Pages of the gallery may be refusals.
            screen.allow("status of [45]|answer 50")
            for name, path in paths.items():
                if name == gallery.LOGIN:
                    await screen.context.clear_cookies()
                await screen.open(path)
                for width in WIDTHS.values():
                    png = await whole_page(screen.page, width, GALLERY_HEIGHT)
                    if await screen.overflow():
                        too_wide.append(f"{path} at {width}")
                    (folder / f"{name}-{width}-{scheme}.png").write_bytes(png)
    return too_wide


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
