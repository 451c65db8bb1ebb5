"""Login by token and by one-time link, and `headrace console link`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
import structlog
from browser import browsing
from served import PAGE, app_of, make_link, serving
from tests.kit.processes import HeadraceProcess

from headrace.cli.console import ADDRESS_FILE, base_url, open_browser, opens_browser
from headrace.engines.endpoints import Endpoints
from headrace.web.model import TokenRefused

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
        assert "token is not valid here" in await screen.text("#login-fault")
        assert not await screen.findings()
        await page.locator("#token").fill(token)
        await screen.press("main .primary")
        assert page.url.endswith("/console/jobs/crons?x=1")
        button = page.locator("span.button", has_text="Add cron")
        assert await button.get_attribute("title") == "requires scope jobs:write"
        assert not await screen.findings()
        await screen.open("/console/views")
        assert "lacks the scope views:read" in await screen.text("main")
        assert not await screen.findings()
        await screen.press(".corner form[action$=logout] button")
        assert page.url.endswith("/console/login")
        await screen.open("/console/jobs")
        assert "/console/login" in page.url


@pytest.fixture
async def guarded(tmp_path, database_url, running_engines):
    """A console with a client without a session."""
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
async def test_subresource_requests_do_not_consume_a_link(guarded, fields):
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    path = await make_link(guarded, token)
    loaded = await guarded.client.get(path, headers=fields)
    assert loaded.status_code in (204, 403)
    assert "set-cookie" not in loaded.headers
    assert (await guarded.client.get(path)).status_code == 303


async def test_invalid_and_expired_links_are_refused(guarded, monkeypatch):
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


async def test_one_of_many_concurrent_uses_of_a_link_succeeds(guarded):
    token = (await guarded.app.tokens.create("ann", ("*",))).text
    path = await make_link(guarded, token)
    answers = await asyncio.gather(*(httpx_get(guarded.address + path) for _ in range(10)))
    assert sorted(answers) == [303, *[401] * 9]


async def httpx_get(url):
    async with httpx.AsyncClient(verify=False, headers=PAGE) as client:
        return (await client.get(url)).status_code


def test_the_command_prints_a_link_that_works_once(stack):
    link = stack.process_run("console", "link")
    assert link.startswith(f"{stack.api}/console/enter?code=")
    assert [httpx.get(link, verify=False).status_code for _ in range(2)] == [303, 401]
    told = json.loads(stack.process_run("console", "link", "--json"))
    assert httpx.get(told["console_link"], verify=False).status_code == 303
    assert told["expires_in_s"] == 600
    # Logs contain no links or codes; only `up --json` prints its own.
    assert link not in stack.process.out + stack.process.err
    assert stack.process.err.count("code=") == 0


def test_the_command_fails_without_a_running_api(stack, tmp_path):
    folder = stack.folder / "headrace-data"
    address = folder / ADDRESS_FILE
    assert base_url(address.read_text()) == stack.api
    kept = address.read_text()
    address.write_text("127.0.0.1:9")
    try:
        ran = HeadraceProcess(["console", "link"], folder=stack.folder)
        assert ran.wait_exit() == 7
        assert "cli.api_not_running" in ran.err
        assert "headrace up" in ran.err
    finally:
        address.write_text(kept)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080"),
        ("::1:8080", "http://[::1]:8080"),
        (":::8080", "http://[::1]:8080"),
        ("api.example:80", "http://api.example:80"),
    ],
)
def test_listen_addresses_become_urls(listen, url):
    assert base_url(listen) == url


async def test_the_link_is_not_an_argument_of_the_browser(tmp_path, monkeypatch):
    """Arguments of processes are visible to all users of a machine."""
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}\n')
    browser.chmod(0o700)
    monkeypatch.setattr("webbrowser._tryorder", None)
    monkeypatch.setenv("BROWSER", str(browser))
    (tmp_path / "run").mkdir()
    await open_browser("http://127.0.0.1:8080/console/enter?code=secret", tmp_path)
    page = Path(seen.read_text().removeprefix("file://"))
    assert "secret" not in seen.read_text()
    assert "url=http://127.0.0.1:8080/console/enter?code=secret" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600


def test_no_browser_is_opened_without_a_terminal(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    assert not opens_browser()
