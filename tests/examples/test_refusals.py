"""The demo while an engine is away: refused calls are counted by outage, and wrong if endless."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from examples.bazaar import demo, faults
from examples.bazaar.adverts import Photo
from examples.bazaar.buyers import Bought, Tab
from examples.bazaar.client import Client, RefusedError, ServerLeftError
from examples.bazaar.errands import Sent
from examples.bazaar.faults import Faults
from examples.bazaar.followers import Followed
from examples.bazaar.readers import Readers, Viewed
from examples.bazaar.story import StoryProgress
from examples.bazaar.visitors import Crowd, Seen

DOWN = "Valkey does not respond: check it with `headrace doctor`, then try again"
CODE = "valkey.unavailable"
SENTENCE = DOWN.replace("`", "&#96;")
PAGE = f'<html><p class="x">503</p><p class="empty" data-code="{CODE}">{SENTENCE}</p></html>'
PROBLEM = json.dumps({"status": 503, "detail": DOWN, "code": CODE})


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
        with noted.attempt("reads of feeds"):
            await Tab(client, url, noted).get("/feed")
    with pytest.raises(RefusedError) as raised:
        await Tab(client, url, noted).get("/feed")
    client.close()
    assert (str(raised.value), raised.value.code) == (f"GET /feed: {DOWN}", CODE)
    assert (noted.faults_count, noted.faults) == (0, [])
    [outage] = outages.outages
    assert outage.text.startswith("refused while Valkey was away: 25 calls, ")


@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_shows_no_html(serve, outages, status):
    url = await serve(status, "text/html", "<html><body>" + "x" * 5000)
    noted, client = Bought(), Client(url)
    with noted.attempt("reads of feeds"):
        await Tab(client, url, noted).get("/feed")
    client.close()
    if status == 500:
        assert noted.faults == ["GET /feed: expected 200, got 500: no reason given"]
    else:
        [outage] = outages.outages
        assert outage.text.startswith("refused without an error code: 1 call, ")


async def test_refused_reads_of_photos_are_no_error_of_the_demo(serve, outages):
    crowd = Crowd(await serve(503, "application/json", PROBLEM))
    client, photo = Client(crowd._media_url), Photo("", "photos/1", "", "stored", size_bytes=900)
    await crowd._visit(client, photo, random.Random(1))
    client.close()
    assert (crowd.seen.faults, len(outages.outages)) == ([], 1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(faults.time, "time", lambda: now.s)
    monkeypatch.setattr(faults.time, "monotonic", lambda: now.s)
    return now


def refuse(noted, error=None, calls="reads of feeds"):
    """Note one refused call."""
    with noted.attempt(calls):
        raise error or RefusedError("GET /: PostgreSQL does not respond", "postgres.unavailable")


def test_an_outage_ends_when_calls_are_answered_again(clock, outages):
    noted = Faults()
    for clock.s in (1000, 1001, 1050):
        refuse(noted)
    assert [(one.code, one.calls) for one in outages.outages] == [
        ("postgres.unavailable", 2),
        ("postgres.unavailable", 1),
    ]


@pytest.mark.parametrize("error", [None, ServerLeftError("POST /v1/views: EOF")])
def test_calls_that_are_refused_for_over_a_minute_are_wrong(clock, error, outages):
    noted = Faults()
    for clock.s in range(1000, 1061, 4):
        refuse(noted, error)
        with noted.attempt("reads of photos"):
            pass  # the success of another kind of call
    assert noted.faults == []
    for clock.s in range(1061, 1300, 4):
        refuse(noted, error)
    [fault] = noted.faults
    assert fault.startswith("reads of feeds failed for over 60 s without one success; the last: ")
    assert (noted.faults_count, list(noted.refused_since_s)) == (1, ["reads of feeds"])


def test_a_success_between_refused_calls_starts_the_minute_again(clock, outages):
    noted = Faults()
    for clock.s in range(1000, 1200, 4):
        refuse(noted)
        if clock.s % 48 == 0:
            with noted.attempt("reads of feeds"):
                pass
    assert noted.faults == []


def test_calls_refused_while_the_demo_is_broken_on_purpose_are_not_wrong(clock, outages):
    noted = Faults()
    for clock.s in range(1000, 1200, 4):
        noted.expect()
        refuse(noted)
        refuse(noted, ServerLeftError("POST /v1/views: EOF"))
        noted.fault("/tracks/one: no player")
    assert (noted.faults, noted.refused_since_s) == ([], {})
    assert (noted.expected_count, noted.differing_count) == (50, 50)
    # Another server may be away at the same time: refusals have a line by their cause.
    assert [(one.code, one.calls) for one in outages.outages] == [("postgres.unavailable", 50)]
    assert list(demo.broken_lines([noted])) == [
        "expected while a button of /break had broken a part, and 15 s longer:",
        "  50 calls cut off, or answered with an error such as status 500",
        "  50 answers with another status or other data, such as fewer views",
        "  the ledger counts what was lost by it",
    ]


def test_refusals_of_one_cause_are_one_line(clock, outages):
    noted = Faults()
    for code in ("valkey.reply_lost", "valkey.unavailable", "valkey.reply_lost"):
        refuse(noted, RefusedError("POST /v1/views: no reply", code))
    [outage] = outages.outages
    assert outage.text.startswith("refused while Valkey was away: 3 calls, ")


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


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "soon"])
def test_a_length_that_is_no_time_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"over 0, got '{text}'"):
        demo.seconds_of(text)


@pytest.fixture
def ended(tmp_path):
    """The end of a run of `seconds` that saw nothing but jobs; return the exit code."""
    stage = SimpleNamespace(database=tmp_path / "bazaar.sqlite")
    crowd = SimpleNamespace(seen=Seen())
    readers, buyers = SimpleNamespace(viewed=Viewed()), SimpleNamespace(bought=Bought())
    followers, senders = SimpleNamespace(followed=Followed()), SimpleNamespace(sent=Sent())
    people = demo.People(crowd, readers, followers, buyers, senders)
    story = SimpleNamespace(progress=StoryProgress())
    figures = SimpleNamespace(summary=list, jobs_done=7)
    ledger = SimpleNamespace(summary=["lost: 0"], faults={}, lines={"jobs": None}, open=[])

    def end(seconds, refused=()):
        people.readers.viewed.refused_since_s.update(dict.fromkeys(refused, 1.0))
        return demo.Demo(stage, seconds=seconds)._finish(story, people, figures, ledger)

    return end


@pytest.mark.parametrize("seconds", [3.0, None])
def test_a_short_run_states_what_it_did_not_check(ended, capsys, seconds):
    assert ended(seconds) == 0
    printed = capsys.readouterr().out
    assert "  not checked: feed: no page was read\n" in printed
    assert "  not checked: ledger: views were not compared\n" in printed
    assert "jobs: none" not in printed
    assert printed.endswith("\neverything that was checked worked\n")


def test_a_long_run_must_have_checked_everything(ended, capsys):
    assert ended(10.0) == 1
    assert "\n  feed: no page was read\n" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "code"), [(10.0, 1), (None, 0)])
def test_calls_that_are_refused_at_the_end_are_listed(ended, capsys, seconds, code):
    assert ended(seconds, refused=["hits"]) == code
    assert "\n  refused at the end: hits\n" in capsys.readouterr().out
