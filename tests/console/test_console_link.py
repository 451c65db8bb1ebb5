"""`headrace console link` on a running system whose API took a free port."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.kit.processes import HeadraceProcess

from headrace.cli.console import ADDRESS_FILE, base_url, open_browser, opens_browser

pytestmark = pytest.mark.slow


def test_the_command_prints_a_link_that_works_once(stack):
    link = stack.process_run("console", "link")
    assert link.startswith(f"{stack.api}/console/enter?code=")
    assert [httpx.get(link, verify=False).status_code for _ in range(2)] == [303, 401]
    told = json.loads(stack.process_run("console", "link", "--json"))
    assert httpx.get(told["console_link"], verify=False).status_code == 303
    assert told["expires_in_s"] == 600
    # Links and codes stand in no log: `up --json` prints its own for the program that asked for it.
    assert link not in stack.process.out + stack.process.err
    assert stack.process.err.count("code=") == 0


def test_where_no_api_answers_the_command_says_so(stack, tmp_path):
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
def test_addresses_as_a_browser_takes_them(listen, url):
    assert base_url(listen) == url


async def test_the_link_is_in_no_argument_of_the_browser(tmp_path, monkeypatch):
    """Every user of a machine sees the arguments of all processes."""
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
