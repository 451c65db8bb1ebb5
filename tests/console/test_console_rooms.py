"""Every screen of fetch, views, feed and media, with data in it: readable for everybody, in every width and colour."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from console_stack import TRACK

pytestmark = pytest.mark.slow
SCREENS = {
    "fetch-runs": ("/console/fetch", "bike-shop"),
    "fetch-customers": ("/console/fetch/customers", "lamp-house"),
    "fetch-customer": ("/console/fetch/customers/bike-shop", "Published last"),
    "fetch-item": ("/console/fetch/customers/bike-shop/item?id=bike-1", "City bike 1"),
    "fetch-photos": ("/console/fetch/photos?customer=bike-shop", "why?"),
    "fetch-hosts": ("/console/fetch/hosts", "127.0.0.2"),
    "fetch-sources": ("/console/fetch/sources", "Sources"),
    "fetch-deliveries": ("/console/fetch/deliveries", "Consumers"),
    "views-top": ("/console/views", "ad:39"),
    "views-entity": ("/console/views/entity?id=ad%3A39", "Views by people"),
    "views-lag": ("/console/views/lag", "Written through"),
    "feed-viewer": ("/console/feed?viewer=anna", "lamp-house-0"),
    "feed-following": ("/console/feed?viewer=anna&list=following", "4 in all"),
    "feed-author": ("/console/feed/authors?author=bike-shop", "bike-shop-3"),
    "feed-why": ("/console/feed/why?viewer=anna&post=loud-1", "has muted"),
    "feed-index": ("/console/feed/index", "Newest post"),
    "media-node": ("/console/media", "local mode"),
    "media-objects": ("/console/media/objects?prefix=tracks", TRACK),
    "media-object": (f"/console/media/object?{urlencode({'key': TRACK})}", "audio/"),
    "media-cluster": ("/console/media/cluster", "No cluster"),
    "media-traces": ("/console/media/traces", "Nothing is traced"),
}

VARIED = {
    "media-node",
    "fetch-runs",
    "fetch-photos",
    "views-top",
    "views-entity",
    "feed-viewer",
    "feed-why",
    "media-object",
}
"""Between them they have every piece that pages are made of."""


@pytest.mark.parametrize("name", SCREENS)
async def test_a_screen_is_right_for_everybody(screen, name):
    path, text = SCREENS[name]
    answer = await screen.open(path)
    assert answer.status == 200
    assert text in await screen.text("main")
    assert not await screen.findings()
    page = screen.page
    await screen.narrow()
    if name in VARIED:
        await page.emulate_media(color_scheme="dark")
        assert not await screen.findings(rules=["color-contrast", "scrollable-region-focusable"])


async def test_a_runs_page_is_right_for_everybody(screen, stack):
    runs = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"]
    await screen.open(f"/console/fetch/runs/{runs[-1]['run']}")
    assert not await screen.findings()
    await screen.narrow()


async def test_every_page_and_form_is_there_without_scripts(tab, stack):
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
        assert "viewer plain follows bike-shop" in await screen.text(".told")
    people = stack.call("GET", "/v1/feed/viewers/plain/follows")["people"]
    assert [one["id"] for one in people] == ["bike-shop"]
