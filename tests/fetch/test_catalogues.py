"""Runs of catalogues: row problems, dry runs, locks, crashes, and the staging of rows."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import AsyncExitStack

import pytest
from room import HEAD, rows

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.fetch.catalogues import RUNS_AT_ONCE, Catalogues, Order
from headrace.fetch.errors import (
    CatalogueBroken,
    NotACatalogue,
    RunsBusy,
    RunUnderWay,
)
from headrace.fetch.guard import Policy
from headrace.fetch.model import RunState
from headrace.fetch.readers import Fault, RawRow, Truncated
from headrace.fetch.schemas import FieldRule, Schema
from headrace.fetch.sql import SQL
from headrace.fetch.validation import BYTES_AT_ONCE, ROWS_AT_ONCE, Rules, Staging, read_raw


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


async def test_faults_of_a_customers_newest_run_stay_while_others_import(shop):
    broken = await shop.run(f"{HEAD}a,A,5,ftp://x/a.jpg\nb,B,5,http://10.0.0.1/b.jpg\n")
    for other in ("other0", "other1"):
        await shop.fetch.customers.set(other, starts_max=10, window_s=1, connections=1)
        await shop.run(HEAD + rows(1), customer=other)
    [found] = await shop.fetch.lookup.faulty_runs()
    assert (found.run, found.photos_by_outcome) == (
        broken.run,
        {"refused:forbidden_address": 1, "refused:scheme": 1},
    )
    await shop.run(HEAD + rows(1))
    assert await shop.fetch.lookup.faulty_runs() == []


async def test_a_dry_run_creates_no_job_and_the_last_five_are_kept(shop):
    await shop.run(HEAD + rows(20))
    jobs_before = [q.ready for q in await shop.jobs.queues.all()]
    changes_before = await shop.count("fetch_change")
    dry = [
        (await shop.run(HEAD + rows(n), is_dry_run=True, is_sampled=False)).run for n in range(1, 8)
    ]
    assert [q.ready for q in await shop.jobs.queues.all()] == jobs_before
    newest = await shop.fetch.runs.newest("shop")
    assert [run.run for run in newest if run.state is RunState.DRY] == dry[:1:-1]
    assert await shop.count("fetch_change") - changes_before == sum(20 - n for n in range(3, 8))
    assert await shop.count("fetch_staged") == 0


async def test_a_change_names_the_fields_that_differ(shop):
    await shop.run(f"{HEAD}a,A,5,\nb,B,5,http://x.example/1.jpg\nc,C,5,\nd,D,5,\n")
    text = f"{HEAD}a,A2,6,\nb,B,5,http://x.example/2.jpg\nd,D,5.00,\ne,E,5,\n"
    run = await shop.run(text)
    found = await shop.fetch.runs.changes(run.run)
    assert [(change.item, change.kind, change.fields) for change in found] == [
        ("a", "changed", ["name", "price"]),
        ("b", "changed", ["photos"]),
        ("c", "gone", []),
        ("d", "changed", ["price"]),
        ("e", "new", []),
    ]
    page = await shop.fetch.runs.changes(run.run, after="b", rows_max=2)
    assert [change.item for change in page] == ["c", "d"]


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
    assert await shop.count("fetch_staged") == 0


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
    assert await shop.count("fetch_staged") == 0


async def test_many_customers_run_catalogues_at_once(shop):
    names = [f"c{n}" for n in range(14)]
    for name in names:
        await shop.fetch.customers.set(name, starts_max=10, window_s=1, connections=1)
    path = shop.folder / "many.csv"
    path.write_text(HEAD + rows(300))
    runs = await asyncio.gather(*(shop.fetch.run_catalogue(path, name) for name in names))
    assert [(run.customer, run.new) for run in runs] == [(name, 300) for name in names]


async def test_a_run_without_a_permit_is_refused_with_a_retry_time(shop):
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


# Staging

RULES = b"rules"


def row(item: str, number: int = 1, **values) -> RawRow:
    return RawRow(number, number, {"id": item, "name": "N", **values})


def hashes_of(*rows: RawRow) -> list[bytes | None]:
    return read_raw(iter(rows), RULES).hashes


def test_a_row_is_hashed_by_its_content_if_an_item_can_be_made_of_it():
    first, second = hashes_of(row("a", 1)), hashes_of(row("b", 1), row("a", 7))
    assert first[0] == second[1]
    others = hashes_of(row("a", name="M"), row("b")) + read_raw(iter([row("a")]), b"other").hashes
    photos = row("a")
    photos.photos = ["http://x.example/1.jpg"]
    assert first[0] not in (*others, *hashes_of(photos))
    faulty = RawRow(1, 1, {"id": "a"}, fault=Fault("row", "column_count"))
    bad = (faulty, row("bad\u200bid"), row(""), row("c", name="\ud800"))
    assert hashes_of(*bad) == [None] * 4
    assert hashes_of(faulty, row("a")) == [None, None], "only the first row of an id counts"
    assert hashes_of(row("a"), row("a")) == [first[0], None]


def test_a_chunk_ends_by_rows_by_bytes_and_with_the_file():
    many = iter([row(f"i{n}") for n in range(ROWS_AT_ONCE + 1)])
    assert [(len(c.rows), c.is_last) for c in (read_raw(many, RULES), read_raw(many, RULES))] == [
        (ROWS_AT_ONCE, False),
        (1, True),
    ]
    large = iter([row(f"i{n}", text="x" * (BYTES_AT_ONCE // 4)) for n in range(5)])
    assert [(len(c.rows), c.is_last) for c in (read_raw(large, RULES), read_raw(large, RULES))] == [
        (4, False),
        (1, True),
    ]

    def cut():
        yield row("a")
        raise Truncated("line 3: cut")

    found = read_raw(cut(), RULES)
    assert (len(found.rows), found.is_last, str(found.truncated)) == (1, True, "line 3: cut")


@pytest.mark.slow
async def test_of_rows_of_one_id_far_apart_the_first_counts(shop):
    for name in ("Another", "Item 0"):
        run = await shop.run(f"{HEAD}{rows(ROWS_AT_ONCE + 10)}i000,{name},5,\n")
        (problem,) = [p for _, p in await shop.fetch.reports.problems(run.run)]
        assert (problem.code, problem.row, run.invalid) == ("duplicate_id", ROWS_AT_ONCE + 11, 1)
        assert (await shop.fetch.items.get("shop", "i000")).fields["name"] == "Item 0"


async def test_a_read_ahead_fault_is_retrieved_if_the_chunk_before_fails(caplog):
    """The next chunk is read while one is stored.

    Where both fail the first is raised, and the other is no loose end.
    """

    def rows():
        for number in range(1, ROWS_AT_ONCE + 1):
            yield RawRow(number, number, {"id": f"a{number}"})
        raise ValueError("the file is broken here")

    postgres = Postgres("postgresql://127.0.0.1:1/none", PostgresConfig(connect_timeout_s=1))
    with pytest.raises(PostgresDown):
        await Staging(postgres, 1, "shop", Rules(Policy())).read(rows())
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_rows_are_judged_again_when_the_rules_change(shop):
    async def hashed() -> int:
        return (await shop.sql("SELECT count(raw_hash) FROM #fetch_item"))[0][0]

    text = f"{HEAD}a,A,5,\nb,B,50,\n"
    await shop.run(text)
    assert await hashed() == 2
    assert (await shop.run(text)).unchanged == 2
    strict_price = Schema(fields={"price": FieldRule(type="price", most=10)})
    await shop.fetch.schemas.set("default", strict_price)
    strict = await shop.run(text)
    assert (strict.unchanged, strict.invalid, strict.gone) == (1, 1, 0)
    await shop.fetch.schemas.remove("default")
    again = await shop.run(text)
    assert (again.unchanged, again.invalid, await hashed()) == (2, 0, 2)
    for _ in range(3):
        run = await shop.run(f"{HEAD}a,A,5,ftp://x/y.jpg\nb,B,5,\n")
        assert await shop.problems(run) == [("a", "photos[0]", "scheme")]
    assert await hashed() == 1, "a row with a fault is judged in every run"
