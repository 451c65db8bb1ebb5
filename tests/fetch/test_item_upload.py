"""Uploaded items: the same diff for these alone, beside catalogues of the same customer."""

from __future__ import annotations

import asyncio

import pytest

from headrace.fetch.errors import CustomerUnknown, InvalidItems
from headrace.fetch.model import RunState, SentItem

HEAD = "id,name,price,photos\n"


def sent(item: str, *photos: str, customer: str = "shop", **options) -> SentItem:
    return SentItem(customer=customer, item=item, photos=list(photos), **options)


async def send(shop, *items: SentItem):
    (run,) = await shop.fetch.send_items(items)
    return run


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_new_lists_of_photos_are_asked_and_known_ones_are_not(shop):
    one, two = shop.origin.url("/photo/1"), shop.origin.url("/photo/2")
    run = await send(shop, sent("a", one, two), sent("b", fields={"name": "B", "price": 5}))
    assert (run.format, run.rows, run.new, run.photos_pending) == ("items", 2, 2, 2)
    await shop.wait_done(run)
    assert shop.told() == [("publish", "a", 1), ("publish", "b", 1)]
    assert (await shop.fetch.items.get("shop", "b")).fields == {"name": "B", "price": "5"}
    same = await shop.wait_done(await send(shop, sent("a", one, two)))
    assert (same.state, same.unchanged, same.photos) == (RunState.DONE, 1, 0)
    assert shop.told() == []
    other = await shop.wait_done(await send(shop, sent("a", two, one)))
    assert other.changed == 1
    assert shop.told() == [("edit", "a", 2)]
    assert shop.origin.requests("/photo/1") == [200, 304]
    gone = await send(shop, sent("a", gone=True), sent("never", gone=True))
    assert (gone.gone, gone.unchanged, gone.rows) == (1, 1, 2)
    await shop.wait_done(gone)
    assert shop.told() == [("unpublish", "a", 3)]


async def test_an_item_without_fields_keeps_those_it_has(shop):
    await shop.run(f"{HEAD}a,A,5,http://x.example/1.jpg\n")
    run = await send(shop, sent("a", "http://x.example/2.jpg"))
    assert run.changed == 1
    (change,) = await shop.fetch.runs.changes(run.run)
    assert (change.item, change.kind, change.fields) == ("a", "changed", ["photos"])
    found = await shop.fetch.items.get("shop", "a")
    assert found.fields == {"name": "A", "price": "5"}
    assert [photo.url for photo in found.photos] == ["http://x.example/2.jpg"]


async def test_a_faulty_item_is_told_and_left_as_it_was(shop):
    await send(shop, sent("a", fields={"name": "A"}), sent("b", fields={"name": "B"}))
    run = await send(
        shop,
        sent("a", fields={"name": ""}),
        sent("b", "ftp://x/y.jpg", fields={"name": "B2"}),
        sent("bad\u200bid", fields={"name": "C"}),
    )
    assert (run.rows, run.invalid, run.changed, run.gone) == (3, 2, 1, 0)
    problems = [(p.row, p.item, p.code) for _, p in await shop.fetch.reports.problems(run.run)]
    assert problems == [(1, "a", "missing"), (2, "b", "scheme"), (3, None, "invalid_id")]
    assert (await shop.fetch.items.get("shop", "a")).fields == {"name": "A"}
    assert (await shop.fetch.items.get("shop", "b")).photos[0].outcome == "refused:scheme"


async def test_each_customer_has_a_run_and_all_are_taken_or_none(shop):
    await shop.fetch.customers.set("other", starts_max=10, window_s=1, connections=1)
    runs = await shop.fetch.send_items([sent("a"), sent("a", customer="other"), sent("b")])
    assert [(run.customer, run.new) for run in runs] == [("other", 1), ("shop", 2)]
    with pytest.raises(CustomerUnknown):
        await shop.fetch.send_items([sent("c"), sent("c", customer="nobody")])
    for items in ([], [sent(f"i{n}") for n in range(1001)], [sent("c"), sent("c", gone=True)]):
        with pytest.raises(InvalidItems):
            await shop.fetch.send_items(items)
    assert len(await shop.fetch.runs.newest()) == 2


async def test_a_catalogue_rules_over_what_was_sent_before_it(shop):
    await send(shop, sent("a", fields={"name": "A"}), sent("b", fields={"name": "B"}))
    run = await shop.run(f"{HEAD}a,Another,5,\n")
    assert (run.changed, run.gone) == (1, 1)
    assert (await shop.fetch.items.get("shop", "b")).is_gone
    back = await send(shop, sent("b", fields={"name": "B"}))
    assert back.new == 1
    assert (await shop.fetch.items.get("shop", "b")).version == 3


async def test_what_was_sent_after_a_held_catalogue_holds_when_that_is_confirmed(shop):
    rows = "".join(f"i{n},Item {n},5,\n" for n in range(20))
    await shop.run(HEAD + rows)
    held = await shop.run(f"{HEAD}i0,Changed,5,\n")
    assert held.state is RunState.HELD
    await send(shop, sent("i0", fields={"name": "Sent"}), sent("i1"), sent("new"))
    confirmed = await shop.fetch.runs.confirm(held.run)
    assert (confirmed.changed, confirmed.gone) == (0, 18)
    for item in ("i0", "i1", "new"):
        assert not (await shop.fetch.items.get("shop", item)).is_gone
    assert (await shop.fetch.items.get("shop", "i0")).fields["name"] == "Sent"


@pytest.mark.slow
async def test_many_callers_at_once_lose_nothing(shop):
    calls = [
        shop.fetch.send_items([sent(f"i{n % 7}", fields={"name": f"N{n}"}), sent(f"own{n}")])
        for n in range(30)
    ]
    runs = [run for found in await asyncio.gather(*calls) for run in found]
    assert sum(run.new for run in runs) == 37
    assert sum(run.changed for run in runs) == 23
    versions = [(await shop.fetch.items.get("shop", f"i{n}")).version for n in range(7)]
    assert sum(versions) == 30


async def test_through_http_once_whatever_is_sent_again(client, shop):
    body = [{"customer": "shop", "item": "a", "photos": ["http://x.example/1.jpg"]}]
    key = {"Idempotency-Key": "one"}
    first = await client.post("/v1/fetch/items", json=body, headers=key)
    again = await client.post("/v1/fetch/items", json=body, headers=key)
    assert first.status_code == again.status_code == 202, first.text
    assert first.json() == again.json()
    assert again.headers["idempotency-replayed"] == "true"
    (run,) = first.json()["runs"]
    assert (run["format"], run["new"]) == ("items", 1)
    found = (await client.get("/v1/fetch/runs?customer=shop")).json()["runs"]
    assert [one["run"] for one in found] == [run["run"]]
    changes = (await client.get(f"/v1/fetch/runs/{run['run']}/changes")).json()
    assert changes == {
        "changes": [{"item": "a", "kind": "new", "version": 1, "fields": []}],
        "next_after": None,
    }


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ([], 422),
        ([{"customer": "shop"}], 422),
        ([{"customer": "shop", "item": "a", "photos": "x"}], 422),
        ([{"customer": "shop", "item": "a", "typo": 1}], 422),
        ([{"customer": "shop", "item": "a", "fields": {"x": [1]}}], 422),
        ([{"customer": "nobody", "item": "a"}], 404),
        ([{"customer": "no body", "item": "a"}], 404),
        ([{"customer": "shop", "item": "a"}] * 2, 422),
        ([{"customer": "shop", "item": f"i{n}"} for n in range(1001)], 422),
    ],
)
async def test_bad_items_are_refused_and_the_next_good_call_works(client, shop, body, status):
    answer = await client.post("/v1/fetch/items", json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert await shop.fetch.runs.newest() == []
    good = await client.post("/v1/fetch/items", json=[{"customer": "shop", "item": "a\u200bb"}])
    assert good.status_code == 202
    assert good.json()["runs"][0]["invalid"] == 1


async def test_through_commands(command, shop):
    file = shop.folder / "items.json"
    file.write_text(
        '[{"customer": "shop", "item": "a", "photos": ["http://x.example/1.jpg"],'
        ' "fields": {"name": "A"}}]'
    )
    code, told = await command("item", "send", str(file))
    assert code == 0
    assert "1 rows of items: 1 new" in told
    code, told = await command("item", "show", "shop", "a")
    assert told.splitlines() == [
        "a of shop: version 1, run 1",
        "  name: A",
        "  photo http://x.example/1.jpg: refused:port",
    ]
    file.write_text('[{"customer": "shop"}]')
    assert (await command("item", "send", str(file)))[0] == "fetch.invalid_items"
    assert (await command("item", "show", "shop", "b"))[0] == "fetch.item_unknown"
