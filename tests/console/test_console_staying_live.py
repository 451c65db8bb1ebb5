"""Live pages in a browser stay current or report that they are not, and keep focus and scroll.

The tests stop or advance the page's clock, so the results do not depend on timing.
"""

from __future__ import annotations

import time

import pytest
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow
WAITS = "partly live: new and removed rows appear when you finish editing"
RECORD = """
window.liveStates = [];
window.lost = [];
window.stale = 0;
const listen = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (name, act) {
  return listen.call(this, name, (event) => {
    act(event);
    if (name === 'stale') window.stale += 1;
  });
};
const state = document.querySelector('#live-state');
new MutationObserver(() => window.liveStates.push(state.textContent)).observe(
  state, {childList: true, characterData: true, subtree: true});
document.addEventListener('focusout', (event) => {
  if (!event.relatedTarget) window.lost.push(event.target.outerHTML.slice(0, 80));
});
"""


async def still(page):
    """Stop the page's clock; return a function that advances it."""
    begun_s = time.time()
    await page.clock.set_fixed_time(begun_s * 1000)
    return lambda seconds: page.clock.set_fixed_time((begun_s + seconds) * 1000)


async def come(screen, stack, name):
    """Create a queue and wait until the page shows it."""
    stack.queue(name)
    await screen.page.locator(f"tbody a:text-is('{name}')").wait_for()


async def wait_state(screen, text):
    """Wait until the footer shows exactly this live status."""
    await screen.page.locator(f"#live-state:text-is('{text}')").wait_for()


async def test_values_and_buttons_update_without_a_reload(screen, stack):
    page, queue = screen.page, stack.queue("watched")
    await screen.open(f"/console/jobs/queues/{queue}")
    await screen.wait_live()
    await page.evaluate("window.keptByNoReload = true")
    stack.enqueue(queue, *({"n": n} for n in range(7)))
    stack.call("PUT", f"/v1/queues/{queue}", json={"importance": 7})
    await page.locator('[data-live="ready"] .v:text-is("7")').wait_for()
    await page.locator("dd", has_text="7 (set by an operator)").wait_for()
    assert await page.evaluate("window.keptByNoReload")


async def test_new_rows_keep_focus_and_scroll_position(screen, stack):
    page = screen.page
    stack.queue("calm-1")
    await page.set_viewport_size({"width": 1280, "height": 260})
    await screen.open("/console/jobs?q=calm&sort=name")
    await screen.wait_live()
    await page.evaluate(RECORD)
    row = page.locator("tr.at a:focus")
    await page.keyboard.press("j")
    await page.evaluate("scrollTo(0, 90)")
    put_on = await still(page)
    await come(screen, stack, "calm-0")
    assert await row.inner_text() == "calm-1"
    assert await page.evaluate("scrollY") == 90
    # A page is reloaded at most once in 5 s.
    await page.evaluate("window.stale = 0")
    stack.queue("calm-2")

    async def is_stale():
        return await page.evaluate("window.stale") > 0

    await wait_true(is_stale, what="the page receives another stale event")
    assert not await page.locator("tbody a:text-is('calm-2')").count()
    await put_on(6)
    await page.locator("tbody a:text-is('calm-2')").wait_for()
    await page.evaluate("document.querySelector('.scroll').focus({preventScroll: true})")
    await put_on(12)
    await come(screen, stack, "calm-3")
    assert await page.evaluate("document.activeElement.matches('.scroll')")
    await put_on(18)
    await page.evaluate("document.querySelector('[name=q]').focus({preventScroll: true})")
    await come(screen, stack, "calm-4")
    assert await page.evaluate("document.activeElement.name") == "q"
    assert await page.evaluate("scrollY") == 90
    assert await page.evaluate("window.lost") == []
    assert WAITS not in await page.evaluate("window.liveStates"), "no user edits anything here"


async def test_removing_the_focused_row_focuses_the_next(screen, stack):
    page, names = screen.page, ("going-1", "going-2", "going-3")
    for name in names:
        stack.call("PUT", f"/v1/queues/{name}?create=true", json={"paused": True})
    await screen.open("/console/jobs?q=going&sort=name&state=paused")
    await screen.wait_live()
    await page.evaluate(RECORD)
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    assert await page.locator("tr.at a:focus").inner_text() == "going-2"
    await still(page)
    stack.call("PUT", "/v1/queues/going-2", json={"paused": False})
    await page.locator("tbody a:text-is('going-2')").wait_for(state="detached")
    assert await page.locator("tr.at a:focus").inner_text() == "going-3"
    assert await page.evaluate("window.lost") == []


async def test_rows_wait_while_a_filter_is_edited(screen, stack):
    page = screen.page
    await screen.open("/console/jobs")
    await screen.wait_live()
    await page.keyboard.press("/")
    await come(screen, stack, "came-1")
    await page.locator("[name=q]:focus").type("cam")
    stack.queue("came-2")
    await wait_state(screen, WAITS)
    assert await page.locator("[name=q]:focus").input_value() == "cam"
    await page.keyboard.press("Enter")
    await page.get_by_role("link", name="came-2", exact=True).wait_for()
    await screen.wait_live()


async def test_lost_and_silent_streams_are_replaced(screen, stack):
    page = screen.page
    screen.allow("ERR_INTERNET_DISCONNECTED|ERR_NETWORK")
    await page.clock.install()
    await screen.open("/console/jobs")
    await screen.wait_live()
    await page.evaluate(RECORD)
    await page.clock.fast_forward(13_000)

    async def was_silent():
        return "not live: no response from the server" in await page.evaluate("window.liveStates")

    await wait_true(was_silent, what="the page reports that the server is silent")
    await screen.wait_live()
    await screen.context.set_offline(True)
    # Chromium keeps an open stream; after a silence the page replaces it.
    await page.clock.fast_forward(25_000)
    await wait_state(screen, "not live: disconnected, values are not updated")
    stack.queue("came-meanwhile")
    await screen.context.set_offline(False)
    await page.get_by_role("link", name="came-meanwhile", exact=True).wait_for()
    await screen.wait_live()


async def test_a_form_keeps_focus_updates_counts_and_survives_a_refusal(screen, stack):
    page, queue = screen.page, stack.queue("formed")
    stack.enqueue(queue, *({"n": n} for n in range(3)))
    await screen.open(f"/console/jobs/jobs?queue={queue}")
    await page.get_by_role("link", name="Delete all matching").click()
    preview = page.locator("#form-preview")
    await preview.get_by_text("3 jobs match now").wait_for()
    assert not await screen.findings()
    await page.locator("#a-lane").fill("nowhere")
    await preview.get_by_text("0 jobs match now").wait_for()
    assert await page.evaluate("document.activeElement.id") == "a-lane"
    async with page.expect_response("**/calls?**"):
        await page.keyboard.press("x")
        await page.keyboard.press("Escape")
    await preview.get_by_text("0 jobs match now").wait_for(state="hidden")
    assert not await page.locator("#dialog[open]").count()
    await screen.open(f"/console/jobs/queues/{queue}")
    await page.get_by_role("link", name="Override settings formed").click()
    dialog = page.locator("#dialog")
    await dialog.locator("#a-importance").fill("4")
    await dialog.get_by_text("headrace queues set formed --importance 4").wait_for()
    assert '"importance": 4' in await dialog.inner_text()
    await dialog.locator("#a-importance").fill("very")
    await dialog.locator(".primary").click()
    await dialog.get_by_text("expected a whole number").wait_for()
    assert not await screen.findings()
    screen.allow("status of 422")
    await dialog.locator("#a-importance").fill("2")
    await dialog.locator("#a-slots_min").fill("99")
    await dialog.locator("#a-slots_max").fill("1")
    await dialog.locator(".primary").click()
    await dialog.locator(".flash.bad").wait_for()
    assert await dialog.locator("#a-slots_min").input_value() == "99"
    await dialog.locator("#a-slots_min").fill("")
    await screen.press("#dialog .primary")
    assert "importance 2" in await screen.text(".flash")
    assert screen.page.url.endswith(f"/console/jobs/queues/{queue}")


async def test_a_page_without_updates_reports_it(screen):
    page = screen.page
    await screen.open("/console/audit")
    await wait_state(screen, "no live updates")
    moment = "document.querySelector('#as-of').dateTime"
    before = await page.evaluate(moment)
    await page.keyboard.press("r")

    async def is_renewed():
        return await page.evaluate(moment) > before

    await wait_true(is_renewed, what="the time of the page is updated")
