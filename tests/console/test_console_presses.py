"""Clicks and keys: none is lost and no message vanishes if updates arrive meanwhile.

Pages update by themselves: previews follow typing with a delay, values and rows arrive any time.
Browsers create a click only if the same element is under the pointer at press and release.
"""

from __future__ import annotations

import asyncio
import re

import pytest
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow
PREVIEWS = "**/calls?**"
RECORD = """() => {
  window.answers = 0;
  const send = XMLHttpRequest.prototype.send;
  XMLHttpRequest.prototype.send = function (...given) {
    this.addEventListener('loadend', () => requestAnimationFrame(() => { window.answers += 1; }));
    return send.apply(this, given);
  };
}"""
UNKNOWN = "https://shop.example.org/" + "no-such-name/" * 8
FORM = "/console/do/fetch-consumer-remove?back=/console/audit"


class HeldBack:
    """Requests whose responses the test delays."""

    def __init__(self) -> None:
        self._asked, self._let = asyncio.Event(), asyncio.Event()

    async def __call__(self, route) -> None:
        """Wait for the release, then continue the request."""
        self._asked.set()
        await self._let.wait()
        await route.continue_()

    async def wait_asked(self) -> None:
        """Wait until a request is delayed."""
        async with asyncio.timeout(60):
            await self._asked.wait()

    async def press_until_asked(self, page, key) -> None:
        """Press a key until a request is delayed; a page that is reloading ignores it."""

        async def is_asked():
            if not self._asked.is_set():
                await page.keyboard.press(key)
            return self._asked.is_set()

        await wait_true(is_asked, what=f"{key} sends a request")

    def let(self) -> None:
        """Release all requests."""
        self._let.set()


async def press(page, place):
    """Press the mouse button on the center of an element and hold it."""
    await page.locator(place).scroll_into_view_if_needed()
    box = await page.locator(place).bounding_box()
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    await page.mouse.down()


async def wait_answered(page, *, answers=1):
    """Wait until the given number of requests is answered and rendered."""

    async def is_answered():
        return await page.evaluate("window.answers") >= answers

    await wait_true(is_answered, what="the preview is answered")


async def filled_in(screen, held):
    """Open and fill in a form, with the requests that follow typing delayed."""
    page = screen.page
    await page.route(PREVIEWS, held)
    await screen.open(FORM)
    await page.evaluate(RECORD)
    await page.locator("#a-name").fill(UNKNOWN)
    await held.wait_asked()
    return page


async def test_a_preview_does_not_replace_a_pressed_button(screen):
    held = HeldBack()
    screen.allow("status of 422")
    page = await filled_in(screen, held)
    await press(page, "#form .primary")
    held.let()
    await wait_answered(page)
    assert UNKNOWN not in await screen.text("#form-what")
    await page.mouse.up()
    await page.locator("#form .flash").wait_for()
    assert "is not known" in await screen.text("#form .flash")
    assert UNKNOWN in await screen.text("#form-what")


async def test_a_preview_is_repeated_after_a_press_without_click(screen):
    held = HeldBack()
    page = await filled_in(screen, held)
    await press(page, "#form .primary")
    held.let()
    await wait_answered(page)
    await page.mouse.move(2, 2)
    await page.mouse.up()
    await page.locator("#form-what").get_by_text(UNKNOWN).wait_for()
    assert not await page.locator(".flash").count()


async def test_a_late_preview_does_not_replace_a_refusal(screen):
    held = HeldBack()
    screen.allow("status of 422")
    page = await filled_in(screen, held)
    await page.locator("#form .primary").click()
    await page.locator("#form .flash").wait_for()
    await page.evaluate("document.querySelector('#form-what').dataset.is = 'of the refusal'")
    held.let()
    await wait_answered(page, answers=2)
    assert await page.locator("#form-what").get_attribute("data-is") == "of the refusal"
    await page.locator("#a-name").fill("another")
    await page.locator("#form-what").get_by_text("Deletes another").wait_for()
    assert "is not known" in await screen.text("#form .flash")


async def test_new_rows_do_not_replace_a_pressed_link(screen, stack):
    page = screen.page
    stack.queue("pressed")
    await screen.open("/console/jobs?q=press")
    await screen.wait_live()
    await press(page, "tbody a:text-is('pressed')")
    stack.queue("a-press-before")
    waits = "partly live: new and removed rows appear when you finish editing"
    await page.locator(f"#live-state:text-is('{waits}')").wait_for()
    await page.mouse.up()
    await page.wait_for_url("**/console/jobs/queues/pressed")


async def test_leaving_a_filter_does_not_replace_a_pressed_link(screen, stack):
    page, asked = screen.page, []
    stack.queue("filtered")
    await screen.open("/console/jobs?q=filtered")
    await page.locator("[name=q]").fill("nothing-of-this-name")
    page.on("request", lambda request: "nothing-of-this" in request.url and asked.append(request))
    await press(page, "tbody a:text-is('filtered')")
    assert await page.evaluate("document.activeElement.name") != "q"
    assert not asked
    await page.mouse.up()
    await page.wait_for_url("**/console/jobs/queues/filtered")
    assert not asked


@pytest.mark.parametrize("key", ["r", "/"])
async def test_a_row_selected_during_a_reload_stays_selected(screen, key):
    page, held = screen.page, HeldBack()
    await screen.open("/console/jobs")
    await page.evaluate(RECORD)
    await page.route(re.compile(r"/console/jobs(\?|$)"), held)
    if key == "r":
        await held.press_until_asked(page, key)
    else:
        await page.keyboard.press(key)
        await page.keyboard.type("mai")
        await page.keyboard.press("Enter")
        await page.locator("[name=q]").blur()
    await held.wait_asked()
    wanted = page.locator("tr.at", has_text="mail")
    async with asyncio.timeout(60):
        while not await wanted.count():
            await page.keyboard.press("j")
    held.let()
    await wait_answered(page)
    assert await wanted.count() == 1
    assert await page.evaluate("document.activeElement.closest('tr.at') !== null")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/console/jobs/queues/mail")


async def test_keys_lead_everywhere_and_escape_restores_a_filter(screen):
    page = screen.page
    await screen.open("/console/jobs")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"
    await page.keyboard.press("?")
    await page.locator("#help[open]").wait_for()
    assert not await screen.findings()
    await page.keyboard.press("Escape")
    await page.locator("#help[open]").wait_for(state="detached")
    await page.keyboard.press("/")
    await page.locator("[name=q]:focus").type("mail")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**q=mail**")
    await page.locator("caption", has_text="1 of").wait_for()
    await page.keyboard.press("/")
    await page.keyboard.type("er")
    async with page.expect_request("**/console/jobs?**") as asked:
        await page.keyboard.press("Escape")
        assert await page.evaluate("document.activeElement === document.body")
        assert await page.locator("[name=q]").input_value() == "mail"

        async def is_asked():
            # A page that is reloading ignores the key.
            await page.keyboard.press("r")
            return asked.is_done()

        await wait_true(is_asked, what="the page is requested")
    assert "q=mail" in (await asked.value).url
    await page.keyboard.press("j")
    await page.locator("tr.at").wait_for()
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/console/jobs/queues/mail")
    await page.wait_for_load_state()
    await page.keyboard.press("g")
    await page.keyboard.press("o")
    await page.wait_for_url("**/console")
    async with page.expect_navigation():
        await page.locator("#theme").select_option("dark")
    assert await page.evaluate("document.documentElement.dataset.theme") == "dark"


async def test_a_text_area_that_was_resized_breaks_no_policy_when_its_form_is_refused(
    screen, stack
):
    await screen.open(f"/console/do/jobs.add_job?queue={stack.queue('resized')}")
    screen.allow("status of 422")
    area = screen.page.locator("textarea")
    await area.evaluate("area => { area.style.height = '300px' }")
    await area.fill("{not json")
    await screen.page.locator("#form .primary").click()
    await screen.page.locator(".fault").wait_for()
