"""The line of a catalogue: rows, photos, results, and what a second run does; on real engines."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from origin import Answer, photo
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch.model import PHOTO_RETRIES

PHOTOS_DUE = compile_query(
    "photos_due",
    "-- What waits for its time is due.\n"
    "WITH ready AS (UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now() RETURNING 1),"
    " lanes AS (UPDATE headrace.lane_job SET run_at = now() WHERE run_at > now() RETURNING 1)"
    " SELECT (SELECT count(*) FROM ready) + (SELECT count(*) FROM lanes)",
)
pytestmark = [pytest.mark.usefixtures("worker"), pytest.mark.slow]


def catalogue(shop, rows) -> str:
    """CSV of (id, name, photo paths)."""
    lines = [
        f"{item},{name},10.50,{'|'.join(shop.origin.url(p) for p in paths)}"
        for item, name, paths in rows
    ]
    return "\n".join(["id,name,price,photos", *lines, ""])


async def test_a_catalogue_becomes_items_with_stored_photos(shop, blobs):
    rows = [
        ("a", "Lamp", ["/photo/1", "/photo/2"]),
        ("b", "Chair", ["/photo/3"]),
        ("c", "Bare", []),
    ]
    run = await shop.run_to_end(catalogue(shop, rows))
    assert (run.state, run.new, run.rows, run.invalid) == ("done", 3, 3, 0)
    assert run.photos_by_outcome == {"stored": 3}
    assert run.photos == 3
    assert run.photos_pending == 0
    lamp = next(item for item in shop.items if item.id == "a")
    assert lamp.fields == {"name": "Lamp", "price": "10.50"}
    first = lamp.photos[0]
    assert (first.outcome, first.width, first.height) == ("stored", 64, 48)
    assert first.sha256 == hashlib.sha256(photo("/photo/1")).hexdigest()
    assert await blobs.get(first.key) == photo("/photo/1")
    assert shop.told() == [("publish", "a", 1), ("publish", "b", 1), ("publish", "c", 1)]


async def test_a_second_run_edits_and_unpublishes_exactly_what_changed(shop):
    rows = [(f"i{n}", f"Item {n}", [f"/photo/{n}"]) for n in range(5)]
    await shop.run_to_end(catalogue(shop, rows))
    assert len(shop.told()) == 5
    assert shop.origin.statuses() == {200: 5}
    rows[1] = ("i1", "Item 1 better", ["/photo/1"])
    run = await shop.run_to_end(catalogue(shop, rows[:4]))
    assert (run.new, run.changed, run.gone, run.unchanged) == (0, 1, 1, 3)
    assert shop.told() == [("edit", "i1", 2), ("unpublish", "i4", 2)]
    assert shop.origin.statuses() == {200: 5}
    again = await shop.run_to_end(catalogue(shop, rows[:4]))
    assert (again.state, again.unchanged) == ("done", 4)
    assert shop.told() == []
    back = await shop.run_to_end(catalogue(shop, rows))
    assert (back.new, back.unchanged) == (1, 4)
    assert shop.told() == [("publish", "i4", 3)]
    assert shop.origin.statuses() == {200: 5, 304: 1}


async def test_another_order_asks_whether_photos_changed_and_notices_one_that_did(shop):
    await shop.run_to_end(catalogue(shop, [("a", "A", ["/photo/1", "/photo/2"])]))
    shop.origin.versions["/photo/2"] = "-new"
    run = await shop.run_to_end(catalogue(shop, [("a", "A", ["/photo/2", "/photo/1"])]))
    assert run.photos_by_outcome == {"stored": 1, "unchanged": 1}
    assert shop.origin.requests("/photo/1") == [200, 304]
    item = await shop.fetch.items.get("shop", "a")
    assert item.photos[0].sha256 == hashlib.sha256(photo("/photo/2-new")).hexdigest()


async def test_a_photo_is_asked_once_and_stored_once_however_many_items_have_it(shop):
    rows = [(f"i{n}", f"Item {n}", ["/photo/same"]) for n in range(20)]
    run = await shop.run_to_end(catalogue(shop, rows))
    assert sum(run.photos_by_outcome.values()) == 20
    assert shop.origin.requests("/photo/same") == [200]
    assert all(item.photos[0].key for item in shop.items)


async def test_a_host_that_hangs_delays_nobody_beside_it(shop):
    shop.origin.answers["/never"] = [Answer(hangs=True)]
    rows = [("stuck", "Stuck", ["/never"])]
    rows += [(f"i{n}", f"Item {n}", [f"/photo/{n}"]) for n in range(30)]
    await shop.run(catalogue(shop, rows))
    await wait_true(lambda: len(shop.items) == 30, what="all others are published")
    assert shop.origin.requests("/never") == [200], "it still hangs"


async def test_every_photo_ends_in_one_outcome_and_the_counts_add_up(shop, postgres):
    answers = shop.origin.answers
    answers["/gone"] = [Answer(404)]
    answers["/page.jpg"] = [
        Answer(200, b"<html>not a photo</html>", {"Content-Type": "image/jpeg"})
    ]
    answers["/flaky"] = [Answer(500), Answer(200, photo("flaky"))]
    answers["/short"] = [Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nabc")]
    answers["/half"] = [Answer(200, photo("half")[:600])]
    answers["/inward"] = [Answer(302, headers={"Location": "http://169.254.169.254/latest"})]
    paths = ["/photo/ok", "/gone", "/page.jpg", "/flaky", "/short", "/half", "/inward"]
    text = catalogue(shop, [("a", "A", paths)]).strip() + "|http://10.0.0.1/x.jpg\n"
    run = await shop.run(text)
    done = asyncio.create_task(shop.wait_done(run))
    await _hurry_retries(done, postgres)
    found = await done
    assert found.photos_by_outcome == {
        "stored": 2,
        "failed:http_404": 1,
        "failed:truncated": 2,
        "refused:forbidden_address": 2,
        "refused:not_an_image": 1,
    }
    assert found.photos == 8
    assert [p.outcome for p in shop.items[0].photos][:2] == ["stored", "failed:http_404"]
    assert shop.origin.requests("/gone") == [404]
    assert len(shop.origin.requests("/short")) == 4


async def _hurry_retries(done, postgres) -> None:
    """Make waiting jobs due until `done`, instead of waiting for their backoff."""
    while not done.done():
        async with postgres.session() as session:
            for table in ("job_ready", "lane_job"):
                await session.connection.execute(
                    f"UPDATE headrace.{table} SET run_at = now() WHERE run_at > now()"
                )
        await asyncio.wait([done], timeout=0.1)


async def test_the_last_good_copy_stays_while_its_link_is_broken(shop):
    await shop.run_to_end(catalogue(shop, [("a", "A", ["/photo/1"])]))
    shop.told()
    shop.origin.answers["/photo/1"] = [Answer(410)]
    await shop.run_to_end(catalogue(shop, [("a", "A", ["/photo/1", "/photo/2"])]))
    first = shop.items[0].photos[0]
    assert first.outcome == "failed:http_410"
    assert first.sha256 == hashlib.sha256(photo("/photo/1")).hexdigest()


async def test_a_handler_that_fails_is_called_again_and_versions_stay_in_order(shop, postgres):
    seen, failures = [], ["first"]

    async def moody(item) -> None:
        if failures:
            raise RuntimeError(failures.pop())
        seen.append((item.action, item.version))

    shop.fetch.on_item(moody)
    run = await shop.run(catalogue(shop, [("a", "A", [])]))
    done = asyncio.create_task(shop.wait_done(run))
    await _hurry_retries(done, postgres)
    await done
    await shop.run_to_end(catalogue(shop, [("a", "A2", [])]))
    assert seen == [("publish", 1), ("edit", 2)]


async def test_results_are_polled_in_order_and_never_skip(shop):
    rows = [(f"i{n}", f"Item {n}", []) for n in range(30)]
    await shop.run_to_end(catalogue(shop, rows))
    first = await shop.fetch.items.results(after=0, results_max=10)
    rest = await shop.fetch.items.results(after=first[-1].seq, results_max=100)
    assert [r.seq for r in first + rest] == sorted(r.seq for r in first + rest)
    assert {r.id for r in first + rest} == {f"i{n}" for n in range(30)}


async def test_a_yml_catalogue_takes_the_same_way(shop):
    offers = "".join(
        f"<offer id='o{n}'><name>Offer {n}</name><price>{n}.5</price><categoryId>1</categoryId>"
        f"<picture>{shop.origin.url(f'/photo/{n}')}</picture></offer>"
        for n in range(3)
    )
    text = (
        "<yml_catalog><shop><categories><category id='1'>Lamps</category></categories>"
        f"<offers>{offers}</offers></shop></yml_catalog>"
    )
    run = await shop.run_to_end(text, name="shop.yml")
    assert (run.format, run.new, run.photos_by_outcome) == ("yml", 3, {"stored": 3})
    offer = next(item for item in shop.items if item.id == "o2")
    assert offer.fields["category_name"] == "Lamps"
    assert offer.fields["price"] == "2.5"


async def test_an_object_store_that_is_down_uses_up_no_try_and_no_request(shop, blobs):
    """A file where the store's folder was: each photo is requested once, then waits, and ends
    stored.
    """
    away = blobs.folder.with_name("away")
    blobs.folder.rename(away)
    blobs.folder.write_text("not a folder")
    paths = [f"/photo/{n}" for n in range(5)]
    run = await shop.run(catalogue(shop, [("a", "A", paths)]))
    await wait_true(lambda: len(shop.origin.log) == 5, what="every photo is requested once")
    looks = 0

    async def looked_often() -> bool:
        nonlocal looks
        looks += await shop.postgres.value(PHOTOS_DUE)
        return looks > 5 * (PHOTO_RETRIES + 2)

    await wait_true(looked_often, what="more looks than a host gets tries")
    assert shop.origin.statuses() == {200: 5}
    blobs.folder.unlink()
    away.rename(blobs.folder)
    done = asyncio.create_task(shop.wait_done(run))
    await _hurry_retries(done, shop.postgres)
    assert (await done).photos_by_outcome == {"stored": 5}
    assert shop.origin.statuses() == {200: 10}
