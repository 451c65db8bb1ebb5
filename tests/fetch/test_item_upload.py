"""Uploaded items: the same diff for these alone, beside catalogues of the same customer."""

from __future__ import annotations

import asyncio

import pytest
from room import HEAD, LIMITS

from headrace.fetch.errors import CustomerUnknown, InvalidItems, ItemUnknown, RunUnknown
from headrace.fetch.model import RunState, SentItem


def sent(item: str, *photos: str, customer: str = "shop", **options) -> SentItem:
    return SentItem(customer=customer, item=item, photos=list(photos), **options)


async def send(shop, *items: SentItem):
    (run,) = await shop.fetch.send_items(items)
    return run


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_changed_lists_of_photos_are_requested_and_known_ones_are_not(shop):
    one, two = shop.origin.url("/photo/1"), shop.origin.url("/photo/2")
    run = await send(shop, sent("a", one, two), sent("b", fields={"name": "B", "price": 5}))
    assert (run.format, run.rows, run.new, run.photos_pending) == ("items", 2, 2, 2)
    await shop.wait_done(run)
    assert shop.published() == [("publish", "a", 1), ("publish", "b", 1)]
    assert (await shop.fetch.items.get("shop", "b")).fields == {"name": "B", "price": "5"}
    same = await shop.wait_done(await send(shop, sent("a", one, two)))
    assert (same.state, same.unchanged, same.photos) == (RunState.DONE, 1, 0)
    assert shop.published() == []
    other = await shop.wait_done(await send(shop, sent("a", two, one)))
    assert other.changed == 1
    assert shop.published() == [("edit", "a", 2)]
    assert shop.origin.requests("/photo/1") == [200, 304]
    gone = await send(shop, sent("a", gone=True), sent("never", gone=True))
    assert (gone.gone, gone.unchanged, gone.rows) == (1, 1, 2)
    await shop.wait_done(gone)
    assert shop.published() == [("unpublish", "a", 3)]


async def test_a_missing_or_faulty_field_leaves_the_item_as_it_was(shop):
    await shop.run(f"{HEAD}a,A,5,http://x.example/1.jpg\nb,B,5,\n")
    run = await send(shop, sent("a", "http://x.example/2.jpg"))
    (change,) = await shop.fetch.runs.changes(run.run)
    assert (change.item, change.kind, change.fields) == ("a", "changed", ["photos"])
    run = await send(
        shop,
        sent("a", fields={"name": ""}),
        sent("b", "ftp://x/y.jpg", fields={"name": "B2"}),
        sent("bad\u200bid", fields={"name": "C"}),
    )
    assert (run.rows, run.invalid, run.changed, run.gone) == (3, 2, 1, 0)
    problems = [(p.row, p.item, p.code) for _, p in await shop.fetch.reports.problems(run.run)]
    assert problems == [(1, "a", "missing"), (2, "b", "scheme"), (3, None, "invalid_id")]
    first, second = [await shop.fetch.items.get("shop", item) for item in "ab"]
    assert first.fields == {"name": "A", "price": "5"}
    assert [photo.url for photo in first.photos] == ["http://x.example/2.jpg"]
    assert second.photos[0].outcome == "refused:scheme"


async def test_each_customer_has_a_run_and_all_items_are_stored_or_none(shop):
    await shop.fetch.customers.set("other", **LIMITS)
    runs = await shop.fetch.send_items([sent("a"), sent("a", customer="other"), sent("b")])
    assert [(run.customer, run.new) for run in runs] == [("other", 1), ("shop", 2)]
    with pytest.raises(CustomerUnknown):
        await shop.fetch.send_items([sent("c"), sent("c", customer="nobody")])
    for items in ([], [sent(f"i{n}") for n in range(1001)], [sent("c"), sent("c", gone=True)]):
        with pytest.raises(InvalidItems):
            await shop.fetch.send_items(items)
    assert len(await shop.fetch.runs.newest()) == 2


@pytest.mark.slow
async def test_many_callers_at_once_lose_no_item(shop):
    calls = [
        shop.fetch.send_items([sent(f"i{n % 7}", fields={"name": f"N{n}"}), sent(f"own{n}")])
        for n in range(30)
    ]
    runs = [run for found in await asyncio.gather(*calls) for run in found]
    assert sum(run.new for run in runs) == 37
    assert sum(run.changed for run in runs) == 23
    versions = [(await shop.fetch.items.get("shop", f"i{n}")).version for n in range(7)]
    assert sum(versions) == 30


async def test_names_and_items_of_other_types_are_refused(shop):
    fetch = shop.fetch
    calls = [
        (InvalidItems, "expected a list of SentItem, got None", fetch.send_items(None)),
        (InvalidItems, "/0: expected a SentItem", fetch.send_items([{"item": "a"}])),
        (ItemUnknown, "customer '5' has no item", fetch.items.get(5, "a")),
        (ItemUnknown, "has no item '5'", fetch.items.get("shop", 5)),
        (CustomerUnknown, "customer '5' is not known", fetch.customers.get(5)),
        (RunUnknown, "no run has the number a", fetch.runs.get("a")),
    ]
    for error, text, call in calls:
        with pytest.raises(error, match=text):
            await call
