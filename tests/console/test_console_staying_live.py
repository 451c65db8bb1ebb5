"""Live pages stay current or report that they are not, through new rows and lost streams."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow
RESTING = (
    "/console",
    "/console/jobs",
    "/console/jobs/hosts",
    "/console/jobs/decisions",
    "/console/jobs/lanes",
    "/console/jobs/lanes/partners",
    "/console/jobs/crons",
    "/console/jobs/alerts",
    "/console/jobs/queues/mail",
    "/console/fetch",
    "/console/fetch/runs/1",
    "/console/fetch/customers",
    "/console/fetch/customers/bike-shop",
    "/console/fetch/hosts",
    "/console/fetch/sources",
    "/console/views",
    "/console/views/lag",
    "/console/feed?viewer=anna",
    "/console/feed/index",
    "/console/media",
    "/console/media/cluster",
    "/console/media/objects",
)
HEARD_MAX = 3
"""The first event arrives immediately, later ones with the next sample."""
LOADS_MAX = 5
SAYS = "document.querySelector('#live-state').textContent"
RECORD = """
window.liveStates = [];
const state = document.querySelector('#live-state');
new MutationObserver(() => window.liveStates.push(state.textContent)).observe(
  state, {childList: true, characterData: true, subtree: true});
"""


async def heard(client, path):
    """First events of a newly loaded page."""
    page = await client.get(path)
    assert page.status_code == 200, path
    assert page.headers["content-encoding"] == "gzip"
    found = re.search(
        r'data-page="([^"]+)" data-live-url="([^"]+)" data-layout="([^"]+)"', page.text
    )
    if found is None:
        return []
    params = {"page": found[1], "url": found[2].replace("&amp;", "&"), "layout": found[3]}
    text, events = "", []
    async with client.stream("GET", "/console/live", params=params) as answer:
        async for chunk in answer.aiter_text():
            text += chunk
            events = re.findall(r"event: (\w+)", text)
            if len(events) >= HEARD_MAX or "stale" in events:
                break
    return events


async def heard_at_rest(client, path):
    """First events after changes by earlier tests have ended."""
    for _ in range(LOADS_MAX):
        events = await heard(client, path)
        if "stale" not in events:
            break
    return events


async def test_an_unchanged_page_is_not_reloaded(stack):
    headers = {"accept": "text/html"}
    cookies = {cookie["name"]: cookie["value"] for cookie in stack.cookies}
    async with httpx.AsyncClient(
        base_url=stack.api, headers=headers, cookies=cookies, timeout=60
    ) as client:
        found = await asyncio.gather(*(heard_at_rest(client, path) for path in RESTING))
    by_path = dict(zip(RESTING, found, strict=True))
    assert not {path: events for path, events in by_path.items() if "stale" in events}
    assert not {path: events for path, events in by_path.items() if "unavailable" in events}
    assert by_path["/console/fetch/sources"].count("heartbeat") > 1, (
        "quiet pages receive heartbeats"
    )


async def says(screen, text):
    """Wait until the footer shows exactly this live status."""

    async def is_said():
        return await screen.page.evaluate(SAYS) == text

    await wait_true(is_said, what=f"the page shows {text!r}")


async def test_rows_and_buttons_update_while_a_filter_has_focus(screen, stack):
    page = screen.page
    stack.call("PUT", "/v1/queues/kept?create=true", json={})
    await screen.open("/console/jobs/queues/kept")
    await says(screen, "live")
    stack.call("PUT", "/v1/queues/kept", json={"importance": 7})
    await page.locator("dd", has_text="7 (override)").wait_for()
    await screen.open("/console/jobs")
    await says(screen, "live")
    await page.keyboard.press("/")
    stack.call("PUT", "/v1/queues/came-1?create=true", json={})
    await page.get_by_role("link", name="came-1").wait_for()
    await page.locator("[name=q]:focus").type("cam")
    stack.call("PUT", "/v1/queues/came-2?create=true", json={})
    await says(screen, "partly live: new and removed rows appear when you finish editing")
    assert await page.locator("[name=q]:focus").input_value() == "cam"
    await page.keyboard.press("Enter")
    await page.get_by_role("link", name="came-2").wait_for()
    await says(screen, "live")


async def test_lost_and_silent_streams_are_replaced(screen, stack):
    page = screen.page
    screen.allow("ERR_INTERNET_DISCONNECTED|ERR_NETWORK")
    await page.clock.install()
    await screen.open("/console/jobs")
    await says(screen, "live")
    await page.evaluate(RECORD)
    await page.clock.fast_forward(13_000)

    async def was_silent():
        return "not live: no response from the server" in await page.evaluate("window.liveStates")

    await wait_true(was_silent, what="the page reports that the server is silent")
    await says(screen, "live")
    await screen.context.set_offline(True)
    # Chromium keeps an open stream; after a silence the page replaces it.
    await page.clock.fast_forward(25_000)
    await says(screen, "not live: disconnected, values are not updated")
    stack.call("PUT", "/v1/queues/came-meanwhile?create=true", json={})
    await screen.context.set_offline(False)
    await page.get_by_role("link", name="came-meanwhile").wait_for()
    await says(screen, "live")


async def test_a_form_keeps_focus_updates_counts_and_survives_a_refusal(screen, stack):
    page = screen.page
    stack.call("PUT", "/v1/queues/formed?create=true", json={})
    stack.enqueue("formed", *({"n": n} for n in range(3)))
    await screen.open("/console/jobs/jobs?queue=formed")
    await page.get_by_role("link", name="Delete all matching").click()
    preview = page.locator("#form-preview")
    await preview.get_by_text("3 jobs match now").wait_for()
    await page.locator("#a-lane").fill("nowhere")
    await preview.get_by_text("0 jobs match now").wait_for()
    assert await page.evaluate("document.activeElement.id") == "a-lane"
    async with page.expect_response("**/calls?**"):
        await page.keyboard.press("x")
        await page.keyboard.press("Escape")
    await page.locator("#form-preview").get_by_text("0 jobs match now").wait_for(state="hidden")
    assert not await page.locator("#dialog[open]").count()
    await screen.open("/console/jobs/queues/formed")
    await page.get_by_role("link", name="Override settings formed").click()
    await page.locator("#a-slots_min").fill("99")
    await page.locator("#a-slots_max").fill("1")
    await page.locator("#form .primary").click()
    await page.locator("#form .flash.bad").wait_for()
    screen.allow("status of 422")
    assert await page.locator("#a-slots_min").input_value() == "99"


async def test_a_page_without_updates_reports_it(screen):
    page = screen.page
    await screen.open("/console/audit")
    await says(screen, "no live updates: press r to reload")
    moment = "document.querySelector('#as-of').dateTime"
    before = await page.evaluate(moment)
    await page.keyboard.press("r")

    async def is_renewed():
        return await page.evaluate(moment) > before

    await wait_true(is_renewed, what="the time of the page is updated")
    await screen.open("/console/feed?viewer=anna")
    await page.keyboard.press("j")
    row = page.locator("[data-row].at")
    post = await row.locator(".id").inner_text()
    assert await row.get_by_role("link", name=f"why? {post}").count() == 1
