"""A crawler over the console: every screen and action form that its links reach, in a browser.

Each room is crawled from its first screen and some seeds. A screen or action form is opened once
per path template, with the first link that leads there. Each page must load without serious
accessibility findings; each screen must fit a phone and keep its contrast in the dark theme.
`Screen` asserts that no script failed and that the security policy was never violated.
"""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from console_stack import TRACK

from headrace.console.model import PREFIX
from headrace.console.pages import find_route
from headrace.console.screens import ROOMS

pytestmark = pytest.mark.slow
PHONE_RULES = ("color-contrast", "scrollable-region-focusable")
LINKS = (
    f"[...document.querySelectorAll('a[href^=\"{PREFIX}\"]')].map((a) => a.getAttribute('href'))"
)
UNLINKED = {"/jobs/jobs/{job:str}"}
"""Screens whose links depend on jobs that tests of their own enqueue."""
NOT_PAGES = (f"{PREFIX}/login", f"{PREFIX}/assets")
TEXTS = {
    "/": "Live state",
    "/audit": "Every action attempted",
    "/jobs": "thumbs",
    "/jobs/hosts": "Slots by host",
    "/jobs/decisions": "Slot decisions",
    "/jobs/jobs": "failed",
    "/jobs/lanes": "partners",
    "/jobs/lanes/{limiter:str}": "acme",
    "/jobs/crons": "nightly",
    "/jobs/alerts": "Alerts",
    "/jobs/queues/{queue:str}": "By minute",
    "/fetch": "bike-shop",
    "/fetch/customers": "lamp-house",
    "/fetch/customers/{customer:str}": "Recent results",
    "/fetch/customers/{customer:str}/item": "City bike 1",
    "/fetch/photos": "why?",
    "/fetch/hosts": "127.0.0.2",
    "/fetch/sources": "Sources",
    "/fetch/deliveries": "Consumers",
    "/views": "ad:39",
    "/views/entity": "Views by people",
    "/views/lag": "Flushed up to",
    "/feed": "lamp-house-0",
    "/feed/authors": "bike-shop-3",
    "/feed/why": "has muted",
    "/feed/index": "Newest post",
    "/media": "local mode",
    "/media/objects": TRACK,
    "/media/object": "audio/",
    "/media/cluster": "No cluster",
    "/media/traces": "No active traces",
}
"""A text that each screen shows with the data of `ConsoleStack.seed`."""
SEEDS = (
    "/console/jobs/jobs?queue=broken",
    "/console/jobs/lanes/partners",
    "/console/jobs/queues/mail?span=24h",
    "/console/fetch/customers/bike-shop",
    "/console/fetch/customers/bike-shop/item?id=bike-1",
    "/console/fetch/photos?customer=bike-shop",
    "/console/views/entity?id=ad%3A39",
    "/console/feed?viewer=anna",
    "/console/feed?viewer=anna&list=following",
    "/console/feed/authors?author=bike-shop",
    "/console/feed/why?viewer=anna&post=loud-1",
    "/console/media/objects?prefix=tracks",
    f"/console/media/object?{urlencode({'key': TRACK})}",
)
"""Pages whose content needs a query, or whose text is known for one path only."""


def place_of(url):
    """Room and path template of the screen, or path of the action form, that `url` leads to."""
    path = url.partition("?")[0].partition("#")[0]
    if path.startswith(f"{PREFIX}/do/"):
        name = path.removeprefix(f"{PREFIX}/do/")
        [room] = [room for room in ROOMS if name in {action.name for action in room.actions}]
        return room, path
    found = find_route(ROOMS, url)
    assert found is not None, f"a link leads nowhere: {url}"
    return found[0].room, found[0].screen.path


async def check_screen(screen, url):
    """The page fits a phone, and its contrast is sufficient in the dark theme."""
    size = screen.page.viewport_size
    await screen.narrow()
    await screen.page.emulate_media(color_scheme="dark")
    assert not await screen.findings(rules=PHONE_RULES), url
    await screen.page.emulate_media(color_scheme="light")
    await screen.page.set_viewport_size(size)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
async def test_every_screen_and_form_that_links_reach_is_sound(screen, stack, room):
    run = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1]["run"]
    waiting = [*SEEDS, f"{PREFIX}/fetch/runs/{run}", room.href]
    urls, places = set(), set()
    while waiting:
        url = waiting.pop(0)
        if not url.startswith(PREFIX) or url.startswith(NOT_PAGES):
            continue
        owner, place = place_of(url)
        if owner is not room or url in urls or (place in places and url not in SEEDS):
            continue
        answer = await screen.open(url)
        assert answer.status == 200, url
        if place not in places:
            assert TEXTS.get(place, "") in await screen.text("main"), url
        waiting += await screen.page.evaluate(LINKS)
        assert not await screen.findings(), url
        if "/do/" not in place:
            await check_screen(screen, url)
        urls.add(url)
        places.add(place)
    assert {one.path for one in room.screens} - UNLINKED <= places, "no link leads there"
    forms = {place for place in places if "/do/" in place}
    assert bool(forms) == bool(room.actions)


async def test_filters_and_forms_work_without_scripts(tab, stack):
    async with tab(scripts=False) as screen:
        await screen.open("/console/fetch")
        await screen.page.locator("#f-customer").fill("lamp-house")
        await screen.press(".filters button")
        assert "customer=lamp-house" in screen.page.url
        assert "bike-shop" not in await screen.text("main")
        await screen.open("/console/feed?viewer=plain")
        await screen.press("a.button:has-text('Follow')")
        await screen.page.locator("#a-author").fill("bike-shop")
        await screen.press("#form .primary")
        assert "viewer plain follows bike-shop" in await screen.text(".flash")
    people = stack.call("GET", "/v1/feed/viewers/plain/follows")["people"]
    assert [one["id"] for one in people] == ["bike-shop"]
