"""Photos without a good copy are asked again by each run, and only what came of it is told."""

from __future__ import annotations

import pytest
from origin import Answer, photo

from penstock.fetch import FetchConfig
from penstock.fetch.model import RunState

HEAD = "id,name,price,photos\n"
pytestmark = pytest.mark.slow


def row(shop, item: str, name: str, *paths: str) -> str:
    return f"{item},{name},5,{'|'.join(shop.origin.url(path) for path in paths)}\n"


@pytest.mark.usefixtures("worker")
async def test_a_failed_photo_of_an_unchanged_item_is_asked_until_it_comes(shop):
    text = HEAD + row(shop, "a", "A", "/photo/ok", "/late.jpg") + row(shop, "b", "B", "/photo/b")
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    await shop.run_to_end(text)
    assert shop.told() == [("publish", "a", 1), ("publish", "b", 1)]
    still = await shop.run_to_end(text)
    assert (still.changed, still.unchanged, still.photos) == (0, 2, 1)
    assert still.photos_by_outcome == {"failed:http_404": 1}
    assert shop.told() == []
    assert (await shop.fetch.item("shop", "a")).version == 1
    shop.origin.answers["/late.jpg"] = [Answer(200, photo("late"))]
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
async def test_a_broken_link_with_a_good_copy_is_left_alone(shop):
    await shop.run_to_end(HEAD + row(shop, "a", "A", "/photo/1"))
    shop.origin.answers["/photo/1"] = [Answer(410)]
    text = HEAD + row(shop, "a", "A", "/photo/1", "/photo/2")
    await shop.run_to_end(text)
    assert (await shop.run_to_end(text)).photos == 0
    assert shop.origin.requests("/photo/1") == [200, 410]


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
    why = await closed.fetch.why(shop.origin.url("/photo/1"))
    assert not why.allowed
    assert "fetch.allow_networks" in why.judgement
    assert (await shop.fetch.why(shop.origin.url("/photo/1"))).allowed
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
    again = await shop.run(text)
    assert (again.state, again.photos, again.items_pending) == (RunState.APPLIED, 1, 1)
    beside = await shop.run(text)
    assert (beside.state, beside.photos) == (RunState.DONE, 0), "one run asks it already"
    changed = await shop.run(text.replace("a,A", "a,A2"))
    async with process():
        again, changed = await shop.wait_done(again), await shop.wait_done(changed)
    assert (again.changed, again.unchanged) == (0, 1)
    results = [(r.action, r.version, r.photos[0].outcome) for r in await shop.fetch.results()]
    assert results == [("publish", 1, "failed:http_404"), ("edit", 2, "stored")]
    assert sum(again.photos_by_outcome.values()) == sum(changed.photos_by_outcome.values()) == 1


@pytest.mark.usefixtures("worker")
async def test_a_dry_run_counts_the_photos_of_the_real_one(shop):
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    old = row(shop, "a", "A", "/late.jpg", "/photo/1")
    await shop.run_to_end(HEAD + old)
    new = f"b,B,5,{shop.origin.url('/photo/1')}|{shop.origin.url('/photo/2')}|ftp://x/y.jpg\n"
    dry = await shop.run(HEAD + old + new, is_dry_run=True)
    assert (dry.state, dry.photos, dry.photos_pending) == (RunState.DRY, 4, 3)
    assert dry.photos_by_outcome == {"refused:scheme": 1}
    assert shop.origin.requests("/late.jpg") == [404]
    real = await shop.run_to_end(HEAD + old + new)
    assert real.photos == dry.photos
    assert real.photos_by_outcome == {
        "failed:http_404": 1,
        "refused:scheme": 1,
        "stored": 1,
        "unchanged": 1,
    }
