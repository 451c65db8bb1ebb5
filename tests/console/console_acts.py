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
    async with screen.page.expect_navigation(wait_until="load"):
        await screen.page.locator("#form .primary").click()
    return await screen.text(".told")
