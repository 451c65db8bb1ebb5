"""The recipes work as their page describes, and the page shows them unchanged."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import re
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from headrace.engines.sql import compile_query
from headrace.jobs.model import TakenOutcome
from headrace.kernel.logs import current_traceparent
from headrace.testing import assert_enqueued, drain, refute_enqueued

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("[a-z]*.py"))
DUE = compile_query(
    "due",
    "-- Everything that waits is due.\n"
    "UPDATE headrace.job_ready SET run_at = now() - interval '1 s'",
)


@pytest.fixture
async def recipe(surroundings):
    """`recipe(name)`: the program, on a database of its own."""
    imported = []

    def imported_anew(name):
        sys.modules.pop(f"examples.recipes.{name}", None)
        imported.append(importlib.import_module(f"examples.recipes.{name}"))
        return imported[-1]

    yield imported_anew
    for program in imported:
        await program.app.close()


@contextmanager
def serving(answer):
    """A server on this machine; `answer(handler)` answers each request.

    Yields its URL and the requested paths.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status, headers, body = answer(self, len(asked))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.do_GET()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_shows_every_recipe_as_it_is():
    page = (ROOT / "docs" / "recipes.md").read_text()
    shown = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    for name in NAMES:
        body = (RECIPES / f"{name}.py").read_text()
        assert shown.get(name) == body, f"copy examples/recipes/{name}.py into docs/recipes.md"
    assert sorted(shown) == NAMES


async def test_delayed_posts(recipe, capsys):
    posts = recipe("delayed_posts")
    await posts.main()
    assert "one job for one post: True" in capsys.readouterr().out
    [waiting] = await assert_enqueued(posts.app, "publish")
    assert (await posts.app.jobs.job(waiting)).payload == {"post_id": 1}
    await posts.app.engines.postgres.all(DUE)
    assert await drain(posts.app) == {"done": 1}
    assert capsys.readouterr().out == "post 1 is public\n"


async def test_night(recipe, capsys):
    night = recipe("night")
    await night.main()
    assert "10000 jobs" in capsys.readouterr().out
    look = compile_query(
        "look",
        "-- Their moments.\n"
        "SELECT min(run_at) AS first, max(run_at) AS last FROM headrace.job_ready",
    )
    [row] = await night.app.engines.postgres.all(look)
    hours = (row["last"] - row["first"]).total_seconds() / 3600
    assert 4.9 < hours < 5.0
    assert row["first"].hour == 1
    await night.app.engines.postgres.all(DUE)
    assert await drain(night.app) == {"done": 10_000}


async def test_moderation(recipe, capsys):
    shop = recipe("moderation")
    await shop.main()
    assert await drain(shop.app) == {}, "no code works the queue"
    taken = await shop.app.jobs.takes.take("moderation", 3)
    assert [job.payload["author"] for job in taken.jobs] == ["carol", "ann", "bob"]
    carol, ann, bob = (job.id for job in taken.jobs)
    outcomes = {
        carol: TakenOutcome(decision="reject"),
        ann: TakenOutcome(decision="approve"),
        bob: TakenOutcome(outcome="return"),
    }
    await shop.app.jobs.takes.ack(taken.lease_id, outcomes)
    capsys.readouterr()
    assert await drain(shop.app) == {"done": 2}
    reported = capsys.readouterr().out
    assert "cat.jpg of ann is public" in reported
    assert "notify carol: fish.jpg was rejected" in reported
    await assert_enqueued(shop.app, "moderation", payload={"author": "bob"})


async def test_convert(recipe, capsys, monkeypatch):
    def started():
        walk = recipe("convert")
        monkeypatch.setattr(walk, "PAGE", 3)
        monkeypatch.setattr(walk, "FOLDERS", ["photos/00", "photos/ab"])
        return walk

    walk = started()
    named = {hashlib.sha256(b"%d" % n).hexdigest(): b"%d" % n for n in range(2_000)}
    photos = {f"photos/ab/{name}.jpg": data for name, data in named.items() if name[:2] == "ab"}
    damaged = f"photos/ab/ab{'f' * 62}.jpg"
    blobs = walk.app.engines.blobs
    for key, data in {**photos, damaged: b"other bytes"}.items():
        await blobs.put(key, data)
    first = walk.convert_page.job(folder="photos/ab", after="", lane="store")
    await walk.convert_page.enqueue_many([first])
    assert await drain(walk.app) == {"done": 1}, "the walk was killed before its record"
    assert capsys.readouterr().out.count("converted:") == 3
    for _ in range(2):
        await walk.main()
        walk = started()
    assert (await walk.app.jobs.queues.get("workflow.convert")).ready == 2, "one walk a folder"
    ended = await drain(walk.app)
    pages = -(-(len(photos) + 1) // 3)
    assert ended["done"] == 2 + 1 + pages, "folders, a page of the empty one, pages"
    out = capsys.readouterr().out
    assert (out.count("converted:"), out.count(f"damaged: {damaged}")) == (len(photos) - 3, 1)
    for key, data in photos.items():
        assert gzip.decompress(await walk.app.engines.blobs.get(f"converted/{key}.gz")) == data


async def test_buffer(recipe, capsys, monkeypatch):
    def answer(request, number):
        if request.body["name"] == "user-3":
            return 422, {}, b""
        return (503, {"Retry-After": "0"}, b"") if number == 1 else (201, {}, b"")

    with serving(answer) as (url, asked):
        monkeypatch.setenv("CRM_URL", url)
        crm = recipe("buffer")
        await crm.main()
        ended = await drain(crm.app)
        assert ended == {"done": 29, "fail": 1, "retry": 1}
        assert len(asked) == 31
        lane = await crm.app.jobs.lanes.get("crm", "crm")
        assert (lane.starts_max, lane.window_s, lane.concurrency) == (600, 60.0, 4)
        assert lane.starts_live == 31
    assert "user-7 is in the CRM" in capsys.readouterr().out


async def test_walk(recipe, capsys, monkeypatch):
    def answer(request, _number):
        page = int(parse_qs(urlsplit(request.path).query)["page"][0])
        if page == 2 and "moved" not in request.path:
            return 302, {"Location": "/moved?page=2"}, b""
        following = f"/items?page={page + 1}" if page < 3 else None
        return 200, {}, json.dumps({"items": [f"item-{page}"], "next": following}).encode()

    with serving(answer) as (url, asked):
        monkeypatch.setenv("PARTNER_URL", f"{url}/items?page=1")
        partner = recipe("walk")
        await partner.main()
        assert await drain(partner.app) == {"done": 3}
        assert asked == ["/items?page=1", "/items?page=2", "/moved?page=2", "/items?page=3"]
        lane = await partner.app.jobs.lanes.get("partners", "acme")
        assert lane.starts_live == 4, "three jobs and a redirect"
    assert capsys.readouterr().out.split() == [
        *("acme", "has", "item-1", "acme", "has", "item-2", "acme", "has", "item-3")
    ]


async def test_cascade(recipe, database_url):
    shop = recipe("cascade")
    await shop.main()
    ended = await drain(shop.app)
    users, posts, comments = 1, 3, 250 + 5
    assert ended == {"done": users + posts + comments}
    connection = await asyncpg.connect(database_url)
    for table in ("users", "posts", "comments"):
        assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0
    await connection.close()
    assert shop.pools == []


async def test_report(recipe, capsys):
    shop = recipe("report")
    await shop.app.jobs.crons.declare()
    [cron] = await shop.app.jobs.crons.all()
    assert (cron.name, cron.spec, cron.tz) == ("daily_report", "0 4 * * *", "Europe/Moscow")
    await shop.main()
    assert (await drain(shop.app))["done"] == 1_000
    await shop.app.jobs.sweep()
    await shop.app.jobs.crons.run("daily_report")
    assert await drain(shop.app) == {"done": 1}
    assert capsys.readouterr().out == "orders: 1000 done, 0 failed\n"


async def test_album(recipe, capsys):
    shop = recipe("album")
    await shop.main()
    await refute_enqueued(shop.app, "albums")
    assert await drain(shop.app) == {"done": 100, "fail": 1}
    assert "album 1: 99 photos, 1 broken\n" in capsys.readouterr().out


async def test_sentry_errors(recipe, monkeypatch):
    """The event of an error arrives at the address of the DSN, with queue and trace."""
    bodies = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_packed = self.headers.get("Content-Encoding") == "gzip"
            bodies.append(gzip.decompress(body) if is_packed else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SENTRY_DSN", f"http://key@127.0.0.1:{server.server_port}/1")
    sentry = recipe("sentry_errors")
    try:
        sentry.connect_sentry()
        parent = f"00-{7:032x}-{8:016x}-00"
        token = current_traceparent.set(parent)
        await sentry.charge.enqueue(order=1)
        current_traceparent.reset(token)
        assert await drain(sentry.app) == {"retry": 1}
        sentry.send_last_events()
    finally:
        # The default integrations would change Litestar for later tests.
        monkeypatch.delenv("SENTRY_DSN")
        sentry.sentry_sdk.init(default_integrations=False)
        server.shutdown()
        server.server_close()
    [event] = [json.loads(body.splitlines()[2]) for body in bodies]
    assert event["exception"]["values"][-1]["value"] == "order 1 has no price"
    assert (event["tags"]["queue"], event["tags"]["trace_id"]) == ("charge", f"{7:032x}")
