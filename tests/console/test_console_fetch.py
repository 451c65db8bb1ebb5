"""Fetch: screens match the API, and forms have their effects."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from console_stack import act
from hostile import CORPUS, LAMP, TEXT

from headrace.kernel.terminal import visible

pytestmark = pytest.mark.slow


async def test_a_run_page_explains_row_and_photo_errors(screen, stack):
    [run] = stack.call("GET", "/v1/fetch/runs?customer=bike-shop")["runs"][-1:]
    await screen.open(f"/console/fetch/runs/{run['run']}?list=problems")
    text = await screen.text("main")
    assert "1 invalid" in text
    assert "failed:http_404" in text
    assert "refused:not_an_image" in text
    problem = stack.call("GET", f"/v1/fetch/runs/{run['run']}/errors")["problems"][0]
    assert problem["text"] in text
    await screen.open(f"/console/fetch/runs/{run['run']}?list=photos&lang=ru")
    photos = stack.call("GET", f"/v1/fetch/runs/{run['run']}/errors?lang=ru")["photos"]
    assert photos[0]["text"] in await screen.text("main")
    await screen.open(f"/console/fetch/runs/{run['run']}?list=changes")
    assert "bike-11" in await screen.text("main")


async def test_photos_appear_or_show_the_reason(screen):
    await screen.open("/console/fetch/photos?customer=bike-shop")
    first = screen.page.locator(".shot img").first
    await first.scroll_into_view_if_needed()
    loaded = "image => image.decode().then(() => image.naturalWidth)"
    assert await first.evaluate(loaded) == 320
    broken = await screen.text(".shot.broken:has-text('failed:http_404')")
    assert "404" in broken
    await screen.open("/console/fetch/photos?customer=bike-shop&show=broken")
    assert await screen.page.locator(".shot img").count() == 0


async def test_photo_status_shows_reason_and_next_attempt(screen, stack):
    url = stack.seller.url("/gone/1.jpg")
    await screen.open(f"/console/fetch/why?{urlencode({'url': url})}")
    why = stack.call("GET", "/v1/fetch/why", params={"url": url})
    text = await screen.text("main")
    assert not await screen.findings()
    assert why["customers"][0]["ahead"] in text
    assert why["links"][0]["text"] in text
    await screen.open(f"/console/fetch/why?{urlencode({'url': 'http://10.0.0.1/x.jpg'})}")
    assert "refused" in await screen.text(".verdict")


async def test_hostile_texts_of_sellers_are_escaped(screen, stack):
    """`Screen` fails the test if a text runs, loads, opens a dialog or breaks the policy."""
    [run] = stack.call("GET", "/v1/fetch/runs?customer=lamp-house")["runs"]
    lists = [f"/{run['run']}?list={name}" for name in ("problems", "changes")]
    for page in ("", *(f"/runs{part}" for part in lists), "/customers/lamp-house", "/photos"):
        await screen.open(f"/console/fetch{page}")
        assert "1337" not in await screen.text("main"), "a text was taken for a template"
    await screen.open(f"/console/fetch/runs/{run['run']}?list=changes")
    await screen.page.get_by_role("link", name=LAMP, exact=True).click()
    assert await screen.text("h1") == LAMP
    path = f"fetch/customers/lamp-house/item?{urlencode({'id': LAMP})}"
    await screen.open(f"/console/{path}")
    stored = stack.call("GET", f"/v1/{path}")["fields"]
    shown = await screen.page.locator(".kv").evaluate("list => list.textContent")
    assert all(visible(str(value)) in shown for value in stored.values())
    assert all(text.split()[0] in shown for text in CORPUS)
    assert "1337" not in shown


async def test_hostile_urls_are_escaped(screen):
    screen.allow("status of 4")
    for name in ("/why?url", "/hosts?host", "/photos?customer", "/customers?match", "?customer"):
        path, _, field = name.partition("?")
        await screen.open(f"/console/fetch{path}?{urlencode({field: TEXT[:120]})}")
        assert await screen.page.locator("#main").count() == 1


async def test_a_held_run_is_applied_undone_or_discarded(screen, stack):
    stack.customer("fragile")
    stack.wait_run(stack.catalogue("fragile", [f"f-{n},Item {n},5,,," for n in range(30)]))
    held = stack.catalogue("fragile", ["f-0,Item 0,5,,,"])
    assert stack.wait_run(held)["state"] == "held"
    await screen.open(f"/console/fetch/runs/{held}")
    assert "29" in await screen.text(".tile:has-text('Removed')")
    await screen.page.locator("a.button:has-text('Apply')").click()
    await screen.page.locator("#dialog .primary").wait_for()
    form = await screen.text("#dialog")
    assert f"headrace fetch catalogue confirm {held}" in form
    assert f"POST /v1/fetch/runs/{held}/confirm" in form
    assert "removes 29" in form
    async with screen.page.expect_navigation(wait_until="load"):
        await screen.page.locator("#dialog .primary").click()
    assert f"run {held} is" in await screen.text(".flash")
    run = stack.wait(f"/v1/fetch/runs/{held}", lambda found: found["state"] == "done")
    assert run["gone"] == 29
    await screen.open(f"/console/fetch/runs/{held}")
    assert "Undo run" in await screen.text("main")
    assert "29 published again" in await act(screen, "fetch-undo", run=held)
    undone_by = stack.call("GET", f"/v1/fetch/runs/{held}")["undone_by"]
    await screen.open(f"/console/fetch/runs/{held}")
    assert f"Undone by run {undone_by}" in await screen.text("main")
    assert "Undo run" not in await screen.text("main")
    stack.wait(f"/v1/fetch/runs/{undone_by}", lambda found: found["state"] == "done")
    held = stack.catalogue("fragile", [])
    assert stack.wait_run(held)["state"] == "held"
    assert f"run {held} is discarded" in await act(screen, "fetch-discard", run=held)
    assert stack.call("GET", f"/v1/fetch/runs/{held}")["state"] == "superseded"


async def test_customer_source_and_webhook_are_set_tested_and_removed(screen, stack):
    hook, feed = stack.seller.url("/hook"), stack.seller.url("/made.csv")
    stack.seller.files["/made.csv"] = b"id,name,price\nm-1,Made here,5\n"
    path = "/v1/fetch/customers/made-here"
    told = await act(
        screen, "fetch-customer", customer="made-here", rate="20/5s", connections=3, webhook=hook
    )
    assert "20 requests per 5 s, 3 concurrent" in told
    await act(
        screen,
        "fetch-customer",
        customer="made-here",
        rate="20/5s",
        connections=3,
        hold_share="0.1",
        hold_items=5,
        refresh_s="7d",
    )
    made = stack.call("GET", path)
    assert (made["hold_share"], made["hold_items"], made["refresh_s"]) == (0.1, 5, 604_800)
    limits = {"customer": "made-here", "rate": "20/5s", "connections": 3}
    refused = await act(screen, "fetch-customer", **limits, hold_share="30%")
    assert "a fraction from 0 to 1" in refused
    await screen.open("/console/fetch/customers/made-here")
    assert "Hold above" in await screen.text("main")
    assert "headrace fetch webhook rotate made-here" in told
    assert "whsec" not in told
    made = stack.call("GET", path)
    assert (made["starts_max"], made["window_s"], made["connections"]) == (20, 5.0, 3)
    assert "accepted" in await act(screen, "fetch-webhook-test", customer="made-here")
    told = await act(
        screen, "fetch-source", customer="made-here", url=feed, cron="0 4 * * *", tz="Europe/Berlin"
    )
    assert "next import" in told
    assert stack.call("GET", f"{path}/source")["tz"] == "Europe/Berlin"
    assert "imports the catalogue" in await act(screen, "fetch-bring", customer="made-here")
    stack.wait(f"{path}/source", lambda source: source["outcome"] in ("applied", "done"))
    await screen.open("/console/fetch/sources")
    assert "Made" not in await screen.text("main")
    assert "made-here" in await screen.text("main")
    assert "queued" in await act(screen, "fetch-webhook-replay", customer="made-here")
    await screen.open("/console/fetch/deliveries")
    assert hook in await screen.text("main")
    assert "is deleted" in await act(screen, "fetch-webhook-remove", customer="made-here")
    assert "is removed" in await act(screen, "fetch-source-remove", customer="made-here")
    assert "made-here" not in {
        one["customer"] for one in stack.call("GET", "/v1/fetch/webhooks")["webhooks"]
    }
    assert "made-here" not in {
        one["customer"] for one in stack.call("GET", "/v1/fetch/sources")["sources"]
    }


async def test_a_consumer_is_replayed_and_deleted(screen, stack):
    [consumer] = stack.wait("/v1/fetch/consumers", lambda found: found["consumers"])["consumers"]
    told = await act(screen, "fetch-consumer-replay", name=consumer["name"], customer="bike-shop")
    assert "14 items are queued" in told
    assert "is deleted" in await act(screen, "fetch-consumer-remove", name=consumer["name"])
    assert stack.call("GET", "/v1/fetch/consumers")["consumers"] == []
    assert "is not known" in await act(screen, "fetch-consumer-remove", name=consumer["name"])


async def test_an_invalid_value_is_reported_at_its_field(screen):
    await screen.open("/console/do/fetch-customer?back=/console/fetch")
    await screen.page.locator("#a-customer").fill("somebody")
    await screen.page.locator("#a-connections").fill("many")
    screen.allow("422")
    await screen.page.locator("#form .primary").click()
    await screen.page.locator("#x-connections").wait_for()
    assert "whole number" in await screen.text("#x-connections")
    assert await screen.page.locator("#a-customer").input_value() == "somebody"
