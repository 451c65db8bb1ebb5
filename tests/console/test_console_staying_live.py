"""That whatever stands on a live page is live, or says that it is not: through rows that come, buttons that change, lost streams."""

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
"""The first event comes at once, the others once it was looked again."""
LOADS_MAX = 5
SAYS = "document.querySelector('#live-state').textContent"
RECORD = """
window.said = [];
const state = document.querySelector('#live-state');
new MutationObserver(() => window.said.push(state.textContent)).observe(state, {childList: true, characterData: true, subtree: true});
"""


async def heard(client, path):
    """The first events of a page that was just loaded."""
    page = await client.get(path)
    assert page.status_code == 200, path
    assert page.headers["content-encoding"] == "gzip"
    found = re.search(
        r'data-page="([^"]+)" data-live-url="([^"]+)" data-frame="([^"]+)"', page.text
    )
    if found is None:
        return []
    params = {"page": found[1], "url": found[2].replace("&amp;", "&"), "frame": found[3]}
    text, events = "", []
    async with client.stream("GET", "/console/live", params=params) as answer:
        async for chunk in answer.aiter_text():
            text += chunk
            events = re.findall(r"event: (\w+)", text)
            if len(events) >= HEARD_MAX or "stale" in events:
                break
    return events


async def heard_at_rest(client, path):
    """The same once nothing comes or goes any more, which tests before may have begun."""
    for _ in range(LOADS_MAX):
        events = await heard(client, path)
        if "stale" not in events:
            break
    return events


async def test_a_page_at_rest_is_not_loaded_anew(stack):
    headers = {"accept": "text/html"}
    cookies = {cookie["name"]: cookie["value"] for cookie in stack.cookies}
    async with httpx.AsyncClient(
        base_url=stack.api, headers=headers, cookies=cookies, timeout=60
    ) as client:
        found = await asyncio.gather(*(heard_at_rest(client, path) for path in RESTING))
    by_path = dict(zip(RESTING, found, strict=True))
    assert not {path: events for path, events in by_path.items() if "stale" in events}
    assert not {path: events for path, events in by_path.items() if "trouble" in events}
    assert by_path["/console/fetch/sources"].count("beat") > 1, (
        "quiet pages hear that they are live"
    )


async def says(screen, text):
    """Wait until the foot of the page says exactly this about being live."""

    async def is_said():
        return await screen.page.evaluate(SAYS) == text

    await wait_true(is_said, what=f"the page says {text!r}")


async def test_rows_and_buttons_come_while_a_filter_has_the_focus(screen, stack):
    page = screen.page
    stack.call("PUT", "/v1/queues/kept?create=true", json={})
    await screen.open("/console/jobs/queues/kept")
    await says(screen, "live")
    stack.call("PUT", "/v1/queues/kept", json={"importance": 7})
    await page.locator("dd", has_text="7 (set by a person)").wait_for()
    await screen.open("/console/jobs")
    await says(screen, "live")
    await page.keyboard.press("/")
    stack.call("PUT", "/v1/queues/came-1?create=true", json={})
    await page.get_by_role("link", name="came-1").wait_for()
    await page.locator("[name=q]:focus").type("cam")
    stack.call("PUT", "/v1/queues/came-2?create=true", json={})
    await says(screen, "not all is live: what came or went is shown once you are done here")
    assert await page.locator("[name=q]:focus").input_value() == "cam"
    await page.keyboard.press("Enter")
    await page.get_by_role("link", name="came-2").wait_for()
    await says(screen, "live")


async def test_a_lost_stream_misses_nothing_and_a_silent_one_is_not_live(screen, stack):
    page = screen.page
    screen.allow("ERR_INTERNET_DISCONNECTED|ERR_NETWORK")
    await page.clock.install()
    await screen.open("/console/jobs")
    await says(screen, "live")
    await page.evaluate(RECORD)
    await page.clock.fast_forward(13_000)

    async def was_silent():
        return "not live: the server says nothing" in await page.evaluate("window.said")

    await wait_true(was_silent, what="the page says that the server says nothing")
    await says(screen, "live")
    await screen.context.set_offline(True)
    # Chromium keeps a stream that is open; the page gives it up after a silence and begins another.
    await page.clock.fast_forward(25_000)
    await says(screen, "not live: the numbers stand still")
    stack.call("PUT", "/v1/queues/came-meanwhile?create=true", json={})
    await screen.context.set_offline(False)
    await page.get_by_role("link", name="came-meanwhile").wait_for()
    await says(screen, "live")


async def test_a_form_keeps_focus_counts_anew_and_survives_a_refusal(screen, stack):
    page = screen.page
    stack.call("PUT", "/v1/queues/formed?create=true", json={})
    stack.enqueue("formed", *({"n": n} for n in range(3)))
    await screen.open("/console/jobs/jobs?queue=formed")
    await page.get_by_role("link", name="Delete all that fit").click()
    preview = page.locator("#form-preview")
    await preview.get_by_text("3 jobs fit now").wait_for()
    await page.locator("#a-lane").fill("nowhere")
    await preview.get_by_text("0 jobs fit now").wait_for()
    assert await page.evaluate("document.activeElement.id") == "a-lane"
    async with page.expect_response("**/calls?**"):
        await page.keyboard.press("x")
        await page.keyboard.press("Escape")
    await page.locator("#form-preview").get_by_text("0 jobs fit now").wait_for(state="hidden")
    assert not await page.locator("#dialog[open]").count()
    await screen.open("/console/jobs/queues/formed")
    await page.get_by_role("link", name="Set queue formed").click()
    await page.locator("#a-slots_min").fill("99")
    await page.locator("#a-slots_max").fill("1")
    await page.locator("#form .primary").click()
    await page.locator("#form .told.bad").wait_for()
    screen.allow("status of 422")
    assert await page.locator("#a-slots_min").input_value() == "99"


async def test_a_still_page_says_so_and_keys_work_on_lists_too(screen):
    page = screen.page
    await screen.open("/console/audit")
    await says(screen, "stands still: r loads it anew")
    moment = "document.querySelector('#as-of').dateTime"
    before = await page.evaluate(moment)
    await page.keyboard.press("r")

    async def is_renewed():
        return await page.evaluate(moment) > before

    await wait_true(is_renewed, what="the moment of the page is renewed")
    await screen.open("/console/feed?viewer=anna")
    await page.keyboard.press("j")
    row = page.locator("[data-row].at")
    post = await row.locator(".id").inner_text()
    assert await row.get_by_role("link", name=f"why? {post}").count() == 1
