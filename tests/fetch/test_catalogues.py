"""Runs on real PostgreSQL: row problems, holding, confirming, dry runs, and what a crash leaves."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import pytest

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.fetch.catalogues import RUNS_AT_ONCE, Catalogues, Order
from headrace.fetch.errors import (
    CatalogueBroken,
    CatalogueTooLarge,
    CustomerUnknown,
    InvalidRate,
    NotACatalogue,
    RunNotHeld,
    RunsBusy,
    RunUnderWay,
    RunUnknown,
)
from headrace.fetch.model import RunState
from headrace.fetch.sql import SQL


def rows(count: int, start: int = 0) -> str:
    return "".join(f"i{n},Item {n},5,\n" for n in range(start, start + count))


HEAD = "id,name,price,photos\n"


async def count(shop, table: str) -> int:
    query = compile_query("count", f"-- Rows of a table.\nSELECT count(*) FROM headrace.{table}")
    return await shop.postgres.value(query)


async def test_each_row_has_one_outcome_and_each_fault_its_words(shop):
    text = HEAD + (
        "ok,Fine,5,\n"
        ",No id,5,\n"
        "bad\u200bid,Invisible,5,\n"
        "noname,,5,\n"
        "price,Price,five,\n"
        "ok,Again,5,\n"
        "short,Short\n"
        "links,Links,1 990.50,http://10.0.0.1/a.jpg|ftp://x/b.jpg|http://127.0.0.1:1/c.jpg\n"
        f"many,Many,5,{'|'.join(shop.origin.url(f'/photo/{n}') for n in range(40))}\n"
    )
    run = await shop.run(text)
    assert (run.rows, run.new, run.invalid, run.unchanged) == (9, 3, 6, 0)
    found = [p for _, p in await shop.fetch.reports.problems(run.run)]
    assert [(p.row, p.item, p.field, p.code) for p in found] == [
        (2, None, "id", "missing"),
        (3, None, "id", "invalid_id"),
        (4, "noname", "name", "missing"),
        (5, "price", "price", "invalid_number"),
        (6, "ok", "id", "duplicate_id"),
        (7, "short", "row", "column_count"),
        (8, "links", "photos[0]", "forbidden_address"),
        (8, "links", "photos[1]", "scheme"),
        (8, "links", "photos[2]", "port"),
        (9, "many", "photos", "too_many_photos"),
    ]
    assert all(p.text and p.line == p.row + 1 for p in found)
    item = await shop.fetch.items.get("shop", "links")
    assert item.fields == {"name": "Links", "price": "1990.50"}
    assert [p.outcome for p in item.photos] == [
        "refused:forbidden_address",
        "refused:scheme",
        "refused:port",
    ]
    assert run.photos == 33
    assert run.photos_pending == 30


async def test_an_invalid_row_leaves_its_item_as_it_was(shop):
    await shop.run(HEAD + "a,A,5,\nb,B,5,\n")
    run = await shop.run(HEAD + "a,,5,\nb,B,5,\n")
    assert (run.gone, run.unchanged, run.invalid) == (0, 1, 1)
    assert (await shop.fetch.items.get("shop", "a")).fields["name"] == "A"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (HEAD, "empty"),
        (HEAD + "i1,,5,\n", "empty"),
        (HEAD + rows(2), "shrunk"),
        (HEAD + rows(20) + 'i20,"Item', "truncated"),
    ],
)
async def test_an_alarming_catalogue_is_held_until_confirmed(shop, text, reason):
    await shop.run(HEAD + rows(20))
    held = await shop.run(text)
    assert held.state is RunState.HELD
    assert held.reason.startswith(reason)
    assert not (await shop.fetch.items.get("shop", "i19")).is_gone
    applied = await shop.fetch.runs.confirm(held.run)
    assert applied.state in (RunState.APPLIED, RunState.DONE)
    is_gone = (await shop.fetch.items.get("shop", "i19")).is_gone
    assert is_gone == (reason != "truncated")
    with pytest.raises(RunNotHeld):
        await shop.fetch.runs.confirm(held.run)


async def test_a_held_run_is_superseded_by_a_good_one(shop):
    await shop.run(HEAD + rows(20))
    held = await shop.run(HEAD + rows(1))
    await shop.run(HEAD + rows(21))
    assert (await shop.fetch.runs.get(held.run)).state is RunState.SUPERSEDED
    with pytest.raises(RunNotHeld):
        await shop.fetch.runs.confirm(held.run)
    assert await count(shop, "fetch_staged") == 0


async def test_a_dry_run_says_what_would_change_and_changes_nothing(shop):
    await shop.run(HEAD + rows(20))
    jobs_before = [q.ready for q in await shop.jobs.queues.all()]
    dry = await shop.run(HEAD + rows(1) + rows(2, 100), is_dry_run=True)
    assert (dry.state, dry.new, dry.gone, dry.unchanged) == (RunState.DRY, 2, 19, 1)
    assert [q.ready for q in await shop.jobs.queues.all()] == jobs_before
    assert not (await shop.fetch.items.get("shop", "i19")).is_gone
    assert await count(shop, "fetch_staged") == 0


async def test_a_broken_file_is_a_refused_run_and_the_next_good_one_works(shop):
    await shop.run(HEAD + rows(5))
    with pytest.raises(CatalogueBroken):
        await shop.run((HEAD + rows(5)).encode() + b"i9,\xff\xff,5,\n")
    last = (await shop.fetch.runs.newest("shop"))[0]
    assert (last.state, last.unchanged) == (RunState.REFUSED, 0)
    assert "line 7" in last.reason
    with pytest.raises(NotACatalogue):
        await shop.run("hello\n")
    assert (await shop.fetch.runs.newest("shop"))[0].run == last.run
    assert (await shop.run(HEAD + rows(5))).unchanged == 5
    assert await count(shop, "fetch_staged") == 0


async def test_a_file_over_the_bound_is_refused(shop):
    object.__setattr__(shop.fetch.config, "catalogue_max_bytes", 100_000)
    with pytest.raises(CatalogueTooLarge, match=r"larger than 97\.66 KB"):
        await shop.run(HEAD + rows(20_000))
    assert (await shop.fetch.runs.newest("shop"))[0].state is RunState.REFUSED


async def test_unknown_names_and_senseless_limits(shop):
    path = shop.folder / "x.csv"
    path.write_text(HEAD + rows(1))
    with pytest.raises(CustomerUnknown, match="headrace fetch customer set nobody"):
        await shop.fetch.run_catalogue(path, "nobody")
    with pytest.raises(RunUnknown):
        await shop.fetch.runs.get(10**9)
    for starts, window, connections in ((0, 60, 1), (1, 0, 1), (1, 60, 0), (10**9, 60, 1)):
        with pytest.raises(InvalidRate):
            await shop.fetch.customers.set(
                "shop", starts_max=starts, window_s=window, connections=connections
            )


async def test_one_catalogue_of_a_customer_is_read_at_a_time(shop, database_url):
    other = Postgres(database_url, PostgresConfig())
    try:
        async with other.session() as session:
            assert await session.value(SQL.try_lock_customer, customer="shop")
            with pytest.raises(RunUnderWay):
                await shop.run(HEAD + rows(1))
        assert (await _when_free(shop)).new == 1
    finally:
        await other.close()


async def _when_free(shop):
    """The server drops a session's lock a moment after its connection was reset."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await shop.run(HEAD + rows(1))
            except RunUnderWay:
                await asyncio.sleep(0)


async def test_a_reading_that_died_is_abandoned_and_its_rows_cleared(shop):
    await shop.run(HEAD + rows(3))
    dead = await shop.postgres.value(
        SQL.insert_run, customer="shop", file_name="dead.csv", format="csv", is_whole=True
    )
    await shop.postgres.all(
        SQL.stage_rows,
        run_id=dead,
        items=["x"],
        hashes=[b"x"],
        raw_hashes=[None],
        fields=["{}"],
        photos=[""],
        refused=["{}"],
    )
    await shop.run(HEAD + rows(3))
    assert (await shop.fetch.runs.get(dead)).state is RunState.ABANDONED
    assert await count(shop, "fetch_staged") == 0


FAIL_AT_THE_END = """
CREATE FUNCTION fail_at_the_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the disk is full'; END $$;
CREATE TRIGGER fail_at_the_end BEFORE UPDATE ON headrace.fetch_run FOR EACH ROW
WHEN (NEW.state IN ('applied', 'done')) EXECUTE FUNCTION fail_at_the_end();
"""


async def test_a_run_that_fails_after_enqueueing_changes_nothing(shop):
    """The last step of the one transaction fails: items, changes and jobs are all taken back."""
    text = HEAD + f"a,A,5,{shop.origin.url('/photo/1')}\nb,B,5,\n"
    async with shop.postgres.session() as session:
        await session.connection.execute(FAIL_AT_THE_END)
        with pytest.raises(Exception, match="the disk is full"):
            await shop.run(text)
        await session.connection.execute("DROP TRIGGER fail_at_the_end ON headrace.fetch_run")
    assert await count(shop, "fetch_item") == 0
    assert await count(shop, "fetch_change") == 0
    assert not any(q.ready for q in await shop.jobs.queues.all())
    again = await shop.run(text)
    assert (again.new, again.items_pending) == (2, 2)


async def test_many_customers_run_catalogues_at_once(shop):
    names = [f"c{n}" for n in range(14)]
    for name in names:
        await shop.fetch.customers.set(name, starts_max=10, window_s=1, connections=1)
    path = shop.folder / "many.csv"
    path.write_text(HEAD + rows(300))
    runs = await asyncio.gather(*(shop.fetch.run_catalogue(path, name) for name in names))
    assert [(run.customer, run.new) for run in runs] == [(name, 300) for name in names]


async def test_a_run_whose_turn_does_not_come_is_told_when_to_come_again(shop):
    path = shop.folder / "x.csv"
    path.write_text(HEAD + rows(1))
    line = Catalogues(
        shop.postgres,
        shop.fetch.config,
        applying=None,
        sampling=None,
        current_rules=None,
        wait_s_max=0.2,
    )
    async with AsyncExitStack() as permits:
        for n in range(RUNS_AT_ONCE):
            await permits.enter_async_context(line.permit(f"c{n}"))
        with pytest.raises(RunsBusy, match="customer 'shop'") as caught:
            await line.run(path, Order(customer="shop", file_name="x.csv"))
        assert caught.value.retry_after_s
        assert await shop.fetch.runs.newest() == []
    assert (await shop.run(HEAD + rows(1))).new == 1


async def test_a_fifo_is_refused_and_not_waited_for(shop):
    path = shop.folder / "fifo.csv"
    os.mkfifo(path)
    with pytest.raises(NotACatalogue, match="not a regular file"):
        await asyncio.wait_for(shop.fetch.run_catalogue(path, "shop"), 60)


@pytest.mark.slow
async def test_twenty_thousand_items_diff_in_seconds(shop):
    text = HEAD + rows(20_000)
    first = await asyncio.wait_for(shop.run(text), 60)
    assert first.new == 20_000
    changed = text.replace("Item 77,", "Item seventy-seven,")
    second = await asyncio.wait_for(shop.run(changed), 60)
    assert (second.changed, second.unchanged) == (1, 19_999)
