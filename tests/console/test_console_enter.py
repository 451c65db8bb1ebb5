"""One-time links: one browser, once, within their time; used up by nobody who only looks ahead."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
import structlog
from served import PAGE, app_of, make_link, serving

from headrace.engines.endpoints import Endpoints
from headrace.web.model import TokenRefused

pytestmark = pytest.mark.slow


@pytest.fixture
async def guarded(tmp_path, database_url, running_engines):
    """A console, and a client without a session."""
    valkey_url = running_engines.endpoints.valkey_url
    endpoints = Endpoints(database_url, valkey_url, (tmp_path / "blobs").as_uri())
    async with serving(app_of(tmp_path, endpoints), logged_in=False) as found:
        yield found


async def test_a_one_time_link_logs_one_browser_in(guarded):
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    path = await make_link(guarded, token)
    for ahead in (
        await guarded.client.head(path),
        await guarded.client.get(path, headers={"sec-purpose": "prefetch;prerender"}),
    ):
        assert ahead.status_code == 204
        assert "set-cookie" not in ahead.headers
    with structlog.testing.capture_logs() as logs:
        answer = await guarded.client.get(path)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    [cookie] = answer.headers.get_list("set-cookie")
    assert {"httponly", "samesite=strict", "path=/console"} <= set(cookie.lower().split("; "))
    page = await guarded.client.get("/console/jobs")
    assert page.status_code == 200
    assert "ann" in re.search(r'class="who">([^<]+)', page.text)[1]
    guarded.client.cookies.clear()
    again = await guarded.client.get(path)
    assert again.status_code == 401
    assert "was used or has expired" in again.text
    assert "set-cookie" not in again.headers
    assert (await guarded.client.get("/console/jobs")).status_code == 303
    code = path.partition("code=")[2]
    assert code not in str(logs)


@pytest.mark.parametrize(
    "fields",
    [
        {"sec-fetch-mode": "no-cors"},
        {"origin": "https://evil.example"},
        {"sec-purpose": "prefetch"},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_a_page_loads_does_not_use_a_link_up(guarded, fields):
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    path = await make_link(guarded, token)
    loaded = await guarded.client.get(path, headers=fields)
    assert loaded.status_code in (204, 403)
    assert "set-cookie" not in loaded.headers
    assert (await guarded.client.get(path)).status_code == 303


async def test_links_that_lead_nowhere(guarded, monkeypatch):
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    gone = await make_link(guarded, token)
    monkeypatch.setattr("headrace.web.sessions.LINK_LASTS_S", -1.0)
    expired = await make_link(guarded, token)
    await guarded.app.tokens.revoke("ann")
    with pytest.raises(TokenRefused):
        await make_link(guarded, token)
    for path in (
        gone,
        expired,
        "/console/enter",
        "/console/enter?code=",
        "/console/enter?code=%00",
    ):
        answer = await guarded.client.get(path)
        assert answer.status_code == 401, path
        assert "set-cookie" not in answer.headers


async def test_of_many_who_open_a_link_at_once_one_is_let_in(guarded):
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    path = await make_link(guarded, token)
    answers = await asyncio.gather(*(httpx_get(guarded.address + path) for _ in range(10)))
    assert sorted(answers) == [303, *[401] * 9]


async def httpx_get(url):
    async with httpx.AsyncClient(verify=False, headers=PAGE) as client:
        return (await client.get(url)).status_code
