"""Supplemental feeds: overlays by id, beside catalogues, from files and from URLs."""

from __future__ import annotations

import pytest
from origin import Answer
from room import HEAD, rows

from headrace.fetch import store
from headrace.fetch.errors import RunNotHeld, RunNotUndoable
from headrace.fetch.model import RunState

CATALOGUE = f"{HEAD}a,A,5,\nb,B,6,\nc,C,7,\n"


async def overlay(shop, text: str, **options):
    return await shop.run(text, is_supplemental=True, **options)


async def fields(shop, item: str) -> dict[str, str]:
    found = dict((await shop.fetch.items.get("shop", item)).fields)
    del found["name"]
    return found


@pytest.mark.usefixtures("worker")
async def test_an_overlay_wins_until_the_feed_drops_the_id(shop):
    await shop.run_to_end(CATALOGUE)
    shop.published()
    run = await shop.wait_done(
        await overlay(shop, "id,price,stock,name\na,4.50 EUR,3,No\nb,6,,\nzz,1,,\n")
    )
    assert (run.format, run.rows, run.new, run.changed) == ("supplemental", 3, 0, 1)
    assert (run.unchanged, run.invalid, run.gone) == (2, 0, 0)
    assert await shop.problems(run) == [("zz", "id", "unknown_item")]
    [change] = await shop.fetch.runs.changes(run.run)
    assert (change.item, change.kind, change.fields) == (
        "a",
        "changed",
        ["currency", "price", "stock"],
    )
    [published] = shop.items
    assert published.fields == {"name": "A", "price": "4.50", "currency": "EUR", "stock": "3"}
    assert shop.published() == [("edit", "a", 2)]

    again = await overlay(shop, "id,price,stock\na,4.50 EUR,3\nb,6,\nzz,1,\n")
    assert (again.state, again.changed, again.unchanged) == (RunState.DONE, 0, 3)

    # The catalogue changes the name and the price of `a`; it also lists `zz`, and no longer `b`.
    await shop.run_to_end(f"{HEAD}a,New,9,\nc,C,7,\nzz,Z,2,\n")
    assert {item.id: item.fields.get("price") for item in shop.items} == {
        "a": "4.50",
        "b": "6",
        "zz": "1",
    }
    assert shop.published() == [("edit", "a", 3), ("publish", "zz", 1), ("unpublish", "b", 2)]
    item = await shop.fetch.items.get("shop", "a")
    assert item.fields == {"name": "New", "price": "4.50", "currency": "EUR", "stock": "3"}
    assert item.supplemental == {"price": "4.50", "currency": "EUR", "stock": "3"}

    run = await shop.wait_done(await overlay(shop, "id,price\nzz,1\n"))
    assert (run.changed, run.gone, run.unchanged) == (0, 1, 1)
    assert await fields(shop, "a") == {"price": "9"}
    assert shop.published() == [("edit", "a", 4)]


async def test_bad_rows_leave_their_items_as_they_are(shop):
    await shop.run(CATALOGUE)
    await overlay(shop, "id,price\na,4\nb,4\n")
    run = await overlay(
        shop, "id,price,stock\na,cheap,1\nb,4,-1\nc,,\nc,3,\n,2,\nb,5,\n\u200bd,1,\nzz,1,\n"
    )
    assert run.state is RunState.DONE, run.reason
    assert await shop.problems(run) == [
        ("a", "price", "invalid_number"),
        ("b", "stock", "too_small"),
        ("c", "row", "nothing_supplemental"),
        ("c", "id", "duplicate_id"),
        (None, "id", "missing"),
        ("b", "id", "duplicate_id"),
        (None, "id", "invalid_id"),
        ("zz", "id", "unknown_item"),
    ]
    assert (run.rows, run.invalid, run.changed, run.unchanged) == (8, 7, 0, 1)
    assert [await fields(shop, item) for item in "abc"] == [
        {"price": "4"},
        {"price": "4"},
        {"price": "7"},
    ]
    assert not (await shop.fetch.items.get("shop", "c")).is_gone
    with pytest.raises(RunNotUndoable, match="supplemental feed"):
        await shop.fetch.runs.undo(run.run)


async def test_a_feed_that_looks_wrong_is_held_beside_a_held_catalogue(shop):
    await shop.run(HEAD + rows(100))
    feed = "id,price\n" + "".join(f"i{n:03},1\n" for n in range(60))
    await overlay(shop, feed)
    catalogue = await shop.run(HEAD + rows(5))
    assert catalogue.state is RunState.HELD
    for text, reason in (
        ("id,price\n", "empty: no valid row"),
        (feed[: 9 + 17 * 7], "dropped: 43 of 60 items are in no row"),
        (feed + '"i0', "truncated: line 62"),
    ):
        dry = await overlay(shop, text, is_dry_run=True)
        assert dry.reason.startswith(f"would be held, {reason}"), dry.reason
        held = await overlay(shop, text)
        assert (held.state, held.reason[: len(reason)]) == (RunState.HELD, reason)
    assert (await shop.fetch.items.get("shop", "i059")).fields["price"] == "1"
    assert (await shop.fetch.runs.get(catalogue.run)).state is RunState.HELD
    empty = await overlay(shop, "id,price\n")
    done = await shop.fetch.runs.confirm(empty.run)
    assert (done.gone, done.changed) == (60, 0)
    assert (await shop.fetch.items.get("shop", "i059")).fields["price"] == "5"
    with pytest.raises(RunNotHeld):
        await shop.fetch.runs.confirm(held.run)
    assert (await shop.fetch.runs.confirm(catalogue.run)).gone == 95


@pytest.mark.usefixtures("worker")
async def test_an_item_whose_photo_is_not_there_yet_is_published_with_it(shop):
    link = shop.origin.url("/photo/1")
    first = await shop.run(f"{HEAD}a,A,5,{link}\n")
    second = await overlay(shop, "id,price\na,4\n")
    await shop.wait_done(first)
    await shop.wait_done(second)
    newest = shop.items[-1]
    assert (newest.version, newest.fields["price"]) == (2, "4")
    assert [photo.outcome for photo in newest.photos] in (["stored"], ["unchanged"])
    twice = await store.outcomes.item_photos(shop.postgres, [("shop", "a")] * 2)
    assert len(twice["shop", "a"]) == 1, "a batch may publish an item for two runs"


async def test_over_http_and_on_the_command_line(shop, client, command, tmp_path):
    await shop.run(CATALOGUE)
    path = "/v1/fetch/customers/shop/catalogues?supplemental=true"
    answer = await client.post(path, content="артикул;остаток\na;12\n".encode())
    assert (answer.status_code, answer.json()["changed"]) == (202, 1), answer.text
    item = (await client.get("/v1/fetch/customers/shop/item?id=a")).json()
    assert (item["fields"]["stock"], item["supplemental"]) == ("12", {"stock": "12"})
    assert (await client.post(path, content=b"hello")).status_code == 422
    file = tmp_path / "stock.xml"
    file.write_text(
        '<yml_catalog><shop><offers><offer id="b" available="false"/></offers></shop></yml_catalog>'
    )
    words = ("catalogue", "run", str(file), "--customer", "shop", "--supplemental", "--no-wait")
    code, text = await command(*words)
    assert (code, "1 changed" in text, "1 gone" in text) == (0, True, True), text
    _, text = await command("item", "show", "shop", "b")
    assert "available: false (supplemental feed)" in text


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_feed_from_a_url_is_fetched_once(shop, client):
    await shop.run(CATALOGUE)
    url = shop.origin.url("/prices.csv")
    shop.origin.answers["/prices.csv"] = [Answer(200, b"id,price\na,3\n")]
    path = "/v1/fetch/customers/shop/catalogues?supplemental=true"
    refused = await client.post(path, json={"url": url, "cron": "0 0 1 1 *"})
    assert (refused.status_code, "omit `cron`" in refused.text) == (422, True), refused.text
    once = (await client.post(path, json={"url": url})).json()
    await shop.wait_done(await shop.fetch.runs.get(once["run"]))
    assert (await fields(shop, "a"))["price"] == "3"
    assert (await shop.fetch.runs.get(once["run"])).format == "supplemental"
