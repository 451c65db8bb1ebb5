"""Doing an action of the console as a person does: the form is opened, read, filled in and sent."""

from __future__ import annotations

from urllib.parse import urlencode

BACK = "/console/audit"
"""Where every form leads back to in tests: a page that needs no room."""


async def act(screen, action, /, *, back=BACK, **values):
    """Fill in and send the form of an action; the sentence that the console says then."""
    await screen.open(f"/console/do/{action}?{urlencode({'back': back})}")
    for key, value in values.items():
        field = screen.page.locator(f"#a-{key}")
        if await field.evaluate("field => field.tagName") == "SELECT":
            await field.select_option(str(value))
        else:
            await field.fill(str(value))
    return await send(screen)


async def send(screen):
    """Send the form that is open; the sentence that is said then, on the page it leads back to or above its fields."""
    await screen.page.locator("#form .primary").click()
    await screen.page.locator(".told").first.wait_for()
    if await screen.page.locator("#form .told").count():
        # The form came back with a refusal, which Chromium writes down as well.
        screen.allow("status of 422")
    return await screen.text(".told")
