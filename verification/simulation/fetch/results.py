"""The contracts of publishing: open changes of items, their photos, and the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.fetch.sql import SQL
from headrace.jobs.sql import SQL as JOBS_SQL
from verification.simulation.fetch.tables import Change, FetchTables, Item, Result, statement
from verification.simulation.jobs.tables import seconds


def change_fields(change: Change, item: Item, *, is_late: bool) -> dict[str, Any]:
    """An open change with its item, as `lock_changes` and `lock_late` return it."""
    return {
        "run_id": change.run_id,
        "item": change.item,
        "kind": change.kind,
        "version": change.version,
        "is_late": is_late,
        "customer": item.customer,
        "item_version": item.version,
        "is_gone": item.is_gone,
        "fields": item.fields,
        "photos": list(item.photos),
    }


def open_change(t: FetchTables, key: tuple[int, str]) -> tuple[Change, Item] | None:
    """An open change and its item, both locked."""
    run, change = t.run.get(key[0]), t.change.get(key)
    if run is None or change is None or change.published_at is not None:
        return None
    t.item.lock((run.customer, key[1]))
    t.change.lock(key)
    change, item = t.change.get(key), t.item.get((run.customer, key[1]))
    if change is None or item is None or change.published_at is not None:
        return None
    return change, item


@statement(SQL.lock_changes)
def lock_changes(t: FetchTables, *, runs: Sequence[int], items: Sequence[str]) -> list[Any]:
    keys = list(zip(runs, items, strict=True))
    places = {key: ("" if (run := t.run.get(key[0])) is None else run.customer) for key in keys}
    keys.sort(key=lambda key: (places[key], key[1]))
    found = (open_change(t, key) for key in keys)
    return [
        change_fields(*pair, is_late=pair[0].late_at is not None)
        for pair in found
        if pair is not None
    ]


@statement(SQL.late_runs)
def late_runs(t: FetchTables, *, deadline_s: float) -> list[Any]:
    before = t.now() - seconds(deadline_s)
    return [
        {"id": key}
        for key, run in sorted(t.run.items(), key=lambda one: one[0])
        if run.state == "applied" and run.applied_at is not None and run.applied_at < before
    ]


@statement(SQL.lock_late)
def lock_late(t: FetchTables, *, run_id: int, after: str, rows_max: int) -> list[Any]:
    undecided = {need.item for _, need in t.need.of(run_id) if need.outcome is None}
    found: list[Any] = []
    for key, change in sorted(t.change.of(run_id), key=lambda one: one[0]):
        is_open = change.published_at is None and change.late_at is None
        if change.item <= after or change.kind not in ("new", "changed") or not is_open:
            continue
        if change.item in undecided and (pair := open_change(t, key)) is not None:
            found.append(change_fields(*pair, is_late=False))
            if len(found) == rows_max:
                break
    return found


@statement(SQL.note_late)
def note_late(t: FetchTables, *, runs: Sequence[int], items: Sequence[str]) -> int:
    for key in zip(runs, items, strict=True):
        change = t.change.get(key)
        assert change is not None, "its row is locked"
        t.change.put(key, replace(change, late_at=t.now()))
        for place, need in t.needs_of(*key):
            if need.outcome is None:
                t.need.put(place, replace(need, is_late=True))
    for run_id, count in sorted(Counter(runs).items()):
        run = t.get_run(run_id)
        t.put_run(run, items_late=run.items_late + count)
    return len(runs)


@statement(SQL.lock_result_order)
def lock_result_order(t: FetchTables) -> list[Any]:
    t.model.lock_advisory("fetch_result")
    return [{}]


def last_result(t: FetchTables, place: tuple[str, str]) -> Result | None:
    """The result of an item with the greatest version."""
    found = [row for _, row in t.result.of(place)]
    return max(found, key=lambda row: row.version, default=None)


@statement(SQL.last_results)
def last_results(t: FetchTables, *, customers: Sequence[str], items: Sequence[str]) -> list[Any]:
    places = sorted(set(zip(customers, items, strict=True)))
    found = (last_result(t, place) for place in places)
    names = ("customer", "item", "action", "photos")
    return [{name: getattr(row, name) for name in names} for row in found if row is not None]


@statement(SQL.photos_of_items)
def photos_of_items(t: FetchTables, *, customers: Sequence[str], items: Sequence[str]) -> list[Any]:
    found = []
    for customer, name in sorted(zip(customers, items, strict=True)):
        item = t.item.get((customer, name))
        for url in () if item is None else item.photos:
            link = t.link.get((customer, url))
            photo = None if link is None or link.sha256 is None else t.photo.get(link.sha256)
            row = {
                part: None if photo is None else getattr(photo, part)
                for part in ("key", "sha256", "width", "height", "size_bytes")
            }
            row |= {"customer": customer, "item": name, "url": url}
            found.append(row | {"outcome": "pending" if link is None else link.outcome})
    return found


@statement(SQL.insert_results)
def insert_results(t: FetchTables, *, customers: Sequence[str], **given: Any) -> list[Any]:
    inserted = []
    for n, customer in enumerate(customers):
        seq = t.model.next_id("fetch_result")
        key = customer, given["items"][n], given["versions"][n]
        if key in t.result:
            continue
        row = Result(
            seq=seq,
            customer=customer,
            item=key[1],
            version=key[2],
            action=given["actions"][n],
            fields=given["fields"][n],
            photos=given["photos"][n],
            at=t.now(),
        )
        t.result.put(key, row)
        inserted.append({"seq": seq, "customer": customer})
    return inserted


@statement(SQL.note_photo_edits)
def note_photo_edits(t: FetchTables, *, runs: Sequence[int], items: Sequence[str]) -> int:
    sums: Counter[int] = Counter()
    for key in sorted(set(zip(runs, items, strict=True))):
        run_id, name = key
        place = t.get_run(run_id).customer, name
        item, change = t.item.get(place), t.change.get(key)
        assert item is not None, "its row is locked"
        assert change is not None, "its row is locked"
        t.item.put(place, replace(item, version=item.version + 1, run_id=run_id))
        kind = "changed" if change.late_at is None else change.kind
        t.change.put(key, replace(change, version=change.version + 1, kind=kind))
        sums[run_id] += change.late_at is None
    for run_id, count in sorted(sums.items()):
        if count:
            run = t.get_run(run_id)
            t.put_run(run, unchanged=run.unchanged - count, changed=run.changed + count)
    return len(runs)


@statement(SQL.undecided_needs)
def undecided_needs(t: FetchTables, *, runs: Sequence[int], items: Sequence[str]) -> list[Any]:
    return [
        {"run_id": need.run_id, "item": need.item, "url": need.url}
        for key in zip(runs, items, strict=True)
        for _, need in t.needs_of(*key)
        if need.outcome is None
    ]


@statement(SQL.note_published)
def note_published(t: FetchTables, *, runs: Sequence[int], items: Sequence[str]) -> int:
    sums: Counter[int] = Counter()
    for key in dict.fromkeys(zip(runs, items, strict=True)):
        change = t.change.get(key)
        if change is not None and change.published_at is None:
            t.change.put(key, replace(change, published_at=t.now()))
            sums[key[0]] += 1
    for run_id, count in sorted(sums.items()):
        t.run.lock(run_id)
        run = t.get_run(run_id)
        is_over = run.items_pending == count
        t.put_run(
            run,
            items_pending=run.items_pending - count,
            state="done" if is_over else run.state,
            ended_at=t.now() if is_over else None,
        )
    return len(sums)


@statement(SQL.results)
def results(t: FetchTables, *, after: int, customer: str | None, rows_max: int) -> list[Any]:
    found = [
        msgspec.structs.asdict(row)
        for row in t.result.values()
        if row.seq > after and customer in (None, row.customer)
    ]
    return sorted(found, key=lambda row: row["seq"])[:rows_max]


statement(SQL.consumer_ids)(lambda _t: [])
statement(SQL.webhooks)(lambda _t, **_: [])
statement(SQL.lock_webhooks)(lambda _t, customers: [])
statement(SQL.forget_held)(lambda _t, customers, items: 0)
statement(SQL.discard_unreviewed)(lambda _t: [])
statement(SQL.compare_photos)(lambda _t, **_: 0)
statement(JOBS_SQL.decisions)(lambda _t, **_: [])
statement(JOBS_SQL.count_open_alerts)(lambda t: [{"alerts": len(t.jobs.alert)}])
