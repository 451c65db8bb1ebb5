"""The door in a real browser: asked for a token, told what is wrong, let in, and out again."""

from __future__ import annotations

import pytest
from browser import browsing
from served import app_of, serving

from headrace.engines.endpoints import Endpoints

pytestmark = pytest.mark.slow


async def test_a_person_logs_in_and_out(chromium, tmp_path, database_url, running_engines):
    endpoints = Endpoints(
        database_url, running_engines.endpoints.valkey_url, (tmp_path / "blobs").as_uri()
    )
    app = app_of(tmp_path, endpoints)
    token = (await app.tokens.create("ann", ("jobs:read",))).text
    async with serving(app, logged_in=False) as at, browsing(chromium, at.address) as screen:
        screen.allow("401|403")
        page = screen.page
        await screen.open("/console/jobs/crons?x=1")
        assert "/console/login?back=" in page.url
        assert not await screen.findings()
        await screen.narrow()
        await page.locator("#token").fill("hrt_wrong")
        await screen.press("main .primary")
        assert "not a valid token here" in await screen.text("#login-fault")
        assert not await screen.findings()
        await page.locator("#token").fill(token)
        await screen.press("main .primary")
        assert page.url.endswith("/console/jobs/crons?x=1")
        button = page.locator("span.button", has_text="Add cron")
        assert await button.get_attribute("title") == "needs the scope jobs:write"
        assert not await screen.findings()
        await screen.open("/console/views")
        assert "lacks the scope views:read" in await screen.text("main")
        assert not await screen.findings()
        await screen.press(".corner form[action$=logout] button")
        assert page.url.endswith("/console/login")
        await screen.open("/console/jobs")
        assert "/console/login" in page.url
