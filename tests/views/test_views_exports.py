"""Exports and the feed of changes: each change once, in any order of commits; files; refusals."""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from pyarrow import parquet
from views_surfaces import client_of

from headrace.kernel.errors import HeadraceError
from headrace.views import Hit
from headrace.views import store as views_store
from headrace.views.errors import ChangesOff, InvalidPosition, InvalidSpan, PositionLost
from headrace.views.exports import follow, whole_file
from headrace.views.model import Count, shard_of

KEPT = {"changes_kept_s": 3600.0}
HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


@pytest.fixture
async def flusher(make_flusher):
    """A flusher that records changes."""
    flusher = make_flusher(**KEPT)
    await flusher.run_once()
    return flusher


def fold(found, rows):
    """Add changes to views by id, hour and class."""
    for row in rows:
        if row.traffic == "deleted":
            for key in [key for key in found if key[0] == row.id]:
                del found[key]
        else:
            found[row.id, row.start_at, row.traffic] += row.views
    return found


async def stored(sql):
    rows = await sql("SELECT id, hour, class, views FROM headrace.views_hour")
    names = ("human", "bot", "owner", "staff")
    return {(row["id"], row["hour"], names[row["class"]]): row["views"] for row in rows}


async def read_all(views, position, found, **more):
    """Read pages until one is empty; the position."""
    while True:
        page = await views.exports.changes(position, **more)
        fold(found, page.changes)
        if page.position == position:
            return position
        position = page.position


async def test_changes_add_up_to_hours_through_moves_and_deletions(views, flusher, sql):
    found, position = Counter(), ""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = {"from_at": hour - timedelta(hours=1), "to_at": hour + timedelta(hours=2)}
    for step in range(6):
        await views.hits([*[f"ad:{n}" for n in range(20)], Hit(id="ad:1", n=4, traffic="bot")])
        await flusher.run_once()
        if step == 2:
            move = SimpleNamespace(id="ad:1", **span, source="bot", target="human")
            await views.corrections.move(move)
        if step == 3:
            await views.delete("ad:2")
        position = await read_all(views, position, found, rows_max=1 + step * 7)
    assert found == {key: views for key, views in (await stored(sql)).items() if views} | {
        key: 0 for key in found if not found[key]
    }
    assert sum(views for key, views in found.items() if key[2] == "human") == 19 * 6 + 3 * 4
    assert (await views.exports.changes("now")).position == position


async def test_commits_out_of_order_are_read_once(views, flusher, postgres, sql):
    """A flush of one shard stays open while others commit; the reader does not pass it."""
    found = Counter()
    position = await read_all(views, "", found)
    slow, fast = "ad:1", "ad:2"
    assert shard_of(slow, 4) != shard_of(fast, 4)

    async def count(runner, entity, number):
        state = await views_store.find_shard(postgres, shard_of(entity, 4))
        to_id = f"{10**12 + number}-0"
        counts = [Count(entity, 0, int(HOUR.timestamp()) // 3600, number)]
        await views_store.flush(
            runner,
            state.shard,
            setups=state.setups,
            from_id=state.through,
            to_id=to_id,
            counts=counts,
        )

    async with postgres.transaction() as tx:
        await count(tx, slow, 1)
        for number in (10, 100):
            await count(postgres, fast, number)
            position = await read_all(views, position, found)
        assert sum(found.values()) == 110
    position = await read_all(views, position, found)
    assert found == await stored(sql)
    with suppress(InvalidSpan):
        async with postgres.transaction() as tx:
            await count(tx, slow, 1000)
            raise InvalidSpan("rolled back")
    await count(postgres, slow, 10_000)
    await read_all(views, position, found)
    assert found == await stored(sql)


async def test_a_reader_that_missed_changes_is_refused(views, flusher, make_flusher, sql):
    await views.hits(["ad:1", "ad:2"])
    await flusher.run_once()
    position = (await views.exports.changes()).position
    for text in ("x", "0-0", position + ".0-0", position[:-1], 5, "now "):
        with pytest.raises((InvalidPosition, PositionLost)):
            await views.exports.changes(text)
    with pytest.raises(InvalidSpan):
        await views.exports.changes(position, rows_max=0)
    # PostgreSQL lost the commit, and counted again with another one of the same number.
    await sql("UPDATE headrace.views_change SET at = at + interval '1 us' WHERE number > 1")
    with pytest.raises(PositionLost):
        await views.exports.changes(position)
    position = (await views.exports.changes("now")).position
    for _ in range(2):
        await views.hits(["ad:1", "ad:2"])
        await flusher.run_once()
    await sql("UPDATE headrace.views_change SET at = at - interval '2 hours'")
    assert await flusher.keep_changes() > 0
    with pytest.raises(PositionLost):
        await views.exports.changes(position)
    newest = (await views.exports.changes("now")).position
    assert (await views.exports.changes(newest)).changes == []
    off = make_flusher()
    await off.keep_changes()
    for after in ("", "now", newest):
        with pytest.raises(ChangesOff):
            await views.exports.changes(after)
    await flusher.keep_changes()
    with pytest.raises(PositionLost):
        await views.exports.changes(newest)


async def test_files_contain_every_change_once(views, flusher, sql, tmp_path):
    folder = tmp_path / "changes"
    total = 0
    for form in ("csv", "parquet", "parquet"):
        await views.hits([f"ad:{n}" for n in range(9)])
        await flusher.run_once()
        rows, position = await follow(views.exports, folder, form)
        total += rows
    assert await follow(views.exports, folder, form) == (0, position)
    assert total == 27
    found = Counter()
    for path in sorted(folder.glob("0*")):
        if path.suffix == ".csv":
            rows = list(csv.DictReader(path.open()))
        else:
            rows = parquet.read_table(path).to_pylist()
        for row in rows:
            found[row["id"], row["class"]] += int(row["views"])
    assert found == {(f"ad:{n}", "human"): 3 for n in range(9)}
    (folder / "position").write_text("1\n")
    with pytest.raises(InvalidPosition):
        await follow(views.exports, folder, "csv")


async def test_an_export_has_every_item_once_in_each_format(engines, views, flusher, monkeypatch):
    names = sorted(f"ad:{n}" for n in range(7))
    await views.hits([*names, *names, Hit(id="ad:3", traffic="bot")])
    await flusher.run_once()
    found, after = [], ""
    while after is not None:
        page = await views.exports.series("hour", after=after, ids_max=3)
        found += [(row.id, row.traffic, row.views) for row in page.rows]
        after = page.after
    expected = [(name, "human", 2) for name in names]
    expected.insert(4, ("ad:3", "bot", 1))
    assert found == expected
    for by in ("day", "month"):
        page = await views.exports.series(by, ids_max=1_000)
        assert [(row.id, row.traffic, row.views) for row in page.rows] == expected
    async with client_of(engines, views) as client:
        answer = await client.get("/v1/views/export?format=csv&limit=2")
        assert answer.headers["x-headrace-after"] == "ad:1"
        assert len(list(csv.DictReader(io.StringIO(answer.text)))) == 2
        answer = await client.get("/v1/views/export?format=parquet")
        assert "x-headrace-after" not in answer.headers
        table = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
        assert [(row["id"], row["class"], row["views"]) for row in table] == expected
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        answer = await client.get("/v1/views/export?format=parquet")
        assert (answer.status_code, answer.json()["code"]) == (501, "extra_missing")
        assert "the export as Parquet needs pyarrow" in answer.json()["detail"]
        for query in ("by=week", "limit=0", "limit=1001", "format=xml", "after=%20"):
            answer = await client.get(f"/v1/views/export?{query}")
            assert answer.status_code in (400, 422), query
        assert (await client.get("/v1/views/changes?after=x")).status_code == 422


def test_a_file_is_complete_or_absent(tmp_path):
    path = tmp_path / "views.csv"
    with pytest.raises(HeadraceError), whole_file(path, "csv"):
        raise HeadraceError("stopped")
    assert not path.exists()
