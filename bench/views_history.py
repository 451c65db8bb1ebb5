"""What do the feed of changes, exports and the replacement of hours by days cost?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from bench.children import BenchFault
from bench.figures import Figure, figure
from bench.harness import Run
from bench.views_stage import open_views
from headrace import Headrace
from headrace.engines.sql import compile_query
from headrace.views import store

OLD_HOURS = compile_query(
    "old_hours",
    "-- Hours of a month two years ago.\n"
    "INSERT INTO headrace.views_hour (id, hour, class, views)"
    " SELECT 'item:' || i, date_trunc('month', :at::timestamptz, 'UTC') + h * interval '7 hours',"
    " 0, 1 FROM generate_series(1, :items::integer) i, generate_series(0, 99) h",
)
MONTHS = compile_query(
    "months", "-- The month.\nSELECT headrace.ensure_view_months_v1(ARRAY[:at::timestamptz])"
)
TOTALS = compile_query(
    "totals",
    "-- Their totals.\nINSERT INTO headrace.views_total SELECT 'item:' || i, 0, 100"
    " FROM generate_series(1, :items::integer) i",
)
HOURS_AN_ITEM = 100
IDS = 2_000


async def measure_history(run: Run) -> list[Figure]:
    """Rows a second of the roll-up and of both exports."""
    found = await run.alternate({"headrace": lambda: _history(run)})
    items = f"{run.sized(20_000, 5_000):,} items, {HOURS_AN_ITEM} hours each"
    return [
        figure(name, "rows/s", items, ours=found.get(name, {}).get("headrace"))
        for name in ("hours exported", "hours replaced by days", "changes read")
    ]


async def _history(run: Run) -> Mapping[str, float]:
    await run.engines.clear_valkey()
    items = run.sized(20_000, 5_000)
    async with run.cell() as cell:
        app = open_views(cell)
        try:
            return {
                **await _hours(app, items),
                "changes read": await _changes(app, items * 5),
            }
        finally:
            await app.close()


async def _hours(app: Headrace, items: int) -> Mapping[str, float]:
    """Export a month, then replace it."""
    postgres, at = app.engines.postgres, datetime.now(UTC) - timedelta(days=730)
    await postgres.run(MONTHS, at=at)
    async with postgres.session() as session:
        await session.allow_long_statements(60)
        await session.run(OLD_HOURS, at=at, items=items)
        await session.run(TOTALS, items=items)
    span = {"from_at": at - timedelta(days=40), "to_at": at + timedelta(days=40)}
    began_s, after, rows = time.perf_counter(), "", 0
    while after is not None:
        page = await app.views.exports.series("hour", after=after, ids_max=200, **span)
        rows, after = rows + len(page.rows), page.after
    exported_s = time.perf_counter() - began_s
    if rows != items * HOURS_AN_ITEM:
        raise BenchFault(f"{rows} of {items * HOURS_AN_ITEM} rows exported")
    began_s = time.perf_counter()
    before = datetime.now(UTC) - timedelta(days=400)
    while await store.roll_up(postgres, before=before, time_zone="UTC", ids_max=IDS):
        pass
    rolled_s = time.perf_counter() - began_s
    if (await app.views.analytics.verify()).differences:
        raise BenchFault("totals differ from days")
    return {"hours exported": rows / exported_s, "hours replaced by days": rows / rolled_s}


async def _changes(app: Headrace, rows: int) -> float:
    """Read the changes of flushes of 1,000 rows."""
    postgres = app.engines.postgres
    await store.ensure_shards(postgres, app.views.config.shards)
    await store.keep_changes(postgres, kept_s=3600.0, rows_max=1)
    for number in range(rows // 1_000):
        state = await store.find_shard(postgres, number % 4)
        counts = [store.Count(f"item:{i}", 0, 490_000, 1) for i in range(1_000)]
        to_id = f"{10**12 + number}-0"
        await store.flush(postgres, state.shard, from_id=state.through, to_id=to_id, counts=counts)
    began_s, position, read = time.perf_counter(), "", 0
    while (page := await app.views.exports.changes(position)).position != position:
        read, position = read + len(page.changes), page.position
    took_s = time.perf_counter() - began_s
    if read != rows // 1_000 * 1_000:
        raise BenchFault(f"{read} of {rows} changes read")
    return read / took_s
