"""Pages whose rows change keep focus and scroll position, without false alarms.

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
    stack.call("PUT", f"/v1/queues/{name}?create=true", json={})
    await screen.page.locator(f"tbody a:text-is('{name}')").wait_for()


async def test_new_rows_keep_focus_and_scroll_position(screen, stack):
    page = screen.page
    stack.call("PUT", "/v1/queues/calm-1?create=true", json={})
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
    await put_on(6)
    await page.evaluate("document.querySelector('.scroll').focus({preventScroll: true})")
    await come(screen, stack, "calm-2")
    assert await page.evaluate("document.activeElement.matches('.scroll')")
    await put_on(12)
    await page.evaluate("document.querySelector('[name=q]').focus({preventScroll: true})")
    await come(screen, stack, "calm-3")
    assert await page.evaluate("document.activeElement.name") == "q"
    assert await page.evaluate("scrollY") == 90
    assert await page.evaluate("window.lost") == []


async def test_removing_the_focused_row_focuses_the_next(screen, stack):
    page = screen.page
    for name in ("going-1", "going-2", "going-3"):
        stack.call("PUT", f"/v1/queues/{name}?create=true", json={})
    await screen.open("/console/jobs?q=going&sort=name&state=paused")
    for name in ("going-1", "going-2", "going-3"):
        stack.call("PUT", f"/v1/queues/{name}", json={"paused": True})
    await page.keyboard.press("r")
    await page.locator("tbody a:text-is('going-3')").wait_for()
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


async def test_a_reloaded_page_stays_live(screen, stack):
    page = screen.page
    await screen.open("/console/jobs?q=lively")
    await screen.wait_live()
    await page.evaluate(RECORD)
    put_on = await still(page)
    await come(screen, stack, "lively-1")
    stack.call("PUT", "/v1/queues/lively-2?create=true", json={})

    async def is_stale():
        return await page.evaluate("window.stale") > 0

    await wait_true(is_stale, what="the page receives a stale event")
    assert not await page.locator("tbody a:text-is('lively-2')").count(), "once in 5 s at most"
    await put_on(6)
    await page.locator("tbody a:text-is('lively-2')").wait_for()
    assert WAITS not in await page.evaluate("window.liveStates"), "nobody does anything here"


async def test_commands_break_between_words_on_a_phone(screen):
    page = screen.page
    await page.set_viewport_size({"width": 360, "height": 740})
    await screen.open("/console/do/jobs.bulk_retry?queue=broken-by-hand&state=failed&back=/console")
    words = page.locator(".calls .whole")
    assert "--queue" in await words.all_inner_texts()
    lines = await words.evaluate_all("all => all.map((one) => one.getClientRects().length)")
    assert set(lines) == {1}
    assert await screen.overflow() == 0
    typed = await page.locator(".calls code").first.evaluate("code => code.textContent")
    assert typed == "headrace jobs bulk retry --queue broken-by-hand --state failed"
