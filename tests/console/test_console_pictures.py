"""Screenshots of the documentation; `make screenshots` writes those of `PICTURES`.

Without an output folder, the test writes one to a temporary folder, to keep the procedure working.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import WIDTHS
from console_stack import TRACK
from PIL import Image
from tests.kit.waiting import wait_true

SHOTS = "SCREENSHOTS"
"""Environment variable with the output folder."""
DOCS = Path(__file__).parents[2] / "docs"
FOLDER_BYTES_MAX = 1_500_000
HEIGHT = 480
COLOURS = 256
LOADED = "Promise.all([...document.images].map((image) => image.decode()))"
ENDED = "document.querySelectorAll('.u-legend .u-value')[1]?.textContent ?? '0'"
"""Jobs that ended in the last minute of the first chart."""
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


async def work(screen, stack):
    """Create load until the overview shows rates and a full minute of jobs."""

    async def is_measured():
        stack.enqueue("mail", *({"to": f"reader-{n}@example.org"} for n in range(20)))
        stack.call("POST", "/v1/views", json=[{"id": "ad:1", "viewer": "v", "class": "human"}] * 9)
        stack.call("GET", "/v1/feed/viewers/anna")
        await screen.open("/console")
        has_rates = "measuring" not in await screen.text("main")
        return has_rates and await screen.page.evaluate(ENDED) != "0"

    await wait_true(is_measured, what="the overview has measured its rates", deadline_s=200)


@pytest.mark.parametrize("name", PICTURES if SHOTS in os.environ else [SAMPLE])
async def test_a_screenshot_is_taken(tab, stack, tmp_path, name):
    picture = PICTURES[name]
    folder = Path(os.environ.get(SHOTS) or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    run = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1]["run"]
    async with tab(width=WIDTHS[picture.size], scheme=picture.scheme) as screen:
        await screen.page.set_viewport_size({"width": WIDTHS[picture.size], "height": HEIGHT})
        if name == "overview" and SHOTS in os.environ:
            await work(screen, stack)
        await screen.open(picture.path.format(run=run))
        await screen.page.evaluate(LOADED)
        if await screen.page.locator("main[data-page]").count():
            await screen.wait_live()
        png = small(await screen.page.screenshot(full_page=True))
        (folder / f"{name}.png").write_bytes(png)
    assert len(png) < FOLDER_BYTES_MAX / len(PICTURES)


def test_every_screenshot_is_stored_used_and_small():
    files = {file.stem: file for file in (DOCS / "screenshots").iterdir()}
    assert files.keys() == PICTURES.keys()
    shown = re.findall(r"!\[[^\]]+\]\(screenshots/(\w+)\.png\)", (DOCS / "console.md").read_text())
    assert sorted(shown) == sorted(PICTURES)
    assert sum(file.stat().st_size for file in files.values()) < FOLDER_BYTES_MAX
