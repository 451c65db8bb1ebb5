"""What a catalogue may remove unconfirmed, files without a proper end, and undo."""

from __future__ import annotations

import asyncio
import gzip

import pytest
from room import HEAD, LIMITS, rows
from tests.kit.waiting import wait_true

from headrace.fetch.catalogues import Order
from headrace.fetch.errors import RunNotHeld, RunNotUndoable
from headrace.fetch.model import RunState

FINE = (RunState.APPLIED, RunState.DONE)
BAD_ID = "\u200bhidden,Bad,5,\n"
HUNDRED = HEAD + rows(100)
WHOLE = HEAD + rows(5)
CUT = gzip.compress((HEAD + rows(9000)).encode())[:-6]
CASES = [
    # (the first catalogue, the second one, how its reason begins, or the items that it removes)
    (HUNDRED, HEAD, "empty: no valid row"),
    (HUNDRED, f"{HEAD}i1,,5,\n", "empty: no valid row"),
    (HUNDRED, HEAD + rows(10), "shrunk: 10 valid rows, but 100 items are published"),
    (HUNDRED, HUNDRED + 'i100,"Item', "truncated: line 102: "),
    (HUNDRED, HEAD + rows(69), "removed: 31 of 100 published items are in no row"),
    (HUNDRED, HEAD + rows(70), 30),
    (HEAD + rows(40), HEAD + rows(19), "removed: 21 of 40"),
    (HEAD + rows(40), HEAD + rows(20), 20),
    (HUNDRED, HEAD + rows(100, 500), "removed: 100 of 100"),
    (WHOLE, CUT, "truncated: the gzip data ends too early: pack the file again"),
    (WHOLE, gzip.compress(WHOLE.encode())[:-9], "truncated: the gzip data ends too early"),
    (WHOLE, f"{WHOLE}i005,It", "truncated: line 7: "),
    (WHOLE, WHOLE.replace(",", "\t") + "i005\tIt", "truncated: line 7: "),
    *((WHOLE, f"{WHOLE}i005,Item 5,5,{end}", 0) for end in ("\n", "\r\n", "\n\n  ")),
    (HEAD + rows(20), HEAD + rows(20) + BAD_ID, 0),
    (
        HEAD + rows(20),
        HEAD + rows(18) + 2 * BAD_ID,
        "unreadable: 2 rows have no readable id, and 2",
    ),
]


async def is_item_gone(shop, item: str, customer: str = "shop") -> bool:
    return (await shop.fetch.items.get(customer, item)).is_gone


async def test_which_catalogues_are_held(shop):
    """A customer each: its held run changes no item, and the runs of others do not close it."""
    held = []
    for number, (before, after, expected) in enumerate(CASES):
        customer = f"c{number}"
        await shop.fetch.customers.set(customer, **LIMITS)
        await shop.run(before, customer=customer)
        run = await shop.run(after, customer=customer)
        if isinstance(expected, int):
            assert (run.state in FINE, run.gone) == (True, expected), run.reason
            continue
        assert (run.state, run.reason[: len(expected)]) == (RunState.HELD, expected)
        assert not await is_item_gone(shop, "i000", customer)
        held.append(run)
    dry = await shop.run(HEAD, customer="c0", is_dry_run=True, is_sampled=False)
    assert dry.reason == "would be held, empty: no valid row"
    for run in held:
        assert (await shop.fetch.runs.confirm(run.run)).gone == run.gone
        with pytest.raises(RunNotHeld):
            await shop.fetch.runs.confirm(run.run)


async def test_as_many_rows_without_an_id_as_were_confirmed_are_not_held(shop):
    await shop.run(HEAD + rows(20))
    held = await shop.run(HEAD + rows(18) + 2 * BAD_ID)
    await shop.fetch.runs.confirm(held.run)
    again = await shop.run(HEAD + rows(17) + 2 * BAD_ID)
    assert (again.state, again.gone) == (RunState.APPLIED, 1)
    assert (await shop.run(HEAD + rows(16) + 3 * BAD_ID)).state is RunState.HELD


async def test_the_limits_are_those_of_the_customer_or_of_the_deployment(shop, client, command):
    await shop.run(HUNDRED)
    await shop.fetch.customers.set("shop", **LIMITS, hold_share=0.01, hold_items=0)
    assert (await shop.run(HEAD + rows(98))).state is RunState.HELD
    kept = await shop.fetch.customers.set("shop", **LIMITS)
    assert (kept.hold_share, kept.hold_items) == (0.01, 0), "omitted limits stay"
    answer = await client.put("/v1/fetch/customers/shop", json={**LIMITS, "hold_share": 1})
    assert answer.json()["hold_share"] == 1
    assert (await shop.run(HEAD + rows(2))).gone == 98, "1 turns the limits off"
    code, text = await command("customer", "set", "shop", "--hold-share", "default")
    assert (code, "share" in text) == (0, False)
    await shop.fetch.customers.set("shop", **LIMITS, hold_items=None)
    object.__setattr__(shop.fetch.config, "hold_share", 0.0)
    object.__setattr__(shop.fetch.config, "hold_items", 0)
    assert (await shop.run(HEAD + rows(1))).state is RunState.HELD
    assert (await shop.run(HEAD)).reason == "empty: no valid row"


async def test_a_held_run_counts_its_photos_once_and_requests_none(shop, worker):
    refused = "http://10.0.0.1/a.jpg"
    await shop.run_to_end(HEAD + rows(30))
    link = shop.origin.url("/photo/1")
    held = await shop.run(f"{HEAD}i000,Item 0,5,{link}|{refused}\n,No id,5,\n")
    assert (held.photos, held.photos_pending, await shop.count("fetch_need")) == (2, 1, 0)
    assert held.photos_by_outcome == {"refused:forbidden_address": 1}
    done = await shop.wait_done(await shop.fetch.runs.confirm(held.run))
    assert done.photos_by_outcome == {"refused:forbidden_address": 1, "stored": 1}
    assert (done.photos, done.photos_pending) == (2, 0)


async def test_a_later_held_run_replaces_the_one_before(shop):
    await shop.run(HEAD + rows(30))
    held = [(await shop.run(HEAD + rows(1, n))).run for n in (3, 4, 5)]
    states = [(await shop.fetch.runs.get(run)).state for run in held]
    assert states == [RunState.SUPERSEDED, RunState.SUPERSEDED, RunState.HELD]
    [[staged]] = await shop.sql("SELECT count(DISTINCT run_id) FROM #fetch_staged")
    assert staged == 1
    with pytest.raises(RunNotHeld, match="a later run replaced it"):
        await shop.fetch.runs.confirm(held[0])
    await shop.fetch.runs.confirm(held[2])
    left = [n for n in range(30) if not await is_item_gone(shop, f"i{n:03}")]
    assert left == [5]


async def test_a_run_whose_transaction_is_open_is_not_abandoned(shop):
    """An upload with an Idempotency-Key commits after it released the next reader."""
    path = shop.folder / "one.csv"
    path.write_text(HEAD + rows(30))

    async def is_waiting() -> bool:
        return bool(
            await shop.sql(
                "SELECT 1 FROM pg_stat_activity"
                " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )

    async with shop.postgres.transaction() as tx:
        first = await shop.fetch.run_catalogue(path, "shop", tx=tx)
        second = asyncio.create_task(shop.run(HEAD + rows(31)))
        await wait_true(is_waiting, what="the second run waits")
        assert not second.done()
    found = await second
    assert (found.new, found.unchanged) == (1, 30), "it was compared with the first one's items"
    assert (await shop.fetch.runs.get(first.run)).state is RunState.APPLIED


async def test_a_file_read_again_after_its_process_died_is_compared_again(shop):
    await shop.run(HEAD + rows(30))
    path = shop.folder / "again.csv"
    path.write_text(HEAD + rows(1))
    run = (await shop.fetch.bring_catalogue("shop", shop.origin.url("/again.csv"))).run
    order = Order(customer="shop", file_name="again.csv", run_id=run)
    for _ in range(2):
        await shop.fetch.sources._catalogues.run(path, order)
        held = await shop.fetch.runs.get(run)
        assert (held.state, held.gone) == (RunState.HELD, 29)
        await shop.sql(
            "UPDATE #fetch_run SET state = 'reading', ended_at = NULL WHERE id = :run", run=run
        )


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_table_cut_in_its_last_cell_is_held_if_the_last_one_had_a_line_break(
    shop, is_packed
):
    def text_of(prices: str) -> bytes:
        text = f"id,name,price\n{prices}".encode()
        return gzip.compress(text) if is_packed else text

    first = await shop.run(text_of("a,A,1990\nb,B,2990"))
    assert first.state is RunState.APPLIED, "many exporters write no final line break"
    await shop.run(text_of("a,A,1990\nb,B,2991"))
    await shop.run(text_of("a,A,1990\nb,B,2990\n"))
    cut = text_of("a,A,1990\nb,B,29")
    dry = await shop.run(cut, is_dry_run=True, is_sampled=False)
    assert dry.reason.startswith("would be held, truncated: line 3: ")
    held = await shop.run(cut)
    assert (held.state, held.changed, held.fault.code) == (RunState.HELD, 1, "truncated_end")
    assert held.reason.startswith("truncated: line 3: the last line has no line break")
    assert "строка 3: в последней строке" in await shop.fetch.reports.page(held.run, lang="ru")
    assert (await shop.fetch.items.get("shop", "b")).fields["price"] == "2990"
    await shop.fetch.runs.confirm(held.run)
    again = await shop.run(text_of("a,A,1990\nb,B,39"))
    assert (again.state, again.changed) == (RunState.APPLIED, 1), "such a file was confirmed"
    await shop.fetch.runs.undo(again.run)
    await shop.fetch.runs.undo(held.run)
    assert (await shop.run(cut)).state is RunState.HELD, "an undone run does not count"


async def test_a_file_that_is_no_table_keeps_the_line_break_of_the_last_table(shop):
    await shop.run("id,name\r\na,A\r\nb,B\r\n\r\n")
    await shop.run('[{"id":"a","name":"A"},{"id":"b","name":"B"}]', name="shop.json")
    assert (await shop.run("id,name\na,A\nb,B\n  ")).state is RunState.DONE
    assert (await shop.run("id,name\na,A\nb,B")).state is RunState.HELD


# Undo


async def content_of(shop) -> dict[str, tuple]:
    """The content of each published item."""
    found = await shop.sql(
        "SELECT item, fields, photos, hash, raw_hash FROM #fetch_item WHERE NOT is_gone"
    )
    return {row["item"]: tuple(row)[1:] for row in found}


async def test_undo_restores_items_as_new_versions_without_a_download(shop, worker):
    one, two = shop.origin.url("/photo/1"), shop.origin.url("/photo/2")
    await shop.run_to_end(HEAD + rows(30, photo=one))
    before = await content_of(shop)
    bad = await shop.run_to_end(HEAD + rows(10) + rows(12, 10, price=6, photo=two) + rows(5, 50))
    assert (bad.new, bad.changed, bad.gone) == (5, 22, 8)
    shop.published()
    requested = shop.origin.requests("/photo/1")
    undo = await shop.wait_done(await shop.fetch.runs.undo(bad.run))
    assert await content_of(shop) == before
    assert (undo.format, undo.rows, undo.new, undo.changed, undo.gone) == ("undo", 35, 8, 22, 5)
    delivered = shop.published()
    assert sorted({action for action, _, _ in delivered}) == ["edit", "publish", "unpublish"]
    assert len(delivered) == 35
    assert all(version == 3 for action, _, version in delivered if action != "unpublish")
    assert (await shop.fetch.items.get("shop", "i000")).photos[0].key is not None
    assert shop.origin.requests("/photo/1") == requested
    assert (await shop.fetch.runs.get(bad.run)).undone_by == undo.run
    same = await shop.run_to_end(HEAD + rows(30, photo=one))
    assert (same.unchanged, same.new, same.changed, same.gone) == (30, 0, 0, 0)


async def test_only_a_run_that_changed_items_can_be_undone(shop):
    first = await shop.run(HEAD + rows(5))
    none = await shop.run(f"{HEAD}{rows(5)}bad,,5,\n")
    assert (none.state in FINE, none.unchanged, none.can_undo) == (True, 5, False)
    with pytest.raises(RunNotUndoable, match=f"run {none.run} .* it changed no items"):
        await shop.fetch.runs.undo(none.run)
    assert (await shop.fetch.runs.get(first.run)).can_undo, (
        "a run without changes is not in its way"
    )
    second = await shop.run(HEAD + rows(5, price=6))
    assert [run.can_undo for run in await shop.fetch.runs.newest("shop")] == [True, False, False]
    with pytest.raises(RunNotUndoable, match=f"run {second.run} was applied since"):
        await shop.fetch.runs.undo(first.run)


async def test_an_undo_before_the_results_are_sent_leaves_none_of_the_run(shop, worker):
    await shop.run_to_end(HEAD + rows(30))
    bad = await shop.run(HEAD + rows(22) + "new,New,5,\n")
    await shop.wait_done(await shop.fetch.runs.undo(bad.run))
    await shop.wait_done(bad)
    results = await shop.fetch.items.results(results_max=1000)
    newest = {result.id: result.action for result in results}
    assert newest.pop("new", "unpublish") == "unpublish"
    assert set(newest.values()) <= {"publish", "edit"}
    assert len(newest) == 30
