"""A process that dies in a catalogue, a photo or a message leaves all of its effect or none.

Forked processes and agents that die at named points of the code.
"""

from __future__ import annotations

import json
import signal
import threading

import pytest
from children import run_fetch
from tests.kit.forked import ended, start_forked
from tests.kit.processes import wait_until
from tests.kit.site import http_host, photo_host
from tests.kit.storm.fleet import SLOT_SETTINGS
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.engines.sql import compile_query
from headrace.fetch.model import Customer
from headrace.fetch.sql import SQL
from headrace.fetch.store.runs import set_customer

pytestmark = pytest.mark.slow
ROWS = 4_000
LIMITS = {"starts_max": 100, "window_s": 1, "connections": 4}
HEAD = "id,name,price,photos\n"
OLD = HEAD + "".join(f"i{n},Old,5,https://x.example/{n}.jpg\n" for n in range(300))
NEW = HEAD + "".join(f"i{n},New,5,https://x.example/{n}.jpg\n" for n in range(150, 150 + ROWS))
FACTS = compile_query(
    "facts",
    "-- Everything that a run leaves behind except its own row.\n"
    "SELECT (SELECT count(*) FROM headrace.fetch_item WHERE NOT is_gone) AS items,"
    " (SELECT count(*) FROM headrace.fetch_item WHERE is_gone) AS gone,"
    " (SELECT count(*) FROM headrace.fetch_item WHERE fields LIKE '%Old%') AS old,"
    " (SELECT count(*) FROM headrace.fetch_change) AS changes,"
    " (SELECT count(*) FROM headrace.fetch_need) AS needs,"
    " (SELECT count(*) FROM headrace.lane_job) + (SELECT count(*) FROM headrace.job_ready) AS jobs,"
    " (SELECT count(*) FROM headrace.job_group) AS groups,"
    " (SELECT count(*) FROM headrace.fetch_result) AS results,"
    " (SELECT count(*) FROM headrace.fetch_run WHERE state IN ('applied', 'done')) AS runs",
)
NEWEST = {"run_ids": None, "customer": "shop", "states": None, "before": None, "rows_max": 10}
STAGED = compile_query("left", "-- Staged rows.\nSELECT count(*) FROM headrace.fetch_staged")
OVERLAYS = compile_query("overlays", "-- All.\nSELECT count(*) FROM headrace.fetch_overlay")
AGE = compile_query(
    "age",
    "-- A day passes.\nUPDATE headrace.fetch_run SET applied_at = applied_at - interval '1 day'",
)


@pytest.fixture
async def shop(postgres, database_url, tmp_path):
    """A customer with the old catalogue; `run(what, crash_at)` returns the exit code."""
    await set_customer(postgres, Customer(customer="shop", **LIMITS, hold_share=1.0))
    for name, text in (("old.csv", OLD), ("new.csv", NEW)):
        (tmp_path / name).write_text(text)

    async def run(what: str, crash_at: str = "") -> int | None:
        crash = f"fetch.{crash_at}" if crash_at else ""
        return await ended(start_forked(run_fetch, database_url, tmp_path, what, crash_at=crash))

    assert await run("old.csv") == 0
    return run


async def facts(postgres):
    return dict(await postgres.one(FACTS))


async def require_unchanged(postgres, shop, what, *points):
    """Whichever point it dies at, nothing changed."""
    before = await facts(postgres)
    for point in points:
        assert await shop(what, point) == -signal.SIGKILL
        assert await facts(postgres) == before, point
    return before


async def test_a_catalogue_is_applied_whole_or_not_at_all(postgres, shop):
    points = ("rows_staged:2", "compared", "items_stored", "jobs_enqueued")
    before = await require_unchanged(postgres, shop, "new.csv", *points)
    assert await shop("new.csv") == 0
    applied = await facts(postgres)
    assert (applied["items"], applied["gone"], applied["runs"]) == (ROWS, 150, 2)
    rows = await postgres.all(SQL.runs, **NEWEST)
    assert [row["state"] for row in rows] == ["applied", *["abandoned"] * len(points), "applied"]
    assert await postgres.value(STAGED) == 0

    undo = f"undo:{rows[0]['id']}"
    await require_unchanged(postgres, shop, undo, "jobs_enqueued")
    assert await shop(undo, "run_applied") == -signal.SIGKILL
    undone = await facts(postgres)
    assert (undone["items"], undone["old"], undone["gone"]) == (300, before["old"], ROWS - 150)
    assert await shop(undo) != 0, "once"
    assert await facts(postgres) == undone


async def test_an_upload_for_review_outlives_its_process_and_is_applied_whole(postgres, shop):
    await require_unchanged(postgres, shop, "review:new.csv", "rows_staged:2")
    assert await shop("review:new.csv") == 0
    [held, abandoned, _] = await postgres.all(SQL.runs, **NEWEST)
    assert (held["state"], abandoned["state"]) == ("held", "abandoned")
    confirm = f"confirm:{held['id']}"
    await require_unchanged(postgres, shop, confirm, "compared", "items_stored", "jobs_enqueued")
    assert await shop(confirm, "run_applied") == -signal.SIGKILL
    applied = await facts(postgres)
    assert (applied["items"], applied["gone"], applied["runs"]) == (ROWS, 150, 2)
    assert (await shop(confirm) != 0, await postgres.value(STAGED)) == (True, 0)


async def test_a_catalogue_that_was_applied_stays_so(postgres, shop):
    assert await shop("new.csv", "run_applied") == -signal.SIGKILL
    after = await facts(postgres)
    assert (after["items"], after["gone"], after["runs"]) == (ROWS, 150, 2)
    assert after["changes"] == 300 + ROWS + 150
    # A changed name alone requests photos again only where no outcome is stored.
    assert after["jobs"] == after["needs"] + 150
    assert await shop("new.csv") == 0
    assert (await facts(postgres))["changes"] == after["changes"]


async def test_a_supplemental_feed_is_applied_whole_or_not_at_all(postgres, shop, tmp_path):
    rows = "".join(f"i{n},7\n" for n in range(200))
    (tmp_path / "supplement.csv").write_text("id,price\n" + rows)
    points = ("rows_staged", "overlays_stored")
    before = await require_unchanged(postgres, shop, "supplement.csv", *points)
    assert await postgres.value(OVERLAYS) == 0
    assert await shop("supplement.csv", "run_applied") == -signal.SIGKILL
    after = await facts(postgres)
    assert (after["changes"], after["runs"]) == (before["changes"] + 200, before["runs"] + 1)
    assert (after["items"], await postgres.value(OVERLAYS)) == (300, 200)
    assert await shop("supplement.csv") == 0
    assert (await facts(postgres))["changes"] == after["changes"], "the same file has no effect"


async def test_sent_items_are_taken_all_or_none_and_late_ones_are_published_once(postgres, shop):
    points = ("items_stored", "jobs_enqueued", "items_sent")
    before = await require_unchanged(postgres, shop, "send", *points)
    # 300 items past their deadline in two pages; the first attempt dies behind the first page.
    await postgres.run(AGE)
    assert await shop("late", "published_late") == -signal.SIGKILL
    assert (await facts(postgres))["results"] == 200
    for _ in range(2):
        assert await shop("late") == 0
        assert (await facts(postgres))["results"] == 300
    assert await shop("send") == 0
    after = await facts(postgres)
    assert (after["items"], after["changes"]) == (300, before["changes"] + 50)


@pytest.fixture
async def app(host, running_engines, database_url, tmp_path):
    """The application of a fleet whose agents may connect to loopback."""
    blobs_url = (tmp_path / "blobs").as_uri()
    allowed = {"fetch.allow_networks": "127.0.0.0/8", "fetch.allow_ports": "1024-65535"}
    names = {name.replace(".", "_").upper(): value for name, value in allowed.items()}
    host.settings = {**SLOT_SETTINGS, **names, "BLOBS_URL": blobs_url, "JOBS_LOSSES_MAX": "100"}
    app = Headrace(flags=allowed)
    app.use_endpoints(Endpoints(database_url, running_engines.endpoints.valkey_url, blobs_url))
    yield app
    await app.close()


def crash(host, point, app="storm_app:app"):
    """Let an agent's slots die at a point, then kill the agent."""
    doomed = host.start(app=app, CRASH_AT=f"fetch.{point}")
    wait_until(lambda: doomed.events("slot_died"), what=f"a slot died at {point}")
    host.kill(doomed)


async def test_a_slot_killed_between_bytes_and_row_leaves_no_photo_undecided(host, app, tmp_path):
    with photo_host() as (url, _):
        rows = "".join(f"i{n},Item,5,{url}/{n}.jpg\n" for n in range(4))
        (tmp_path / "shop.csv").write_text(HEAD + rows)
        await app.fetch.customers.set("shop", **LIMITS)
        run = await app.fetch.run_catalogue(tmp_path / "shop.csv", "shop")
        crash(host, "stored_before_row")
        host.start(app="storm_app:app")
        await wait_true(lambda: len(host.history.of("end", what="item")) >= 4)
        found = await app.fetch.runs.get(run.run)
    assert found.photos_by_outcome == {"stored": 4}


async def test_a_slot_killed_at_its_check_publishes_and_holds_each_item_once(host, app, tmp_path):
    """Before and after the transaction of the verdict; an agent without the check waits."""
    await app.fetch.customers.set("shop", **LIMITS)
    (tmp_path / "shop.csv").write_text(HEAD + "".join(f"i{n},Item,5,\n" for n in range(20)))
    run = await app.fetch.run_catalogue(tmp_path / "shop.csv", "shop")
    crash(host, "judged:5", "checked_app:app")
    crash(host, "checked", "checked_app:app")
    host.start(app="checked_app:app")

    async def is_done():
        return (await app.fetch.runs.get(run.run)).state == "done"

    await wait_true(is_done, what="every item has a verdict")
    results = await app.fetch.items.results(after=0)
    assert sorted((r.id, r.version) for r in results) == sorted(
        (f"i{n}", 1) for n in range(0, 20, 2)
    )
    held = await app.fetch.held.list()
    assert {one.id for one in held} == {f"i{n}" for n in range(1, 20, 2)}


async def test_a_sender_killed_after_its_message_was_accepted_sends_it_again(host, app, tmp_path):
    received: list[int] = []
    lock = threading.Lock()

    def accept(_path, body):
        with lock:
            received.extend(result["seq"] for result in json.loads(body)["results"])
        return 204, b""

    with http_host(accept) as url:
        await app.fetch.customers.set("shop", **LIMITS, webhook=f"{url}/hook")
        (tmp_path / "shop.csv").write_text(HEAD + "".join(f"i{n},Item,5,\n" for n in range(8)))
        await app.fetch.run_catalogue(tmp_path / "shop.csv", "shop")
        crash(host, "webhook_taken")
        first = list(received)
        assert first, "the message was accepted before the sender died"
        host.start(app="storm_app:app")

        async def is_at_the_end():
            return (await app.fetch.webhooks.get("shop")).taken_seq == 8

        await wait_true(is_at_the_end, what="all eight results are accepted")
    assert set(received) == set(range(1, 9))
    assert received.count(first[0]) >= 2
    again = received[len(first) :]
    assert again[-8:] == sorted(again[-8:])
