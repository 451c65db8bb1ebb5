"""Held runs.

What holds a catalogue, what a held run says it would change, and in which order they are confirmed.
"""

from __future__ import annotations

import asyncio
import gzip

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch.catalogues import Order
from headrace.fetch.errors import RunNotHeld
from headrace.fetch.model import RunState, SentItem

HEAD = "id,name,price,photos\n"
BAD_ID = "\u200bhidden,Bad,5,\n"
LEFT = compile_query(
    "left",
    "-- What held and superseded runs leave of links to ask.\n"
    "SELECT count(*) FROM headrace.fetch_need",
)
STAGED = compile_query(
    "staged",
    "-- Runs with staged rows.\nSELECT count(DISTINCT run_id) FROM headrace.fetch_staged",
)
WAITING = compile_query(
    "waiting",
    "-- Statements that wait for another transaction.\nSELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'",
)
PROCESS_DIED = compile_query(
    "process_died",
    "-- As a process leaves a run that it compared and did not end.\n"
    "UPDATE headrace.fetch_run SET state = 'reading', ended_at = NULL WHERE id = :run_id",
)


def rows(count: int, start: int = 0) -> str:
    return "".join(f"i{n:02},Item {n},5,\n" for n in range(start, start + count))


def kinds(changes) -> list[tuple[str, str]]:
    return [(change.item, change.kind) for change in changes]


async def test_a_held_run_says_what_it_would_change_and_confirming_compares_anew(shop):
    await shop.run(HEAD + rows(30))
    link = shop.origin.url("/photo/1")
    held = await shop.run(f"{HEAD}i00,Other,5,{link}\ni01,Item 1,5,\n,No id,5,\n")
    assert held.state is RunState.HELD
    assert (held.rows, held.new, held.changed, held.unchanged, held.invalid) == (3, 0, 1, 1, 1)
    assert (held.gone, held.photos, held.photos_pending) == (28, 1, 1)
    found = await shop.fetch.runs.changes(held.run)
    assert kinds(found)[:2] == [("i00", "changed"), ("i02", "gone")]
    assert found[0].fields == ["name", "photos"]
    assert await shop.postgres.value(LEFT) == 0
    # What is sent meanwhile is newer: of two items the run now says nothing.
    for item in ("i00", "i02"):
        await shop.fetch.send_items([SentItem(customer="shop", item=item, fields={"name": "New"})])
    applied = await shop.fetch.runs.confirm(held.run)
    assert (applied.changed, applied.unchanged, applied.gone) == (0, 2, 27)
    assert ("i02", "gone") not in kinds(await shop.fetch.runs.changes(held.run))
    assert (await shop.fetch.items.get("shop", "i00")).fields["name"] == "New"


async def test_a_held_runs_photos_are_counted_once(shop, worker):
    refused = "http://10.0.0.1/a.jpg"
    await shop.run_to_end(HEAD + rows(30))
    held = await shop.run(f"{HEAD}i00,Item 0,5,{shop.origin.url('/photo/1')}|{refused}\n")
    assert (held.photos, held.photos_pending) == (2, 1)
    assert held.photos_by_outcome == {"refused:forbidden_address": 1}
    done = await shop.wait_done(await shop.fetch.runs.confirm(held.run))
    assert done.photos_by_outcome == {"refused:forbidden_address": 1, "stored": 1}
    assert (done.photos, done.photos_pending) == (2, 0)


async def test_the_command_shows_what_a_held_run_would_change(shop, command):
    await shop.run(HEAD + rows(20))
    held = await shop.run(HEAD + rows(1, 50))
    code, text = await command("catalogue", "diff", str(held.run))
    assert code == 0
    assert "20 gone, if it is confirmed" in text
    assert "would be requested" in text
    assert "new      i50" in text
    assert "gone     i19" in text


async def test_items_whose_rows_lost_their_ids_are_not_unpublished_unasked(shop):
    await shop.run(HEAD + rows(20))
    alike = await shop.run(HEAD + rows(20) + BAD_ID)
    assert alike.state is RunState.DONE, "no item is missing"
    dry = await shop.run(HEAD + rows(18) + 2 * BAD_ID, is_dry_run=True)
    assert dry.reason.startswith("would be held, unreadable: 2 rows")
    held = await shop.run(HEAD + rows(18) + 2 * BAD_ID)
    assert held.state is RunState.HELD
    assert held.reason.startswith("unreadable: 2 rows have no readable id, and 2 published items")
    assert not (await shop.fetch.items.get("shop", "i19")).is_gone
    await shop.fetch.runs.confirm(held.run)
    assert (await shop.fetch.items.get("shop", "i19")).is_gone
    again = await shop.run(HEAD + rows(17) + 2 * BAD_ID)
    assert (again.state, again.gone) == (RunState.APPLIED, 1), "as many were confirmed"
    assert (await shop.run(HEAD + rows(16) + 3 * BAD_ID)).state is RunState.HELD


async def test_a_later_held_run_takes_the_place_of_the_one_before(shop):
    """A file that comes every hour and is broken leaves one run to look at, and one set of rows."""
    await shop.run(HEAD + rows(30))
    held = [(await shop.run(HEAD + rows(1, n))).run for n in (3, 4, 5)]
    states = [(await shop.fetch.runs.get(run)).state for run in held]
    assert states == [RunState.SUPERSEDED, RunState.SUPERSEDED, RunState.HELD]
    assert await shop.postgres.value(STAGED) == 1
    for run in held[:2]:
        with pytest.raises(RunNotHeld, match="a later run replaced it"):
            await shop.fetch.runs.confirm(run)
    await shop.fetch.runs.confirm(held[2])
    left = [n for n in range(30) if not (await shop.fetch.items.get("shop", f"i{n:02}")).is_gone]
    assert left == [5]
    await shop.run(HEAD + rows(1, 4))
    assert not (await shop.fetch.items.get("shop", "i04")).is_gone, "run again it counts"


async def test_the_held_run_of_another_customer_stays(shop):
    await shop.fetch.customers.set("other", starts_max=10, window_s=1, connections=1)
    await shop.run(HEAD + rows(30))
    held = (await shop.run(HEAD + rows(1))).run
    path = shop.folder / "other.csv"
    path.write_text(HEAD)
    assert (await shop.fetch.run_catalogue(path, "other")).state is RunState.HELD
    assert (await shop.fetch.runs.get(held)).state is RunState.HELD
    await shop.fetch.runs.confirm(held)


async def test_a_run_whose_transaction_is_not_over_yet_is_not_taken_for_dead(shop):
    """As an upload with an Idempotency-Key, which is committed after it let the next reader in."""
    path = shop.folder / "one.csv"
    path.write_text(HEAD + rows(30))
    later = shop.folder / "two.csv"
    later.write_text(HEAD + rows(31))
    async with shop.postgres.transaction() as tx:
        first = await shop.fetch.run_catalogue(path, "shop", tx=tx)
        second = asyncio.create_task(shop.fetch.run_catalogue(later, "shop"))
        await wait_true(lambda: _waits_for_a_lock(shop), what="the second run waits")
        assert not second.done()
    told = await second
    assert (told.new, told.unchanged) == (1, 30), "it was compared with what the first one made"
    assert (await shop.fetch.runs.get(first.run)).state is RunState.APPLIED


async def _waits_for_a_lock(shop):
    return bool(await shop.postgres.value(WAITING))


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_packed_table_that_is_cut_off_is_held_whatever_its_size(shop, is_large):
    await shop.run(HEAD + rows(3))
    text = HEAD + rows(3) + (rows(9000, 10) if is_large else "")
    held = await shop.run(gzip.compress(text.encode())[:-6], name="shop.csv.gz")
    assert (held.state, held.gone) == (RunState.HELD, 0)
    assert held.reason == "truncated: the gzip data ends too early: pack the file again"
    assert held.rows == text.count("\n") - 1


async def test_a_file_read_again_after_its_process_died_is_compared_anew(shop):
    await shop.run(HEAD + rows(30))
    path = shop.folder / "again.csv"
    path.write_text(HEAD + rows(1))
    run = (await shop.fetch.bring_catalogue("shop", shop.origin.url("/again.csv"))).run
    order = Order(customer="shop", file_name="again.csv", run_id=run)
    for _ in range(2):
        await shop.fetch.sources._catalogues.run(path, order)
        held = await shop.fetch.runs.get(run)
        assert (held.state, held.gone) == (RunState.HELD, 29)
        await shop.postgres.run(PROCESS_DIED, run_id=run)


async def test_an_upload_answers_why_it_is_held_in_the_language_of_the_caller(shop, client):
    await shop.run(HEAD + rows(30))
    address = "/v1/fetch/customers/shop/catalogues"
    english = await client.post(address, content=HEAD)
    assert english.json()["reason"] == "empty: no valid row"
    russian = await client.post(f"{address}?lang=ru", content=HEAD + rows(1))
    assert russian.json()["state"] == "held"
    assert russian.json()["reason"].startswith("в файле годных строк: 1,")
    applied = await client.post(f"{address}?lang=ru", content=HEAD + rows(30))
    assert (applied.json()["state"], applied.json()["reason"]) == ("done", None)


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_table_cut_inside_its_last_cell_is_held_where_the_last_one_ended_with_a_line_break(
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
    assert (await shop.run(cut)).state is RunState.HELD, "what was undone does not count"


async def test_a_file_that_is_no_table_leaves_the_line_break_of_the_last_table_known(shop):
    await shop.run("id,name\r\na,A\r\nb,B\r\n\r\n")
    await shop.run('[{"id":"a","name":"A"},{"id":"b","name":"B"}]', name="shop.json")
    assert (await shop.run("id,name\na,A\nb,B\n  ")).state is RunState.DONE
    assert (await shop.run("id,name\na,A\nb,B")).state is RunState.HELD
