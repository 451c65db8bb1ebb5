"""The contracts of staged rows: the rows of a run between reading and applying."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.fetch.sql import SQL
from verification.simulation.fetch.tables import FetchTables, Item, Staged, statement


@statement(SQL.stage_same)
def stage_same(
    t: FetchTables,
    *,
    run_id: int,
    customer: str,
    items: Sequence[str],
    raw_hashes: Sequence[bytes],
) -> list[Any]:
    same = set()
    for name, raw_hash in zip(items, raw_hashes, strict=True):
        item = t.item.get((customer, name))
        if item is None or item.is_gone or item.raw_hash != raw_hash:
            continue
        if (run_id, name) not in t.staged:
            row = Staged(run_id=run_id, item=name, hash=item.hash, raw_hash=raw_hash)
            t.staged.put((run_id, name), row)
            same.add(name)
    return [{"position": n} for n, name in enumerate(items, 1) if name not in same]


@statement(SQL.stage_rows)
def stage_rows(t: FetchTables, *, run_id: int, items: Sequence[str], **rows: Any) -> list[Any]:
    staged = []
    for n, name in enumerate(items):
        if (run_id, name) in t.staged:
            continue
        photos = rows["photos"][n]
        row = Staged(
            run_id=run_id,
            item=name,
            hash=rows["hashes"][n],
            raw_hash=rows["raw_hashes"][n],
            fields=rows["fields"][n],
            photos=tuple(photos.split("\n")) if photos else (),
            refused=json.loads(rows["refused"][n]),
        )
        t.staged.put((run_id, name), row)
        staged.append({"position": n + 1})
    return staged


@statement(SQL.stage_gone)
def stage_gone(t: FetchTables, *, run_id: int, items: Sequence[str]) -> int:
    for name in items:
        t.staged.put((run_id, name), Staged(run_id=run_id, item=name, is_gone=True))
    return len(items)


@statement(SQL.stored_fields)
def stored_fields(t: FetchTables, *, customer: str, items: Sequence[str]) -> list[Any]:
    rows = ((name, t.item.get((customer, name))) for name in dict.fromkeys(items))
    return [{"item": name, "fields": row.fields} for name, row in rows if row and not row.is_gone]


@statement(SQL.staged_count)
def staged_count(t: FetchTables, *, run_id: int) -> list[Any]:
    return [{"count": sum(row.hash is not None for _, row in t.staged.of(run_id))}]


@statement(SQL.published_count)
def published_count(t: FetchTables, *, customer: str) -> list[Any]:
    return [{"count": sum(not row.is_gone for _, row in t.item.of(customer))}]


def missing_items(t: FetchTables, run_id: int, customer: str) -> list[Item]:
    """Published items that a run does not list and no later upload sent."""
    return [
        row
        for _, row in t.item.of(customer)
        if not row.is_gone and row.sent_run < run_id and (run_id, row.item) not in t.staged
    ]


@statement(SQL.missing_count)
def missing_count(t: FetchTables, *, run_id: int, customer: str) -> list[Any]:
    return [{"count": len(missing_items(t, run_id, customer))}]
