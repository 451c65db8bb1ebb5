"""The demo while an engine is away: what is refused is counted by outage, and is not wrong."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from examples.bazaar import faults
from examples.bazaar.buyers import Bought, Tab
from examples.bazaar.client import Client, RefusedError
from examples.bazaar.faults import Faults
from examples.bazaar.readers import Readers

DOWN = "Valkey does not respond: check it with `headrace doctor`, then try again"
PAGE = f"<html><p class='x'>503</p><p class=\"empty\">{DOWN.replace('`', '&#96;')}</p></html>"
PROBLEM = json.dumps({"status": 503, "detail": DOWN, "code": "valkey.unavailable"})


@pytest.fixture(autouse=True)
def outages(monkeypatch):
    """No outage before the test."""
    monkeypatch.setattr(Faults, "outages", [])
    monkeypatch.setattr(Faults, "broken_until_s", 0.0)
    return Faults


@pytest.fixture
async def serve():
    """Start a server that gives each connection the same answer; return its URL."""
    servers = []

    async def start(status, kind, body):
        async def answer(reader, writer):
            while await reader.readline():
                while await reader.readline() != b"\r\n":
                    pass
                head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nETag: one\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize(("kind", "body"), [("text/html", PAGE), ("application/json", PROBLEM)])
async def test_calls_refused_while_an_engine_is_away_are_one_line(serve, kind, body, outages):
    url = await serve(503, kind, body)
    noted, client = Bought(), Client(url)
    for _ in range(25):
        with pytest.raises(RefusedError) as raised:
            await Tab(client, url, noted).get("/feed")
        noted.note(raised.value)
    client.close()
    assert str(raised.value) == f"GET /feed: {DOWN}"
    assert (noted.faults_count, noted.faults) == (0, [])
    [outage] = outages.outages
    assert outage.text.startswith("refused while Valkey was away: 25 calls, ")


async def test_another_error_is_wrong_and_shows_no_html(serve, outages):
    url = await serve(500, "text/html", "<html><body>" + "x" * 5000)
    noted, client = Bought(), Client(url)
    with pytest.raises(Exception, match="expected 200, got 500: no reason given") as raised:
        await Tab(client, url, noted).get("/feed")
    client.close()
    noted.note(raised.value)
    assert (noted.faults_count, outages.outages) == (1, [])


def test_an_outage_ends_when_calls_are_answered_again(monkeypatch, outages):
    noted, now = Faults(), time.time()
    for after_s in (0, 1, 60):
        monkeypatch.setattr(faults.time, "time", lambda at=now + after_s: at)
        noted.note(RefusedError("GET /: PostgreSQL does not respond"))
    assert [(one.server, one.calls) for one in outages.outages] == [
        ("PostgreSQL", 2),
        ("PostgreSQL", 1),
    ]


@pytest.mark.parametrize("is_stale", [True, False])
async def test_a_total_that_is_marked_stale_may_be_lower(serve, is_stale):
    row = {"id": "velo-ada:1", "total": 6, "stale": is_stale}
    url = await serve(200, "application/json", json.dumps([row]))
    readers, client = Readers(url, "token"), Client(url)
    readers.viewed.totals["velo-ada:1"] = 8
    await readers._list(client, ["velo-ada:1"])
    client.close()
    wrong = [one for one in readers.viewed.faults if "expected 8 views" in one]
    assert len(wrong) == (0 if is_stale else 1)
