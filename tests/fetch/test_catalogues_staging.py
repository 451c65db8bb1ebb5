"""Rows on their way to be compared: which are hashed, where a chunk ends, what is judged again."""

from __future__ import annotations

import gc

import pytest

from headrace.engines.postgres import Postgres, PostgresConfig, PostgresDown
from headrace.engines.sql import compile_query
from headrace.fetch.guard import Policy
from headrace.fetch.readers import Fault, RawRow, Truncated
from headrace.fetch.schemas import FieldRule, Schema
from headrace.fetch.validation import BYTES_AT_ONCE, ROWS_AT_ONCE, Rules, Staging, read_raw

HEAD = "id,name,price,photos\n"
RULES = b"rules"


def row(item: str, number: int = 1, **values) -> RawRow:
    return RawRow(number, number, {"id": item, "name": "N", **values})


def hashes_of(*rows: RawRow) -> list[bytes | None]:
    return read_raw(iter(rows), RULES).hashes


def test_equal_rows_have_equal_hashes_wherever_they_stand():
    first, second = hashes_of(row("a", 1)), hashes_of(row("b", 1), row("a", 7))
    assert first[0] == second[1]
    others = hashes_of(row("a", name="M"), row("b")) + read_raw(iter([row("a")]), b"other").hashes
    assert first[0] not in others
    photos = row("a")
    photos.photos = ["http://x.example/1.jpg"]
    assert hashes_of(photos) != first


def test_rows_that_no_item_can_be_made_of_have_no_hash():
    faulty = RawRow(1, 1, {"id": "a"}, fault=Fault("row", "column_count"))
    assert hashes_of(faulty, row("bad\u200bid"), row(""), row("c", name="\ud800")) == [None] * 4


def test_only_the_first_row_of_an_id_has_a_hash():
    faulty = RawRow(1, 1, {"id": "a"}, fault=Fault("row", "column_count"))
    assert hashes_of(faulty, row("a")) == [None, None]
    first, second = hashes_of(row("a"), row("a"))
    assert first is not None
    assert second is None


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


async def hashed(shop) -> int:
    text = "-- Items whose row is known.\nSELECT count(raw_hash) FROM headrace.fetch_item"
    return await shop.postgres.value(compile_query("hashed", text))


async def test_rows_are_judged_again_when_the_rules_change(shop):
    text = f"{HEAD}a,A,5,\nb,B,50,\n"
    await shop.run(text)
    assert await hashed(shop) == 2
    assert (await shop.run(text)).unchanged == 2
    await shop.fetch.schemas.set(
        "default", Schema(fields={"price": FieldRule(type="price", most=10)})
    )
    strict = await shop.run(text)
    assert (strict.unchanged, strict.invalid, strict.gone) == (1, 1, 0)
    await shop.fetch.schemas.remove("default")
    again = await shop.run(text)
    assert (again.unchanged, again.invalid) == (2, 0)
    assert await hashed(shop) == 2


async def test_a_row_with_a_fault_is_told_in_every_run(shop):
    text = f"{HEAD}a,A,5,ftp://x/y.jpg\nb,B,5,\n"
    for _ in range(3):
        run = await shop.run(text)
        assert [p.code for _, p in await shop.fetch.reports.problems(run.run)] == ["scheme"]
    assert await hashed(shop) == 1


@pytest.mark.slow
async def test_rows_of_one_id_far_apart_are_told_and_the_first_counts(shop):
    rows = "".join(f"i{n},Item {n},5,\n" for n in range(ROWS_AT_ONCE + 10))
    for text in (f"{HEAD}{rows}i0,Another,5,\n", f"{HEAD}{rows}i0,Item 0,5,\n"):
        run = await shop.run(text)
        (problem,) = [p for _, p in await shop.fetch.reports.problems(run.run)]
        assert (problem.code, problem.row, run.invalid) == ("duplicate_id", ROWS_AT_ONCE + 11, 1)
        assert (await shop.fetch.items.get("shop", "i0")).fields["name"] == "Item 0"


async def test_a_fault_that_was_read_ahead_of_a_chunk_that_is_not_stored_is_looked_at(caplog):
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
