"""The contracts of runs: customers, the comparison with stored items, and the end of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.fetch.sql import SQL
from verification.simulation.fetch.staged import missing_items
from verification.simulation.fetch.tables import (
    Change,
    Customer,
    FetchTables,
    Item,
    Run,
    Staged,
    statement,
)
from verification.simulation.jobs.tables import seconds

APPLIED = ("applied", "done")


# Customers and rules


@statement(SQL.set_customer)
def set_customer(t: FetchTables, **values: Any) -> int:
    t.customer.put(values["customer"], Customer(**values))
    return 1


@statement(SQL.customers)
def customers(t: FetchTables, *, customer: str | None) -> list[Any]:
    rows = [msgspec.structs.asdict(row) for key, row in sorted(t.customer.items())]
    return [row for row in rows if customer in (None, row["customer"])]


statement(SQL.schemas)(lambda _t, plain: [])


# A run


@statement(SQL.lock_items)
def lock_items(t: FetchTables, *, customer: str) -> list[Any]:
    t.model.lock_advisory(("fetch.items", customer))
    return [{}]


@statement(SQL.try_lock_customer)
def try_lock_customer(t: FetchTables, *, customer: str) -> list[Any]:
    return [{"is_locked": t.model.lock_session(("fetch", customer))}]


@statement(SQL.unlock_customer)
def unlock_customer(t: FetchTables, *, customer: str) -> list[Any]:
    return [{"was_locked": t.model.unlock_session(("fetch", customer))}]


@statement(SQL.abandon_runs)
def abandon_runs(t: FetchTables, *, customer: str, but: int | None) -> int:
    long_ago = t.now() - seconds(86_400)
    found = [
        run
        for key, run in t.run.of(customer)
        if key != but
        and (run.state == "reading" or (run.state == "bringing" and run.started_at < long_ago))
    ]
    for run in found:
        t.put_run(run, state="abandoned", ended_at=t.now(), reason="its process ended")
    return len(found)


@statement(SQL.insert_run)
def insert_run(t: FetchTables, **values: Any) -> list[Any]:
    own = t.model.next_id("fetch_run")
    t.run.put(own, Run(id=own, state="reading", started_at=t.now(), **values))
    return [{"id": own}]


@statement(SQL.lock_run)
def lock_run(t: FetchTables, *, run_id: int) -> list[Any]:
    t.run.lock(run_id)
    run = t.run.get(run_id)
    names = ("id", "customer", "state", "format", "review_until")
    return [] if run is None else [{name: getattr(run, name) for name in names}]


@statement(SQL.newer_run)
def newer_run(t: FetchTables, *, customer: str, run_id: int, is_supplemental: bool) -> list[Any]:
    found = [
        key
        for key, run in t.run.of(customer)
        if key > run_id
        and run.state in APPLIED
        and (run.format == "supplemental" if is_supplemental else run.is_whole)
    ]
    return [{"id": max(found)}] if found else []


@statement(SQL.end_run)
def end_run(t: FetchTables, *, run_id: int, state: str, reason: str | None) -> int:
    t.put_run(t.get_run(run_id), state=state, reason=reason, ended_at=t.now())
    return 1


@statement(SQL.note_fault)
def note_fault(t: FetchTables, *, run_id: int, fault: str) -> int:
    t.put_run(t.get_run(run_id), fault=fault)
    return 1


@statement(SQL.note_reading)
def note_reading(t: FetchTables, *, run_id: int, **counts: int) -> int:
    t.put_run(t.get_run(run_id), **counts)
    return 1


@statement(SQL.insert_problems)
def insert_problems(t: FetchTables, *, run_id: int, items: Sequence[Any], **_rest: Any) -> int:
    for item in items:
        t.problem.put((run_id, t.model.next_id("fetch_problem")), item)
    return len(items)


@statement(SQL.note_line_break)
def note_line_break(
    t: FetchTables, *, run_id: int, customer: str, has_line_break: bool
) -> list[Any]:
    t.put_run(t.get_run(run_id), has_line_break=has_line_break)
    found = [
        (key, run.has_line_break)
        for key, run in t.run.of(customer)
        if key < run_id
        and run.is_whole
        and run.undone_by is None
        and run.state in APPLIED
        and run.has_line_break is not None
    ]
    return [{"has_line_break": max(found)[1]}] if found else []


@statement(SQL.runs_to_undo)
def runs_to_undo(t: FetchTables, *, run_ids: Sequence[int], runs_kept: int) -> list[Any]:
    rows = []
    for run_id in run_ids:
        run = t.get_run(run_id)
        later = [
            (key, other)
            for key, other in sorted(t.run.of(run.customer), reverse=True)
            if key > run_id and other.is_whole and other.format != "same" and other.state in APPLIED
        ][:runs_kept]
        first = [
            key
            for key, other in later
            if other.undone_by is None and other.new + other.changed + other.gone
        ]
        rows.append(
            {
                name: getattr(run, name)
                for name in ("id", "state", "is_whole", "format", "undone_by")
            }
            | {"is_change": run.new + run.changed + run.gone > 0}
            | {"newer": len(later), "later": first or None}
        )
    return rows


# The comparison


def other_fields(new: str, old: str) -> tuple[str, ...]:
    """The fields that differ."""
    one, other = json.loads(new), json.loads(old)
    keys = (key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    return tuple(sorted(keys)[:100])


@statement(SQL.diff)
def diff(t: FetchTables, *, run_id: int, customer: str, is_whole: bool) -> list[Any]:
    changes: list[Change] = []
    for _, row in t.staged.of(run_id):
        item = t.item.get((customer, row.item))
        if row.is_gone and item is not None and not item.is_gone:
            changes.append(gone_of(run_id, item))
        if row.hash is None or not row.fields:
            continue
        if item is None or item.is_gone:
            if item is None or item.sent_run < run_id:
                version = 1 if item is None else item.version + 1
                change = Change(run_id=run_id, item=row.item, kind="new", version=version)
                changes.append(replace(change, has_other_photos=True))
        elif item.hash != row.hash and item.sent_run < run_id:
            change = Change(
                run_id=run_id,
                item=row.item,
                kind="changed",
                version=item.version + 1,
                has_other_photos=item.photos != row.photos,
                fields=other_fields(row.fields, item.fields),
            )
            changes.append(change)
    if is_whole:
        changes += [gone_of(run_id, item) for item in missing_items(t, run_id, customer)]
    for change in changes:
        t.change.put((run_id, change.item), change)
    kinds = Counter(change.kind for change in changes)
    return [{kind: kinds[kind] for kind in ("new", "changed", "gone")}]


def gone_of(run_id: int, item: Item) -> Change:
    """The change that unpublishes an item."""
    return Change(run_id=run_id, item=item.item, kind="gone", version=item.version + 1)


@statement(SQL.note_counts)
def note_counts(t: FetchTables, *, run_id: int, new: int, changed: int, gone: int) -> int:
    run = t.get_run(run_id)
    unchanged = run.rows_read - run.invalid - new - changed
    if not (run.is_whole or run.format == "supplemental"):
        unchanged -= gone
    t.put_run(run, new=new, changed=changed, gone=gone, unchanged=unchanged)
    return 1


@statement(SQL.keep_before)
def keep_before(t: FetchTables, *, run_id: int, customer: str) -> int:
    kept = [row for _, row in t.change.of(run_id) if row.kind in ("changed", "gone")]
    for row in kept:
        t.before.put((run_id, row.item), Staged(run_id=run_id, item=row.item))
    return len(kept)


@statement(SQL.store_items)
def store_items(t: FetchTables, *, run_id: int, customer: str) -> int:
    changes = sorted(t.change.of(run_id))
    for key, change in changes:
        row = t.staged.get(key)
        if change.kind == "gone" or row is None:
            continue
        place = customer, change.item
        t.item.lock(place)
        known = t.item.get(place)
        version = change.version if known is None else max(change.version, known.version + 1)
        item = Item(
            customer=customer,
            item=change.item,
            version=version,
            is_gone=False,
            run_id=run_id,
            hash=row.hash,
            raw_hash=row.raw_hash,
            fields=row.fields,
            photos=row.photos,
            sent_run=0 if known is None else known.sent_run,
        )
        t.item.put(place, item)
        if version != change.version:
            t.change.put(key, replace(change, version=version))
    return len(changes)


@statement(SQL.mark_gone)
def mark_gone(t: FetchTables, *, run_id: int, customer: str) -> int:
    gone = [(key, row) for key, row in sorted(t.change.of(run_id)) if row.kind == "gone"]
    for key, change in gone:
        place = customer, change.item
        t.item.lock(place)
        item = t.item.get(place)
        assert item is not None, "items are never deleted"
        version = max(change.version, item.version + 1)
        t.item.put(place, replace(item, version=version, is_gone=True, run_id=run_id))
        if version != change.version:
            t.change.put(key, replace(change, version=version))
    return len(gone)


@statement(SQL.remember_rows)
def remember_rows(t: FetchTables, *, run_id: int, customer: str) -> int:
    count = 0
    for _, row in t.staged.of(run_id):
        item = t.item.get((customer, row.item))
        if item is None or not row.fields or item.hash != row.hash or item.sent_run >= run_id:
            continue
        if item.raw_hash != row.raw_hash:
            t.item.put((customer, row.item), replace(item, raw_hash=row.raw_hash))
            count += 1
    return count


@statement(SQL.note_sent)
def note_sent(t: FetchTables, *, run_id: int, customer: str) -> int:
    rows = t.staged.of(run_id)
    for _, row in rows:
        item = t.item.get((customer, row.item))
        if item is not None:
            t.item.put((customer, row.item), replace(item, sent_run=run_id))
    return len(rows)


# The end


@statement(SQL.changes_page)
def changes_page(t: FetchTables, *, run_id: int, after: str, rows_max: int) -> list[Any]:
    names: dict[str, list[str]] = {}
    for _, need in t.need.of(run_id):
        names.setdefault(need.item, []).append(need.url)
    rows = sorted((row.item, row.version) for _, row in t.change.of(run_id) if row.item > after)
    return [
        {"item": item, "version": version, "urls": names.get(item, [])}
        for item, version in rows[:rows_max]
    ]


@statement(SQL.note_applied)
def note_applied(t: FetchTables, *, run_id: int) -> int:
    run, changes = t.get_run(run_id), len(t.change.of(run_id))
    t.put_run(
        run,
        reason=run.reason if run.review_until is None else None,
        items_pending=changes,
        applied_at=t.now(),
        state="applied" if changes else "done",
        ended_at=None if changes else t.now(),
    )
    return 1


@statement(SQL.supersede_held)
def supersede_held(t: FetchTables, *, run_id: int, customer: str) -> int:
    is_supplemental = t.get_run(run_id).format == "supplemental"
    held = [
        run
        for key, run in t.run.of(customer)
        if key != run_id
        and run.state == "held"
        and (run.format == "supplemental") == is_supplemental
    ]
    for run in held:
        t.put_run(run, state="superseded", ended_at=t.now())
    return len(held)


@statement(SQL.clear_staged)
def clear_staged(t: FetchTables, *, customer: str) -> int:
    return sum(
        drop_rows(t.staged, [run_id])
        for run_id, run in t.run.of(customer)
        if run.state not in ("reading", "held")
    )


@statement(SQL.forget_older_before)
def forget_older_before(t: FetchTables, *, customer: str, runs_kept: int) -> int:
    whole = sorted(
        (
            run_id
            for run_id, run in t.run.of(customer)
            if run.is_whole and run.format != "same" and run.state in APPLIED
        ),
        reverse=True,
    )
    limit = whole[runs_kept] if len(whole) > runs_kept else 0
    old = [run_id for run_id, _ in t.run.of(customer) if run_id <= limit]
    return drop_rows(t.before, old)


@statement(SQL.forget_runs)
def forget_runs(t: FetchTables, *, customer: str, is_whole: bool, runs_kept: int) -> list[Any]:
    kind = sorted(
        (run_id for run_id, run in t.run.of(customer) if run.is_whole == is_whole), reverse=True
    )
    limit = kind[runs_kept] if len(kind) > runs_kept else 0
    old = []
    for run_id in kind:
        is_open = t.get_run(run_id).state in ("bringing", "reading", "held", "applied")
        if run_id <= limit and not is_open:
            drop_run(t, run_id=run_id)
            old.append({"id": run_id})
    return old


@statement(SQL.drop_run)
def drop_run(t: FetchTables, *, run_id: int) -> int:
    for table in (t.count, t.problem):
        for key in [key for key, _ in table.items() if key[0] == run_id]:
            table.pop(key)
    return int(t.run.pop(run_id) is not None)


def drop_rows(table: Any, runs: Sequence[int]) -> int:
    """Delete the rows of runs."""
    keys = [key for run_id in runs for key, _ in table.of(run_id)]
    for key in keys:
        table.pop(key)
    return len(keys)


statement(SQL.forget_staged)(lambda t, runs: drop_rows(t.staged, runs))
statement(SQL.forget_changes)(lambda t, runs: drop_rows(t.change, runs))
statement(SQL.forget_needs)(lambda t, runs: drop_rows(t.need, runs))
statement(SQL.forget_before)(lambda t, runs: drop_rows(t.before, runs))


@statement(SQL.forget_pace)
def forget_pace(t: FetchTables, *, runs: Sequence[int]) -> int:
    keys = [key for key, _ in t.pace.items() if key[0] in runs]
    for key in keys:
        t.pace.pop(key)
    return len(keys)


@statement(SQL.runs)
def runs(
    t: FetchTables,
    *,
    run_ids: Sequence[int] | None,
    customer: str | None,
    states: Sequence[str] | None,
    before: int | None,
    rows_max: int,
) -> list[Any]:
    found = [
        run
        for key, run in t.run.items()
        if (run_ids is None or key in run_ids)
        and customer in (None, run.customer)
        and (states is None or run.state in states)
        and (before is None or key < before)
    ]
    found.sort(key=lambda run: -run.id)
    return [run_fields(t, run) for run in found[:rows_max]]


def run_fields(t: FetchTables, run: Run) -> dict[str, Any]:
    """A run as `runs` returns it; its pace is left out."""
    counts = t.counts_of(run.id)
    return msgspec.structs.asdict(run) | {
        "by_outcome": json.dumps(counts) if counts else None,
        "photos_decided": sum(counts.values()),
        "paced": None,
        "paced_s": None,
        "rate_per_s": 1.0,
    }


for query in (SQL.commit_lazily, SQL.avoid_nested_loops, SQL.allow_nested_loops):
    statement(query)(lambda _t: [{}])
for query in (SQL.analyze_items, SQL.analyze_changes, SQL.analyze_staged):
    statement(query)(lambda _t: 0)
