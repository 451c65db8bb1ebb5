"""No click is lost and no sentence vanishes, whatever comes while a button is pressed: answers are held back by the test.

A page moves by itself: what follows a form as it is filled in comes later than it was typed, numbers and rows come whenever
they do. A browser makes a click of a press only where the button is still under the pointer when it is let go.
"""

from __future__ import annotations

import asyncio
import re

import pytest
from browser import WIDTHS
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
    """Requests of a kind that are answered once the test says so."""

    def __init__(self) -> None:
        self._asked, self._let = asyncio.Event(), asyncio.Event()

    async def __call__(self, route) -> None:
        """Wait, then let it pass."""
        self._asked.set()
        await self._let.wait()
        await route.continue_()

    async def wait_asked(self) -> None:
        """Wait until one is held."""
        async with asyncio.timeout(60):
            await self._asked.wait()

    async def press_until_asked(self, page, key) -> None:
        """Press a key until one is held: a page that is loaded anew just then is not asked for again."""

        async def is_asked():
            if not self._asked.is_set():
                await page.keyboard.press(key)
            return self._asked.is_set()

        await wait_true(is_asked, what=f"{key} asks")

    def let(self) -> None:
        """Let them pass from now on."""
        self._let.set()


async def press(page, place):
    """Put the pointer's button down in the middle of a place and leave it there."""
    await page.locator(place).scroll_into_view_if_needed()
    box = await page.locator(place).bounding_box()
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    await page.mouse.down()


async def wait_answered(page, *, answers=1):
    """Wait until so many requests are answered, and drawn where they are drawn at all."""

    async def is_answered():
        return await page.evaluate("window.answers") >= answers

    await wait_true(is_answered, what="what follows the typing is answered")


async def filled_in(screen, held):
    """The form of an action whose sentences will grow, filled in, with what follows it held back."""
    page = screen.page
    await page.route(PREVIEWS, held)
    await screen.open(FORM)
    await page.evaluate(RECORD)
    await page.locator("#a-name").fill(UNKNOWN)
    await held.wait_asked()
    return page


@pytest.mark.parametrize("size", ["laptop", "phone"])
async def test_what_follows_the_typing_takes_no_button_from_under_a_press(tab, size):
    held = HeldBack()
    async with tab(width=WIDTHS[size]) as screen:
        screen.allow("status of 422")
        page = await filled_in(screen, held)
        await press(page, "#form .primary")
        held.let()
        await wait_answered(page)
        assert UNKNOWN not in await screen.text("#form-what")
        await page.mouse.up()
        await page.locator("#form .told").wait_for()
        assert "is not known" in await screen.text("#form .told")
        assert UNKNOWN in await screen.text("#form-what")


async def test_what_follows_the_typing_is_asked_again_where_a_press_is_no_click(screen):
    held = HeldBack()
    page = await filled_in(screen, held)
    await press(page, "#form .primary")
    held.let()
    await wait_answered(page)
    await page.mouse.move(2, 2)
    await page.mouse.up()
    await page.locator("#form-what").get_by_text(UNKNOWN).wait_for()
    assert not await page.locator(".told").count()


async def test_a_refusal_stays_when_what_followed_the_typing_comes_late(screen):
    held = HeldBack()
    screen.allow("status of 422")
    page = await filled_in(screen, held)
    await page.locator("#form .primary").click()
    await page.locator("#form .told").wait_for()
    await page.evaluate("document.querySelector('#form-what').dataset.is = 'of the refusal'")
    held.let()
    await wait_answered(page, answers=2)
    assert await page.locator("#form-what").get_attribute("data-is") == "of the refusal"
    await page.locator("#a-name").fill("another")
    await page.locator("#form-what").get_by_text("Forgets another").wait_for()
    assert "is not known" in await screen.text("#form .told")


async def test_rows_that_come_take_no_link_from_under_a_press(screen, stack):
    page = screen.page
    stack.call("PUT", "/v1/queues/pressed?create=true", json={})
    await screen.open("/console/jobs?q=press")
    await screen.wait_live()
    await press(page, "tbody a:text-is('pressed')")
    stack.call("PUT", "/v1/queues/a-press-before?create=true", json={})
    waits = "not all is live: what came or went is shown once you are done here"
    await page.locator(f"#live-state:text-is('{waits}')").wait_for()
    await page.mouse.up()
    await page.wait_for_url("**/console/jobs/queues/pressed")


async def test_a_filter_that_is_left_for_a_link_takes_no_link_from_under_the_press(screen, stack):
    page, asked = screen.page, []
    stack.call("PUT", "/v1/queues/filtered?create=true", json={})
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
async def test_a_row_chosen_while_rows_are_asked_for_stays_chosen(screen, key):
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
