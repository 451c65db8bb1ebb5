"""The command palette and the search page: what they find with which scopes, and by which keys."""

from __future__ import annotations

import pytest
from crawler import Page
from hostile import CORPUS, LAMP
from served import visiting

from headrace.feed.lookup import FeedName
from headrace.jobs import NewJob
from headrace.views import ViewsConfig
from headrace.views.worker import Flusher

pytestmark = pytest.mark.slow
EXPECTED = {
    ("queue", "palette.queue"),
    ("limiter", "palette.queue"),
    ("customer", "palette-shop"),
    ("viewed item", "palette:1"),
    ("author", "palette-author"),
    ("viewer", "palette-viewer"),
    ("folder", "palette/"),
}


async def matches(visitor, text):
    """What the palette receives for a text."""
    answer = await visitor.get("/console/palette", params={"q": text})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    return answer.json()


@pytest.fixture
async def filled(served):
    """The served application with a thing of each kind; the id of its job."""
    app, _ = served
    await app.jobs.queues.create("palette.queue")
    await app.jobs.lanes.set_limiter("palette.queue", starts_max=None, window_s=None)
    await app.fetch.customers.set("palette-shop", starts_max=10, window_s=1.0, connections=1)
    await app.feed.follow("palette-viewer", "palette-author")
    await app.feed.post("palette-author", "palette-post")
    await app.views.hit("palette:1")
    await Flusher(app.engines, ViewsConfig(), name="palette").run_once()
    await app.media.objects.put("palette/one.png", b"1")
    return await app.jobs.enqueue(NewJob(queue="palette.queue", payload=None))


async def test_things_of_every_room_are_found_by_the_beginning_of_their_name(filled, at):
    found = await matches(at, "palette")
    assert {(one["kind"], one["label"]) for one in found} >= EXPECTED
    for one in found:
        page = await at.get(one["href"])
        assert page.status_code == 200, one
    [job] = [one for one in await matches(at, str(filled)) if one["kind"] == "job"]
    assert (job["href"], job["hint"]) == (
        f"/console/jobs/jobs/{filled}",
        "waiting in palette.queue",
    )
    objects = [one["href"] for one in await matches(at, "palette/on")]
    assert "/console/media/object?key=palette%2Fone.png" in objects
    screens = await matches(at, "")
    assert {one["kind"] for one in screens} == {"screen"}
    assert "/console/jobs/crons" in {one["href"] for one in screens}
    shown = Page("/", (await at.get("/console/search?q=palette")).text)
    assert {one["href"] for one in found} <= set(shown.links)
    assert shown.faults == []


async def test_examples_of_the_feed_are_the_latest(filled, served):
    app, _ = served
    assert filled
    assert "palette-viewer" in await app.feed.lookup.recent()
    assert "palette-author" in await app.feed.lookup.recent(authors=True)
    assert await app.feed.lookup.find("palette-a") == [
        FeedName(id="palette-author", is_author=True)
    ]
    backlog = await app.feed.lookup.backlog()
    assert (backlog.overdue, backlog.overdue_since_at) == (0, None)


async def test_a_caller_finds_only_what_its_token_may_read(filled, served):
    app, address = served
    assert filled
    async with visiting(app, address, logged_in=False) as visitor:
        refused = await visitor.get("/console/palette", headers={"accept": "application/json"})
        assert refused.status_code == 401
        await visitor.log_in(await visitor.token("views:read"), back="/console/views")
        found = await matches(visitor, "palette")
        assert {one["kind"] for one in found} == {"viewed item"}
        screens = {one["href"] for one in await matches(visitor, "")}
        assert screens
        assert not [one for one in screens if "/jobs" in one or "/audit" in one]


async def test_states_are_searched_as_lists(at):
    failed = [one for one in await matches(at, "failed") if one["kind"] == "list"]
    assert failed[0]["href"] == "/console/jobs/jobs?state=failed"
    held = {one["href"] for one in await matches(at, "held")}
    assert "/console/fetch?show=held" in held


@pytest.mark.parametrize("text", [*CORPUS, LAMP, "9" * 30, "../..", "%", "_", "-5", "a\\b", "~"])
async def test_any_text_is_a_search(at, text):
    assert isinstance(await matches(at, text), list)
    page = Page("/", (await at.get("/console/search", params={"q": text})).text)
    assert page.faults == []


async def test_a_long_text_is_refused(at):
    answer = await at.get("/console/palette", params={"q": "x" * 300})
    assert answer.status_code == 422


async def test_the_palette_leads_by_keys_to_things_and_actions(screen):
    page = screen.page
    await screen.open("/console/jobs/queues/mail")
    await page.keyboard.press("Control+k")
    field = page.locator("#palette-q")
    await field.fill("broken")
    option = page.locator("#palette [role=option]", has_text="queuebroken")
    await option.wait_for()
    assert not await screen.findings()
    while await option.get_attribute("aria-selected") != "true":
        await page.keyboard.press("ArrowDown")
    assert await field.get_attribute("aria-activedescendant") == await option.get_attribute("id")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/console/jobs/queues/broken")
    await page.locator("[data-palette]").click()
    await field.fill("pause")
    await page.locator("#palette [role=option]", has_text="actionPause queue").wait_for()
    await page.keyboard.press("Enter")
    await page.locator("#form-what", has_text="Starts no further jobs of queue broken").wait_for()
    await page.keyboard.press("Escape")
    await page.keyboard.press("Control+k")
    await field.fill(LAMP[:6])
    found = page.locator("#palette [role=option]", has_text=LAMP)
    await found.click()
    await page.wait_for_url("**/customers/lamp-house/item?**")
