"""From a catalogue to results: photos, outcomes and versions, on real engines."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from origin import Answer, photo, redirect
from room import HEAD, rows
from tests.kit.waiting import wait_true

from headrace.fetch.model import PHOTO_RETRIES
from headrace.fetch.store.outcomes import Decision, NewPhoto, OutcomeStore
from headrace.jobs.errors import LeaseLost

pytestmark = pytest.mark.slow


def catalogue(shop, items) -> str:
    """CSV of (id, name, photo paths)."""
    lines = [f"{item},{name},10.50,{shop.urls(*paths)}\n" for item, name, paths in items]
    return HEAD + "".join(lines)


def digest(name: str) -> str:
    return hashlib.sha256(photo(name)).hexdigest()


@pytest.mark.usefixtures("worker")
async def test_catalogues_become_items_edits_and_removals_with_stored_photos(shop, blobs):
    items = [(f"i{n}", f"Item {n}", [f"/photo/{n}", "/photo/same"]) for n in range(5)]
    items.append(("bare", "Bare", []))
    run = await shop.run_to_end(catalogue(shop, items))
    assert (run.state, run.new, run.rows, run.invalid) == ("done", 6, 6, 0)
    assert (run.photos, run.photos_pending) == (10, 0)
    assert sum(run.photos_by_outcome.values()) == 10
    assert shop.origin.statuses() == {200: 6}, "a photo of many items is requested once"
    [item] = [item for item in shop.items if item.id == "i1"]
    assert item.fields == {"name": "Item 1", "price": "10.50"}
    first = item.photos[0]
    assert (first.outcome, first.width, first.height) == ("stored", 64, 48)
    assert first.sha256 == digest("/photo/1")
    assert await blobs.get(first.key) == photo("/photo/1")
    assert {version for _, _, version in shop.published()} == {1}
    items[1] = ("i1", "Item 1 better", items[1][2])
    run = await shop.run_to_end(catalogue(shop, items[:4]))
    assert (run.new, run.changed, run.gone, run.unchanged) == (0, 1, 2, 3)
    assert shop.published() == [("edit", "i1", 2), ("unpublish", "bare", 2), ("unpublish", "i4", 2)]
    again = await shop.run_to_end(catalogue(shop, items[:4]))
    assert (again.state, again.unchanged, shop.published()) == ("done", 4, [])
    assert shop.origin.statuses() == {200: 6}, "photos of unchanged items are not requested"
    back = await shop.run_to_end(catalogue(shop, items))
    assert (back.new, back.unchanged) == (2, 4)
    assert shop.published() == [("publish", "bare", 3), ("publish", "i4", 3)]
    first = await shop.fetch.items.results(after=0, results_max=4)
    rest = await shop.fetch.items.results(after=first[-1].seq, results_max=100)
    seqs = [r.seq for r in first + rest]
    assert (seqs, len(seqs)) == (sorted(set(seqs)), 11), "results are polled in order"


@pytest.mark.usefixtures("worker")
async def test_another_order_of_links_revalidates_photos(shop):
    await shop.run_to_end(catalogue(shop, [("a", "A", ["/photo/1", "/photo/2"])]))
    shop.origin.versions["/photo/2"] = "-new"
    run = await shop.run_to_end(catalogue(shop, [("a", "A", ["/photo/2", "/photo/1"])]))
    assert run.photos_by_outcome == {"stored": 1, "unchanged": 1}
    assert shop.origin.requests("/photo/1") == [200, 304]
    item = await shop.fetch.items.get("shop", "a")
    assert item.photos[0].sha256 == digest("/photo/2-new")


@pytest.mark.usefixtures("worker")
async def test_every_photo_has_one_outcome_and_the_counts_add_up(shop):
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\nabc"
    shop.origin.answers |= {
        "/gone": [Answer(404)],
        "/page.jpg": [Answer(200, b"<html></html>")],
        "/flaky": [Answer(503), Answer(200, photo("flaky"))],
        "/short": [Answer(raw=cut)],
        "/half": [Answer(200, photo("half")[:500])],
        "/inward": [redirect("http://169.254.169.254/latest")],
    }
    paths = ["/photo/ok", *shop.origin.answers]
    text = catalogue(shop, [("a", "A", paths)]).strip() + "|http://10.0.0.1/x.jpg\n"
    found = await shop.wait_done(await shop.run(text), hurries=True)
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
    assert len(shop.origin.requests("/short")) == 1 + PHOTO_RETRIES


@pytest.mark.usefixtures("worker")
async def test_a_handler_that_fails_is_called_again_and_versions_stay_in_order(shop):
    seen, failures = [], ["first"]

    async def moody(item) -> None:
        if failures:
            raise RuntimeError(failures.pop())
        seen.append((item.action, item.version))

    shop.fetch.on_item(moody)
    await shop.wait_done(await shop.run(catalogue(shop, [("a", "A", [])])), hurries=True)
    await shop.run_to_end(catalogue(shop, [("a", "A2", [])]))
    assert seen == [("publish", 1), ("edit", 2)]


@pytest.mark.usefixtures("worker")
async def test_an_object_store_that_is_down_uses_up_no_try_and_no_request(shop, blobs):
    """A file replaces the folder: each photo is requested once, then waits, and is stored."""
    away = blobs.folder.with_name("away")
    blobs.folder.rename(away)
    blobs.folder.write_text("not a folder")
    run = await shop.run(catalogue(shop, [("a", "A", [f"/photo/{n}" for n in range(5)])]))
    await wait_true(lambda: len(shop.origin.log) == 5, what="every photo is requested once")
    looks = 0

    async def looked_often() -> bool:
        nonlocal looks
        looks += await shop.due_now()
        return looks > 5 * (PHOTO_RETRIES + 2)

    await wait_true(looked_often, what="more tries than a host gets")
    assert shop.origin.statuses() == {200: 5}
    blobs.folder.unlink()
    away.rename(blobs.folder)
    assert (await shop.wait_done(run, hurries=True)).photos_by_outcome == {"stored": 5}
    assert shop.origin.statuses() == {200: 10}


async def test_a_small_customer_gets_its_turn_beside_a_large_one(shop, process):
    count = 1_500
    await shop.fetch.customers.set("small", starts_max=600, window_s=60, connections=8)
    order: list[str] = []

    async def publish(item):
        order.append(item.customer)

    await process(publish).fetch.declare_consumers()
    await shop.run(HEAD + rows(count))
    await shop.run(HEAD + rows(2), customer="small")
    async with process(publish):
        await wait_true(lambda: order.count("small") == 2, what="both are delivered")
    last = max(place for place, customer in enumerate(order) if customer == "small")
    assert last < count / 3


# Outcomes under their leases


async def lease(shop) -> int:
    """A lease without a job."""
    [[id_]] = await shop.sql(
        "INSERT INTO #job_lease (host, queue, jobs, granted_at, ids, run_ats, group_ids,"
        " priorities, attempts, losses, versions, lanes, unique_keys, headers, payloads)"
        " VALUES (1, 1, 1, now(), '{1}', ARRAY[now()], '{0}', '{0}', '{0}', '{0}', '{1}',"
        " '{a}', '{a}', '{a}', '{a}') RETURNING id"
    )
    return id_


async def test_an_outcome_is_recorded_once_under_its_lease(shop):
    """A lost lease and an invalid entry concern only their own photo."""
    urls = [shop.origin.url(f"/photo/{n}") for n in range(6)]
    run = await shop.run(f"{HEAD}a,A,5,{'|'.join(urls)}\n")
    outcomes, held = OutcomeStore(shop.postgres, shop.jobs), await lease(shop)

    def decision(number: int, **values) -> Decision:
        values = {"outcome": "failed:http_404", **values}
        return Decision(run.run, "shop", "a", urls[number], **values)

    async def link():
        return (await shop.fetch.links.why(urls[0])).links[0]

    entries = [decision(n) for n in range(5)] + [decision(5, etag="half a letter: \ud800")]
    ended = await asyncio.gather(
        *[outcomes.record(held if n else -5, entry) for n, entry in enumerate(entries)],
        return_exceptions=True,
    )
    assert isinstance(ended[0], LeaseLost)
    assert isinstance(ended[5], Exception)
    assert ended[1:5] == [None] * 4
    rows_ = await shop.sql("SELECT outcome FROM #fetch_need ORDER BY url")
    assert [row["outcome"] for row in rows_] == [None, *["failed:http_404"] * 4, None]
    stored = NewPhoto("ab" * 32, "photos/ab/ab/x.jpg", "jpg", 10, 2, 2)
    first = decision(0, outcome="stored", photo=stored, etag='"1"')
    for entry in (first, first, decision(0)):
        await outcomes.record(held, entry)
    counts = (await shop.fetch.runs.get(run.run)).photos_by_outcome
    assert counts == {"stored": 1, "failed:http_404": 4}
    found = await link()
    assert (found.outcome, found.sha256, found.etag) == ("failed:http_404", "ab" * 32, '"1"')
    assert (found.failures, found.rounds_left) == (1, 1)
    await outcomes.record(held, decision(0, outcome="failed:lost"))
    found = await link()
    assert (found.failures, found.rounds_left) == (1, 0), "requested by the next run"
