"""Sessions: login by token and by one-time link, logout, scopes, and `headrace console link`."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
import pytest
import structlog
from browser import browsing
from served import CSRF_TOKEN, PAGE

from headrace.cli.console import ADDRESS_FILE, base_url, open_browser, opens_browser
from headrace.kernel.logs import SparseLogger
from headrace.web.model import TokenRefused

pytestmark = pytest.mark.slow
PASSED_ON = (
    {},
    {"x-forwarded-for": "127.0.0.1"},
    {"forwarded": "for=127.0.0.1"},
    {"x-forwarded-user": "root", "x-remote-user": "root"},
    {"host": "localhost"},
    {"x-forwarded-for": "10.0.0.1"},
    {"forwarded": "for=10.0.0.1"},
    {"via": "1.1 proxy"},
    {"x-real-ip": "10.0.0.1"},
    {"host": "192.0.2.7"},
)


async def test_a_person_logs_in_and_out_in_a_browser(chromium, guarded):
    token = await guarded.token("jobs:read")
    async with browsing(chromium, guarded.address) as screen:
        screen.allow("401|403")
        page = screen.page
        await screen.open("/console/jobs/crons?x=1")
        assert "/console/login?back=" in page.url
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


@pytest.mark.parametrize("headers", PASSED_ON, ids=str)
async def test_loopback_and_proxies_need_a_session(guarded, headers):
    answer = await guarded.get("/console/jobs?state=failed", headers=headers)
    assert answer.status_code == 303
    place = "/console/login?back=%2Fconsole%2Fjobs%3Fstate%3Dfailed"
    assert answer.headers["location"] == place
    form = await guarded.get("/console/do/jobs.pause_queue", headers=headers)
    assert form.status_code == 303
    for accept in ("*/*", "text/html,application/json"):
        answer = await guarded.get("/console/jobs", headers={**headers, "accept": accept})
        assert answer.status_code == 303, accept
    for path, accept in (
        ("/console/jobs", "application/json"),
        ("/console/live?url=/console/jobs", "text/event-stream"),
    ):
        plain = await guarded.get(path, headers={**headers, "accept": accept})
        assert (plain.status_code, plain.json()["code"]) == (401, "console.login_needed")


async def test_login_by_token(guarded, monkeypatch):
    monkeypatch.setattr(
        SparseLogger, "_write", lambda _, write, event, __, facts: write(event, **facts)
    )
    with structlog.testing.capture_logs() as logs:
        wrong = await guarded.log_in("hrt_wrong")
    assert wrong.status_code == 401
    [line] = [one for one in logs if one["event"] == "logins_refused"]
    assert (line["address"], "hrt_wrong" in str(logs)) == ("127.0.0.1", False)
    assert "token is not valid here" in wrong.text
    assert "Authorization" not in wrong.text
    key = await guarded.token("views:hit", publishable=True)
    assert (await guarded.log_in(key)).status_code == 401
    token = await guarded.token()
    answer = await guarded.log_in(f" {token}\n")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs")
    assert token not in str(answer.headers)
    assert (await guarded.get("/console/jobs")).status_code == 200
    answer = await guarded.get("/", headers={"accept": "application/json"})
    assert answer.status_code == 401, "a session of the console is no token of the API"
    headers = {"accept": "application/json", "authorization": f"Bearer {token}"}
    assert (await guarded.get("/", headers=headers)).json()["name"] == "headrace"


async def test_revoking_a_token_ends_its_sessions_and_streams(guarded, monkeypatch):
    monkeypatch.setattr("headrace.console.live.CHECK_S", 0.2)
    await guarded.log_in((await guarded.app.tokens.create("ann", ("*",))).text)
    assert (await guarded.get("/console/jobs")).status_code == 200
    params = {"url": "/console/jobs"}
    async with guarded.client.stream("GET", "/console/live", params=params) as pages_open:
        await guarded.app.tokens.revoke("ann")
        text = "".join([chunk async for chunk in pages_open.aiter_text()])
    assert text.rstrip().endswith("event: logged_out\r\ndata: {}"), "and nothing after it"
    assert (await guarded.get("/console/jobs")).status_code == 303


async def test_a_new_login_returns_to_the_filled_form(guarded):
    form = "/console/do/jobs.add_job"
    given = {"queue": "é & x", "back": "/console/jobs?state=failed"}
    long = {"csrf_token": "0" * 32, "form_id": "a", "payload": "x" * 5_000}
    for answer in (
        await guarded.post(form, **long, **given),
        await guarded.get(f"{form}/calls", params=given),
    ):
        assert answer.status_code == 303
        login = urlsplit(answer.headers["location"])
        assert login.path == "/console/login"
        [back] = parse_qs(login.query)["back"]
        assert (urlsplit(back).path, dict(parse_qsl(urlsplit(back).query))) == (form, given)
    answer = await guarded.log_in(await guarded.token(), back)
    assert answer.headers["location"] == back
    assert "into queue é &amp; x." in (await guarded.get(back)).text


async def test_logout_ends_the_session(guarded):
    await guarded.log_in(await guarded.token())
    page = await guarded.get("/console/jobs")
    stolen, csrf_token = dict(guarded.client.cookies), CSRF_TOKEN.search(page.text)[1]
    assert (await guarded.post("/console/logout")).status_code == 403
    answer = await guarded.post("/console/logout", csrf_token=csrf_token)
    assert answer.headers["location"] == "/console/login"
    guarded.client.cookies.update(stolen)
    assert (await guarded.get("/console/jobs")).status_code == 303


async def test_scopes_limit_pages_and_actions(guarded):
    await guarded.log_in(await guarded.token("jobs:read"))
    page = await guarded.get("/console/jobs/crons")
    assert page.status_code == 200
    assert "requires scope jobs:write" in page.text
    assert "your token lacks the scope views:read" in (await guarded.get("/console")).text
    for path in ("/console/views", "/console/audit", "/console/do/jobs.add_cron"):
        refused = await guarded.get(path)
        assert (refused.status_code, "web.insufficient_scope" in refused.text) == (403, True)
    csrf_token = CSRF_TOKEN.search(page.text)[1]
    path = "/console/do/jobs.run_cron"
    answer = await guarded.post(path, csrf_token=csrf_token, name="nightly")
    assert answer.status_code == 403
    [entry] = await guarded.entries()
    assert entry.outcome == "refused", "a refused attempt has its entry too"
    assert entry.command == "headrace crons run nightly"
    headers = {"accept": "text/event-stream"}
    live = await guarded.get("/console/live?url=/console/views", headers=headers)
    assert live.status_code == 403


async def test_a_one_time_link_logs_one_browser_in(guarded):
    path = await guarded.link()
    for ahead in (
        await guarded.client.head(path),
        await guarded.get(path, headers={"sec-purpose": "prefetch;prerender"}),
    ):
        assert ahead.status_code == 204
        assert "set-cookie" not in ahead.headers
    with structlog.testing.capture_logs() as logs:
        answer = await guarded.get(path)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    [cookie] = answer.headers.get_list("set-cookie")
    assert {"httponly", "samesite=strict", "path=/console"} <= set(cookie.lower().split("; "))
    page = await guarded.get("/console/jobs")
    assert re.search(r'class="who">t-[0-9a-f]+<', page.text)
    guarded.client.cookies.clear()
    again = await guarded.get(path)
    assert again.status_code == 401
    assert "was used or has expired" in again.text
    assert "set-cookie" not in again.headers
    assert (await guarded.get("/console/jobs")).status_code == 303
    assert path.partition("code=")[2] not in str(logs)


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
    path = await guarded.link()
    loaded = await guarded.get(path, headers=fields)
    assert loaded.status_code in (204, 403)
    assert "set-cookie" not in loaded.headers
    assert (await guarded.get(path)).status_code == 303


async def test_invalid_and_expired_links_are_refused(guarded, monkeypatch):
    token = (await guarded.app.tokens.create("bob", ("*",))).text
    gone = await guarded.link(token)
    monkeypatch.setattr("headrace.web.sessions.LINK_LASTS_S", -1.0)
    expired = await guarded.link(token)
    await guarded.app.tokens.revoke("bob")
    with pytest.raises(TokenRefused):
        await guarded.link(token)
    enter = "/console/enter"
    for path in (gone, expired, enter, f"{enter}?code=", f"{enter}?code=%00"):
        answer = await guarded.get(path)
        assert answer.status_code == 401, path
        assert "set-cookie" not in answer.headers


async def test_one_of_many_concurrent_uses_of_a_link_succeeds(guarded):
    url = guarded.address + await guarded.link()

    async def use():
        async with httpx.AsyncClient(verify=False, headers=PAGE) as client:
            return (await client.get(url)).status_code

    assert sorted(await asyncio.gather(*(use() for _ in range(10)))) == [303, *[401] * 9]


def test_the_command_prints_a_link_that_works_once(stack):
    reported = json.loads(stack.process_run("console", "link", "--json"))
    link = reported["console_link"]
    assert link.startswith(f"{stack.api}/console/enter?code=")
    assert [httpx.get(link, verify=False).status_code for _ in range(2)] == [303, 401]
    assert reported["expires_in_s"] == 600
    # Logs contain no links or codes; only `up --json` prints its own.
    assert link not in stack.process.out + stack.process.err
    assert stack.process.err.count("code=") == 0


def test_the_command_fails_without_a_running_api(stack):
    address = stack.folder / "headrace-data" / ADDRESS_FILE
    kept = address.read_text()
    assert base_url(kept) == stack.api
    address.write_text("127.0.0.1:9")
    try:
        text = stack.process_run("console", "link", exit_code=7)
        assert "cli.api_not_running" in text
        assert "headrace up" in text
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
