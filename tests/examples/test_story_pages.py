"""The demo's search, tour and panel: who may break what, and whether a loss would be seen."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sqlite3
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from examples.bazaar import panel, records
from examples.bazaar.adverts import Advert, Adverts, Photo
from examples.bazaar.breaks import flush_valkey, others_text
from examples.bazaar.demo import Demo
from examples.bazaar.faults import Faults, Outage
from examples.bazaar.followers import post_of
from examples.bazaar.ledger import PAPER, WRONG, Ledger, line_of
from examples.bazaar.origins import Host
from examples.bazaar.panel import is_own_peer
from examples.bazaar.pictures import Album, cover
from examples.bazaar.readers import Viewed
from examples.bazaar.records import BREAKS, Records
from examples.bazaar.scenes import CATEGORIES, LOOKS, draw
from examples.bazaar.shop import make_web
from examples.bazaar.shops import first_wares, shop_named
from examples.bazaar.tour import STEPS
from litestar.testing import AsyncTestClient

from headrace import Headrace
from headrace.console.screens import ROOMS

PHOTO = Photo("http://shop/a.jpg", "photos/a.jpg", "ab", "stored", 3)


@pytest.fixture
def stores(tmp_path):
    """The site's tables, with an advert for each page of the tour."""
    adverts, records = Adverts(tmp_path / "bazaar.sqlite"), Records(tmp_path / "bazaar.sqlite")
    adverts.create()
    records.create()
    for name in ("velo-ada", "sleepy-moss"):
        for ware in first_wares(shop_named(name))[:3]:
            about = (name, ware.id, 1, ware.title, str(ware.price), (PHOTO,))
            adverts.show(Advert(*about, ware.category, ware.text), action="publish")
            adverts.index(name, ware.id, f"{ware.title} {ware.category}")
    return adverts, records


@pytest.fixture
async def site(running_engines, database_url, valkey, tmp_path, stores):
    """The pages over the engines; its requests have no peer on loopback."""
    flags = {
        "data.folder": str(tmp_path),
        "postgres.url": database_url,
        "valkey.url": running_engines.endpoints.valkey_url,
        "valkey.prefix": valkey.prefix,
        "blobs.url": (tmp_path / "blobs").as_uri(),
    }
    headrace = Headrace(flags=flags)
    for advert in stores[0].shown():
        await headrace.feed.post(advert.shop, post_of(advert.shop, advert.item))
    async with AsyncTestClient(make_web(headrace, *stores), base_url="http://shop.test") as client:
        yield client


async def test_every_step_of_the_tour_has_its_page_and_its_screen(site):
    screens = [screen.path for room in ROOMS for screen in room.screens]
    patterns = [re.sub(r"\{[^}]+\}", "[^/]+", path.rstrip("/")) for path in screens]
    origin = {"origin": "http://shop.test"}
    for step in STEPS:
        taken = await site.post(
            "/tour", data={"step": step.number}, headers=origin, follow_redirects=False
        )
        assert taken.headers["location"] == step.path
        page = await site.get(step.path)
        assert (page.status_code, step.title in page.text) == (200, True)
        assert f"/console{step.screen}".replace("&", "&amp;") in page.text
        path = step.screen.partition("?")[0]
        assert any(re.fullmatch(pattern, path) for pattern in patterns), path
    sellers = (await site.get("/sellers")).text
    assert sellers.index("Sleepy Moss") < sellers.index("Velo Ada")
    await site.post("/tour", data={"step": 0}, headers=origin)
    assert "Take the tour" in (await site.get("/")).text
    foreign = await site.post("/tour", data={"step": 1}, headers={"origin": "http://elsewhere"})
    assert foreign.status_code == 403


@pytest.mark.parametrize(
    ("read", "waiting"),
    [
        ({"sent": 100, "done": 96, "failed": 2}, 2),
        ({"sent": 100, "done": 104, "failed": 3}, 0),
        ({"sent": 100, "done": 70, "failed": 5, "lost": 22, "allowed": 22}, 3),
        ({"sent": 5, "done": 9, "failed": 9, "lost": 9}, 0),
    ],
)
def test_the_columns_of_a_line_of_the_ledger_add_up(read, waiting):
    line = line_of("views", **read)
    assert line.sent == line.done + line.waiting + line.failed + line.lost
    assert (line.waiting, line.is_right) == (waiting, line.lost == line.allowed)


async def test_the_panel_shows_wrong_answers_and_how_long_a_fault_lasted(site, stores):
    line = line_of("views", sent=30, done=20, lost=10, allowed=8)
    rows = [asdict(line) | {"waiting": line.waiting, "is_right": line.is_right}]
    stores[1].put_paper(PAPER, {"lines": rows, "open": []})
    stores[1].put_paper(WRONG, {"texts": ["wrong answer: feed of follower2 is missing 1 post"]})
    began_at = time.time() - 75
    stores[1].note_break(
        stores[1].ask_break("postgres"),
        began_at=began_at,
        ended_at=began_at + 10,
        recovered_at=began_at + 10.7,
        note="done",
    )
    for path in ("/break", "/break/ledger"):
        text = (await site.get(path)).text
        assert "1 wrong answer or error found" in text
        assert "feed of follower2 is missing 1 post" in text
        assert "besides: 2 lost, 0 doubled</b>" in text
        assert "8 views lost, which Headrace permits when Valkey" in text
        assert "stopped for 10 s, working again 0.7 s after that" in text


async def test_the_ledger_keeps_counts_of_the_run_apart_from_the_state_now(site, stores):
    lines = [line_of("jobs", sent=5, done=5), line_of("posts", sent=3, done=3, is_state=True)]
    rows = [asdict(one) | {"waiting": one.waiting, "is_right": one.is_right} for one in lines]
    stores[1].put_paper(PAPER, {"lines": rows, "open": []})
    run, now = re.findall(r"<table>.*?</table>", (await site.get("/break")).text, re.DOTALL)
    assert "since this run began</th>" in run
    assert [">sent<" in run, ">jobs<" in run, ">posts<" in run] == [True, True, False]
    assert "on the site now</th>" in now
    assert [">expected<" in now, ">posts<" in now, ">jobs<" in now] == [True, True, False]


async def test_a_press_leads_to_its_result_which_names_the_silent_seller(site, stores, monkeypatch):
    monkeypatch.setattr(panel, "require_own_user", lambda request: None)
    form = {"data": {"kind": "seller"}, "headers": {"origin": "http://shop.test"}}
    answer = await site.post("/break", **form, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/break#result")
    text = (await site.get("/break")).text
    assert 'id="result"' in text
    assert "/fetch/hosts?customer=" not in text
    shop = shop_named("velo-ada")
    [asked] = stores[1].breaks(1)
    stores[1].note_break(asked.id, began_at=time.time(), note=f"{shop.title} is silent")
    text = (await site.get("/break/ledger")).text
    assert "breaking …" in text
    assert f"{shop.title} is silent." in text
    assert "/fetch/hosts?customer=velo-ada" in text


async def test_a_fault_that_waits_for_another_is_not_forgotten(site, stores, monkeypatch):
    first, second = (stores[1].ask_break(kind) for kind in ("seller", "valkey"))
    now = time.time()
    stores[1].note_break(first, began_at=now)
    for _ in range(3):
        now += 20
        monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda now=now: now))
        stores[1].keep_asked()
    assert stores[1].next_break().id == second
    assert "faults are carried out one after the other" in (await site.get("/break")).text
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: now + 31))
    assert stores[1].next_break() is None, "no demo runs"


def test_the_note_of_a_silent_seller_names_what_others_did():
    assert others_text(0) == "no other seller handed in a changed catalogue"
    assert others_text(1) == "1 item of another seller was published, edited or unpublished"
    assert others_text(7) == "7 items of others were published, edited or unpublished"


async def test_totals_from_before_an_emptied_valkey_are_not_expected_after_it(tmp_path):
    """An advert may be read for the next time long after, when faults are no longer expected."""
    adverts, records = Adverts(tmp_path / "bazaar.sqlite"), Records(tmp_path / "bazaar.sqlite")
    adverts.create()
    records.create()
    stage = SimpleNamespace(api_url="http://127.0.0.1:1", token=lambda: "unused")
    viewed = Viewed(totals={"velo-ada:1": 3}, accepted=3)
    parts = {"story": None, "adverts": adverts, "records": records, "viewed": viewed}
    parts["noted"] = Faults()
    assert await Ledger(stage, None, **parts).give_up_views(2, timeout_s=1) == 2
    assert viewed.totals == {}


@pytest.fixture
def ledger(stores, monkeypatch):
    """A ledger of 30 answered views; `answers` has what the API reports."""
    monkeypatch.setattr(Faults, "outages", [])
    monkeypatch.setattr(Faults, "broken_until_s", 0.0)
    stage = SimpleNamespace(api_url="http://127.0.0.1:1", token=lambda: "unused")
    parts = {"story": None, "adverts": stores[0], "records": stores[1], "noted": Faults()}
    found = Ledger(stage, None, **parts, viewed=Viewed(sent=30, accepted=30))
    found.answers = {"total": 3, "stale": False, "lag": {"pending": 27, "oldest_s": 20.0}}

    async def get_json(path):
        if path == "/v1/views/lag":
            return [{"shard": 0, **found.answers["lag"]}]
        ids = path.partition("ids=")[2].split(",")
        totals = [found.answers["total"], *(0 for _ in ids[1:])]
        is_stale = found.answers["stale"]
        return [
            {"id": one, "total": n, "stale": is_stale} for one, n in zip(ids, totals, strict=True)
        ]

    monkeypatch.setattr(found, "_client", SimpleNamespace(get_json=get_json))
    return found


async def readings(ledger, count=4):
    for _ in range(count):
        await ledger._gather_views()
    return ledger.lines["views"]


FLUSHED = {"pending": 0, "oldest_s": 0.0}


async def test_views_that_are_not_flushed_are_open_and_not_lost(ledger):
    """Totals that Valkey does not hold are read from PostgreSQL, which lacks them."""
    line = await readings(ledger)
    assert (line.lost, line.waiting, line.is_right) == (0, 27, True)
    ledger.answers |= {"lag": FLUSHED, "total": 30}
    line = await readings(ledger)
    assert (line.lost, line.waiting) == (0, 0)


async def test_views_that_are_missing_after_the_flush_are_lost(ledger):
    ledger.answers["lag"] = FLUSHED
    line = await readings(ledger)
    assert (line.lost, line.waiting) == (27, 0)
    assert ledger.summary == ["ledger: 30 compared, 27 lost, 0 doubled"]
    ledger._read_s -= 17
    assert ledger.summary == ["ledger: 30 compared (read 17 s ago), 27 lost, 0 doubled"]
    assert ledger.faults == {"views": "views: 27 lost, 0 doubled"}


async def test_the_summary_states_permitted_losses_beside_others(ledger):
    ledger.answers["lag"] = FLUSHED
    assert await ledger.give_up_views(26, timeout_s=1) == 26
    await readings(ledger)
    verdict = "1 lost besides 26 views that Empty Valkey may lose, 0 doubled"
    assert ledger.summary == ["ledger: 30 compared", verdict]


async def test_what_an_emptied_valkey_lost_is_counted_once_totals_are_complete(ledger):
    """A total is stale while a hit of it waits; the press once read "not done" then."""
    ledger.answers |= {"lag": FLUSHED, "stale": True}
    assert await ledger.give_up_views(26, timeout_s=0.2) is None
    given_up = asyncio.create_task(ledger.give_up_views(26, timeout_s=10))
    await asyncio.sleep(0)
    ledger.answers["stale"] = False
    assert await given_up == 26


async def test_the_ledger_and_the_note_of_an_emptied_valkey_agree(ledger, site, stores):
    ledger.answers["lag"] = FLUSHED
    Faults.expect()
    await readings(ledger)
    await ledger._put_paper()
    text = (await site.get("/break/ledger")).text
    assert "0 lost, 0 doubled; not judged yet: 27 views missing</b>" in text
    assert 'class="sum good"' not in text
    # Also while the views that are missing now may still be flushed.
    ledger._open.clear()
    await ledger._put_paper()
    stores[1].ask_break("valkey")
    text = (await site.get("/break/ledger")).text
    assert "0 lost, 0 doubled; not judged during a fault</b>" in text
    assert 'class="sum good"' not in text
    # The note of the fault is written right after this call, before the next reading.
    assert await ledger.give_up_views(27, timeout_s=1) == 27
    text = (await site.get("/break/ledger")).text
    assert "27 views lost, which Headrace permits" in text
    assert "not judged yet" not in text
    line = ledger.lines["views"]
    assert (line.lost, line.allowed, line.waiting) == (27, 27, 0)


@pytest.mark.parametrize("cause", ["a break", "an outage"])
async def test_nothing_is_judged_while_something_is_broken(ledger, cause):
    ledger.answers["lag"] = FLUSHED
    if cause == "a break":
        Faults.expect()
    else:
        Faults.outages.append(Outage("postgres.unavailable", time.time(), time.time()))
    assert (await readings(ledger)).lost == 0
    assert ledger.open == ["27 views missing"]
    assert ledger.summary[-1] == "not judged yet: 27 views missing"
    Faults.outages.clear()
    Faults.broken_until_s = 0.0
    assert (await readings(ledger)).lost == 27
    assert ledger.open == []


async def test_a_verdict_that_is_withdrawn_is_printed(ledger, stores):
    ledger.answers["lag"] = FLUSHED
    await readings(ledger)
    played = Demo(SimpleNamespace(database=stores[1]._file), seconds=None)
    story = SimpleNamespace(progress=Faults())
    people = SimpleNamespace(faults=list)
    [found] = await played._note_wrong(story, people, ledger)
    assert found.endswith("found: views: 27 lost, 0 doubled")
    assert await played._note_wrong(story, people, ledger) == []
    ledger.answers["total"] = 30
    await readings(ledger)
    [withdrawn] = await played._note_wrong(story, people, ledger)
    assert "withdrawn: views: 27 lost, 0 doubled" in withdrawn
    assert stores[1].paper(WRONG)[1] == {"texts": []}


async def test_search_finds_adverts_by_the_beginnings_of_words(site):
    ware = first_wares(shop_named("velo-ada"))[1]
    for words in (ware.title, ware.title.upper(), ware.title[:3], f"{ware.category} {ware.title}"):
        assert ware.id in (await site.get("/", params={"q": words})).text
    for words in ("nothing like it", "%", "') OR 1=1 --", "a" * 5000, "\x00"):
        page = await site.get("/", params={"q": words})
        assert (page.status_code, "has all of these words" in page.text or words == "%") == (
            200,
            True,
        )
    inside = await site.get("/", params={"category": ware.category})
    assert ware.id in inside.text
    assert "sleepy-moss-0002" not in inside.text


async def test_only_the_demo_s_own_user_may_break_it(site, stores):
    own = {"origin": "http://shop.test"}
    for headers in ({}, {"origin": "http://elsewhere"}, own):
        for path in ("/break", "/console"):
            refused = await site.post(path, data={"kind": "slot"}, headers=headers)
            assert refused.status_code == 403
    assert stores[1].breaks(10) == []
    assert "Only the user who started the demo" in refused.text
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as peer:
            assert is_own_peer("127.0.0.1", peer.getsockname()[1], port)
            assert not is_own_peer("127.0.0.1", peer.getsockname()[1], port + 1)
            assert not is_own_peer("192.0.2.1", peer.getsockname()[1], port)
    ended = [is_own_peer("127.0.0.1", 1, port)]
    assert ended == [False]


def test_tables_of_another_version_are_named(tmp_path):
    with sqlite3.connect(tmp_path / "old.sqlite") as connection:
        connection.execute("CREATE TABLE opened (one INTEGER PRIMARY KEY, n INTEGER NOT NULL)")
    with pytest.raises(sqlite3.OperationalError, match="is_counted"):
        Adverts(tmp_path / "old.sqlite").create()


def test_a_fault_is_open_once_and_forgotten_without_a_demo(stores, monkeypatch):
    records = stores[1]
    assert all(records.ask_break(kind) for kind in BREAKS)
    assert not any(records.ask_break(kind) for kind in BREAKS)
    first = records.next_break()
    assert first.kind == BREAKS[0]
    ended_at = time.time()
    records.note_break(first.id, began_at=ended_at, ended_at=ended_at)
    assert records.next_break().kind == BREAKS[1]
    records.note_break(first.id, recovered_at=ended_at + 2.5)
    found = next(one for one in records.breaks(10) if one.id == first.id)
    assert (found.is_open, round(found.recovery_s, 1)) == (False, 2.5)
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert records.next_break() is None


def test_a_lost_a_doubled_and_a_repeated_errand_are_seen(stores, tmp_path):
    records = stores[1]
    records.ask([(uid, "bazaar.mail") for uid in ("a", "b", "c", "refused")])
    records.accept(["a", "b", "c"])
    with pytest.raises(OSError, match="crash"), records.running("a"):
        raise OSError("crash")
    killed = records.running("b")
    killed.__enter__()
    assert records.open_runs() == {os.getpid(): {"b"}}
    for uid in ("a", "b"):
        with records.running(uid) as run:
            assert run == 2
            records.take_effect(uid)
            records.take_effect(uid)
    for _ in range(2):
        seen = records.errands()
        assert (seen.accepted, seen.done, seen.doubled, seen.repeated) == (3, 2, 0, 1)
        records.fold(older_than_s=-1)
    assert records.open_runs() == {}
    records.take_effect("c")
    with sqlite3.connect(tmp_path / "bazaar.sqlite") as connection:
        connection.execute("INSERT INTO effect (uid, at) VALUES ('c', 0)")
    records.fold(older_than_s=-1)
    assert (records.errands().done, records.errands().doubled) == (3, 1)


async def test_a_run_of_the_demo_counts_neither_breaks_nor_crashes_of_an_earlier_one(site, stores):
    records = stores[1]
    records.put_paper(PAPER, {"lines": []})
    records.put_paper(WRONG, {"texts": ["jobs: 1 lost, 0 doubled"]})
    now = time.time()
    done = {"began_at": now, "ended_at": now, "recovered_at": now, "note": "107 views are lost"}
    records.note_break(records.ask_break("valkey"), **done)
    records.ask([(uid, "bazaar.mail") for uid in ("folded", "doubled", "open")])
    records.accept(["folded", "doubled", "open"])
    with sqlite3.connect(records._file) as connection:
        for uid in ("folded", "doubled", "open"):
            connection.execute("INSERT INTO run (uid, pid, began_at) VALUES (?, 1, 0)", (uid,))
        connection.execute("INSERT INTO effect (uid, at) VALUES ('doubled', 0), ('doubled', 1)")
    with records.running("folded"):
        records.take_effect("folded")
    records.fold(older_than_s=-1)
    assert (records.errands().repeated, records.errands().doubled) == (1, 1)
    records.begin_run()
    with records.running("open"):  # again, after the end of the earlier run cut it off
        records.take_effect("open")
    seen = records.errands()
    assert (seen.accepted, seen.done, seen.doubled, seen.repeated) == (3, 3, 0, 0)
    assert records.open_runs() == {}
    text = (await site.get("/break")).text
    assert "Nothing in this run" in text
    assert "107 views" not in text


async def test_a_hanging_host_is_silent_until_its_time(tmp_path):
    file = tmp_path / "hanging.json"
    with (tmp_path / "log").open("w") as log:
        host = Host(shop_named("velo-ada"), Album(), log, file)
        assert host._hangs_s() <= 0
        file.write_text(json.dumps({"velo-ada": time.time() + 9}))
        assert 8 < host._hangs_s() <= 9
        file.write_text(json.dumps({"other": time.time() + 9}))
        assert host._hangs_s() <= 0


async def test_valkey_is_emptied_through_a_folder_of_any_length(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    requests = []

    async def answer(reader, writer):
        requests.extend([await reader.readline(), await reader.readline()])
        writer.write(b":12\r\n+OK\r\n")

    handle = os.open(folder, os.O_RDONLY)
    async with await asyncio.start_unix_server(answer, f"/proc/self/fd/{handle}/valkey.sock"):
        assert await flush_valkey(folder) == 12
    os.close(handle)
    assert requests == [b"DBSIZE\r\n", b"FLUSHALL SYNC\r\n"]


def test_pictures_of_a_category_differ_and_are_kept(tmp_path):
    shapes = {draw(category, 0).view(is_near=False).tobytes() for category in CATEGORIES}
    assert len(shapes) == len(CATEGORIES)
    album = Album(tmp_path)
    names = [f"books-{look:02}-x-a.jpg" for look in (0, LOOKS // 3, 2 * LOOKS // 3)]
    photos = [album.photo(name) for name in names]
    assert len(set(photos)) == 3
    assert len(list(tmp_path.iterdir())) == 6
    assert [Album(tmp_path).photo(name) for name in names] == photos
    assert cover("one") == cover("one") != cover("two")
