"""Failed links are requested again in rounds, and changed copies reach every item."""

from __future__ import annotations

import hashlib

import pytest
from origin import Answer, photo

from headrace.engines.sql import compile_query
from headrace.fetch import FetchConfig
from headrace.fetch.model import RunState

HEAD = "id,name,price,photos\n"
A_DAY_LATER = compile_query(
    "a_day_later",
    "-- A day passes since links were requested.\n"
    "UPDATE headrace.fetch_link SET checked_at = checked_at - interval '24 hours',"
    " recheck_at = recheck_at - interval '24 hours'",
)
pytestmark = pytest.mark.slow


def row(shop, item: str, name: str, *paths: str) -> str:
    return f"{item},{name},5,{'|'.join(shop.origin.url(path) for path in paths)}\n"


def digest(name: str) -> str:
    return hashlib.sha256(photo(name)).hexdigest()


@pytest.mark.usefixtures("worker")
async def test_a_failed_photo_of_an_unchanged_item_is_asked_until_it_comes(shop):
    text = HEAD + row(shop, "a", "A", "/photo/ok", "/late.jpg") + row(shop, "b", "B", "/photo/b")
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    await shop.run_to_end(text)
    assert shop.told() == [("publish", "a", 1), ("publish", "b", 1)]
    waits = await shop.run_to_end(text)
    assert (waits.changed, waits.unchanged, waits.photos) == (0, 2, 1)
    assert (waits.photos_by_outcome, waits.photos_pending) == ({"waiting": 1}, 0)
    (link,) = (await shop.fetch.links.why(shop.origin.url("/late.jpg"))).links
    assert (link.failures, link.rounds_left) == (1, 0)
    still = await shop.run_to_end(text)
    assert (still.changed, still.unchanged, still.photos) == (0, 2, 1)
    assert still.photos_by_outcome == {"failed:http_404": 1}
    (link,) = (await shop.fetch.links.why(shop.origin.url("/late.jpg"))).links
    assert (link.failures, link.rounds_left) == (2, 2)
    assert shop.told() == []
    assert (await shop.fetch.items.get("shop", "a")).version == 1
    shop.origin.answers["/late.jpg"] = [Answer(200, photo("late"))]
    assert [(await shop.run_to_end(text)).photos_by_outcome for _ in range(2)] == [
        {"waiting": 1},
        {"waiting": 1},
    ]
    came = await shop.run_to_end(text)
    assert (came.changed, came.unchanged, came.rows) == (1, 1, 2)
    assert came.photos_by_outcome == {"stored": 1}
    assert all(p.key for item in shop.items for p in item.photos)
    assert shop.told() == [("edit", "a", 2)]
    quiet = await shop.run_to_end(text)
    assert (quiet.state, quiet.unchanged, quiet.photos) == (RunState.DONE, 2, 0)
    assert shop.origin.requests("/late.jpg") == [404, 404, 200]
    assert shop.origin.requests("/photo/ok") == [200]


@pytest.mark.usefixtures("worker")
async def test_a_changed_list_asks_at_once_another_field_does_not(shop):
    shop.origin.answers["/dead.jpg"] = [Answer(404)]
    await shop.run_to_end(HEAD + row(shop, "a", "A", "/dead.jpg", "/photo/1"))
    price = await shop.run_to_end(HEAD + row(shop, "a", "Another name", "/dead.jpg", "/photo/1"))
    assert price.photos_by_outcome == {"known": 1, "waiting": 1}
    assert shop.origin.requests("/dead.jpg") == [404]
    turned = await shop.run_to_end(HEAD + row(shop, "a", "Another name", "/photo/1", "/dead.jpg"))
    assert turned.photos_by_outcome == {"failed:http_404": 1, "unchanged": 1}
    assert shop.origin.requests("/dead.jpg") == [404, 404]
    edited = await shop.run_to_end(HEAD + row(shop, "a", "Another name", "/photo/1", "/photo/2"))
    assert edited.photos_by_outcome == {"stored": 1, "unchanged": 1}


@pytest.mark.usefixtures("worker")
async def test_after_a_day_a_failed_link_is_asked_whatever_its_round(shop):
    shop.origin.answers["/dead.jpg"] = [Answer(404)]
    text = HEAD + row(shop, "a", "A", "/dead.jpg")
    await shop.run_to_end(text)
    assert (await shop.run_to_end(text)).photos_by_outcome == {"waiting": 1}
    await shop.postgres.run(A_DAY_LATER)
    assert (await shop.run_to_end(text)).photos_by_outcome == {"failed:http_404": 1}


@pytest.mark.usefixtures("worker")
async def test_a_broken_link_with_a_good_copy_keeps_it_and_is_asked_again(shop):
    await shop.run_to_end(HEAD + row(shop, "a", "A", "/photo/1"))
    shop.origin.answers["/photo/1"] = [Answer(410)]
    text = HEAD + row(shop, "a", "A", "/photo/1", "/photo/2")
    await shop.run_to_end(text)
    shop.told()
    kept = (await shop.fetch.items.get("shop", "a")).photos[0]
    assert (kept.outcome, kept.sha256) == ("failed:http_410", digest("/photo/1"))
    assert (await shop.run_to_end(text)).photos_by_outcome == {"waiting": 1}
    del shop.origin.answers["/photo/1"]
    assert (await shop.run_to_end(text)).photos_by_outcome == {"unchanged": 1}
    assert shop.told() == [], "the copy is the one that they know"
    assert shop.origin.requests("/photo/1") == [200, 410, 304]


@pytest.mark.usefixtures("worker")
async def test_what_comes_back_changed_is_an_edit(shop):
    await shop.run_to_end(HEAD + row(shop, "a", "A", "/photo/1"))
    shop.origin.answers["/photo/1"] = [Answer(500)]
    text = HEAD + row(shop, "a", "A", "/photo/1", "/photo/2")
    shop.origin.answers["/photo/1"] = [Answer(410)]
    await shop.run_to_end(text)
    del shop.origin.answers["/photo/1"]
    shop.origin.versions["/photo/1"] = "-new"
    shop.told()
    await shop.run_to_end(text)
    back = await shop.run_to_end(text)
    assert (back.changed, back.photos_by_outcome) == (1, {"stored": 1})
    assert shop.items[0].photos[0].sha256 == digest("/photo/1-new")
    assert shop.told() == [("edit", "a", 3)]


@pytest.mark.usefixtures("worker")
async def test_a_photo_that_changed_behind_its_url_reaches_unchanged_items_too(shop):
    old = row(shop, "b", "B", "/photo/1")
    await shop.run_to_end(HEAD + row(shop, "a", "A", "/photo/1") + old)
    shop.origin.versions["/photo/1"] = "-new"
    changed = HEAD + row(shop, "a", "A", "/photo/1", "/photo/2") + old
    assert (await shop.run_to_end(changed)).photos_by_outcome == {"stored": 2}
    shop.told()
    following = await shop.run_to_end(changed)
    assert (following.changed, following.unchanged, following.photos) == (1, 1, 0)
    assert shop.items[0].photos[0].sha256 == digest("/photo/1-new")
    assert shop.told() == [("edit", "b", 2)]
    quiet = await shop.run_to_end(changed)
    assert (quiet.changed, shop.told()) == (0, [])


@pytest.mark.usefixtures("worker")
async def test_a_photo_that_came_for_another_item_reaches_the_one_that_waits_for_it(shop):
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    old = row(shop, "b", "B", "/late.jpg")
    await shop.run_to_end(HEAD + old)
    shop.origin.answers["/late.jpg"] = [Answer(200, photo("late"))]
    both = HEAD + old + row(shop, "a", "A", "/late.jpg")
    assert (await shop.run_to_end(both)).photos_by_outcome == {"stored": 1, "waiting": 1}
    shop.told()
    assert (await shop.run_to_end(both)).changed == 1
    assert shop.told() == [("edit", "b", 2)]


@pytest.mark.usefixtures("worker")
async def test_a_link_refused_at_the_door_is_judged_by_the_settings_of_the_day(shop, process):
    text = HEAD + row(shop, "a", "A", "/photo/1")
    (shop.folder / "door.csv").write_text(text)
    closed = process(config=FetchConfig(allow_ports=(shop.origin.port,)))
    refused = await closed.fetch.run_catalogue(shop.folder / "door.csv", "shop")
    assert (await shop.wait_done(refused)).photos_by_outcome == {"refused:forbidden_address": 1}
    again = await closed.fetch.run_catalogue(shop.folder / "door.csv", "shop")
    assert (again.state, again.photos) == (RunState.DONE, 0)
    shop.told()
    why = await closed.fetch.links.why(shop.origin.url("/photo/1"))
    assert not why.allowed
    assert "fetch.allow_networks" in why.judgement
    assert (await shop.fetch.links.why(shop.origin.url("/photo/1"))).allowed
    opened = await shop.run_to_end(text)
    assert (opened.changed, opened.photos_by_outcome) == (1, {"stored": 1})
    assert shop.told() == [("edit", "a", 2)]
    await closed.fetch.close()


async def test_asking_again_keeps_out_of_the_way_of_other_runs(shop, process):
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    text = HEAD + row(shop, "a", "A", "/late.jpg")
    async with process():
        await shop.wait_done(await shop.run(text))
    shop.origin.answers["/late.jpg"] = [Answer(200, photo("late"))]
    await shop.postgres.run(A_DAY_LATER)
    again = await shop.run(text)
    assert (again.state, again.photos, again.items_pending) == (RunState.APPLIED, 1, 1)
    beside = await shop.run(text)
    assert (beside.state, beside.photos) == (RunState.DONE, 0), "another run requests it already"
    changed = await shop.run(text.replace("a,A", "a,A2"))
    async with process():
        again, changed = await shop.wait_done(again), await shop.wait_done(changed)
    assert (again.changed, again.unchanged) == (0, 1)
    results = [(r.action, r.version, r.photos[0].outcome) for r in await shop.fetch.items.results()]
    assert results == [("publish", 1, "failed:http_404"), ("edit", 2, "stored")]
    assert sum(again.photos_by_outcome.values()) == sum(changed.photos_by_outcome.values()) == 1


@pytest.mark.usefixtures("worker")
async def test_a_dry_run_counts_the_photos_of_the_real_one(shop):
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    shop.origin.answers["/dead.jpg"] = [Answer(404)]
    old = row(shop, "a", "A", "/late.jpg", "/photo/1") + row(shop, "c", "C", "/dead.jpg")
    await shop.run_to_end(HEAD + old)
    new = f"b,B,5,{shop.origin.url('/photo/1')}|{shop.origin.url('/photo/2')}|ftp://x/y.jpg\n"
    text = HEAD + old.replace("/late.jpg", "/photo/3") + new
    dry = await shop.run(text, is_dry_run=True)
    assert (dry.state, dry.photos, dry.photos_pending) == (RunState.DRY, 6, 4)
    assert dry.photos_by_outcome == {"refused:scheme": 1, "waiting": 1}
    assert shop.origin.requests("/late.jpg") == [404]
    real = await shop.run_to_end(text)
    assert real.photos == dry.photos
    assert real.photos_by_outcome == {
        "refused:scheme": 1,
        "stored": 2,
        "unchanged": 2,
        "waiting": 1,
    }
