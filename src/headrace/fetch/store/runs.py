"""Runs of catalogues, and what customers configured: sources, schemas, mappings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.engines.postgres import Row, Runner, from_row
from headrace.fetch.errors import CustomerUnknown, FileFault
from headrace.fetch.mappings import Mapping, NamedMapping
from headrace.fetch.model import (
    CHANGE_CHARACTERS_MAX,
    RUNS_KEPT,
    SAME_FORMAT,
    SENT_RUNS_KEPT,
    SUPPLEMENTAL,
    UNDO_FORMAT,
    UNDOABLE_RUNS,
    Change,
    Customer,
    PhotoProblem,
    RowProblem,
    Run,
    RunState,
    Sample,
    ValidatedRow,
)
from headrace.fetch.schemas import CategorySchema, Schema
from headrace.fetch.sql import SQL
from headrace.kernel.ids import USER_ID


@dataclass(frozen=True, slots=True)
class SourceToBring:
    """A file to fetch, with validators, hash and rules of the applied one."""

    url: str
    format_name: str | None
    mapping: str | None
    etag: str | None = None
    last_modified: str | None = None
    sha256: str | None = None
    rules: bytes | None = None

    def read_as(self, rules: bytes) -> SourceToBring:
        """The source without validators if the applied file was read by other rules."""
        if self.rules == rules:
            return self
        return SourceToBring(self.url, self.format_name, self.mapping, rules=rules)


async def find_schemas(runner: Runner, plain: str | None = None) -> list[CategorySchema]:
    """Every schema, by category, or the one of that category in its plain form."""
    return [_schema(row) for row in await runner.all(SQL.schemas, plain=plain)]


async def set_schema(runner: Runner, plain: str, category: str, schema: Schema) -> CategorySchema:
    """Create or replace the schema of a category."""
    encoded = msgspec.json.encode(schema).decode()
    row: Row = await runner.one(SQL.set_schema, plain=plain, category=category, schema=encoded)
    return _schema(row)


async def find_mappings(runner: Runner, name: str | None = None) -> list[NamedMapping]:
    """Every mapping, by name, or the one of that name."""
    return [_mapping(row) for row in await runner.all(SQL.mappings, name=name)]


async def set_mapping(runner: Runner, name: str, mapping: Mapping) -> NamedMapping:
    """Create or replace a mapping."""
    encoded = msgspec.json.encode(mapping).decode()
    row: Row = await runner.one(SQL.set_mapping, name=name, mapping=encoded)
    return _mapping(row)


def _schema(row: Row) -> CategorySchema:
    return CategorySchema(
        category=row["category"],
        schema=msgspec.json.decode(row["schema"], type=Schema),
        updated_at=row["updated_at"],
    )


def _mapping(row: Row) -> NamedMapping:
    return NamedMapping(
        name=row["name"],
        mapping=msgspec.json.decode(row["mapping"], type=Mapping),
        updated_at=row["updated_at"],
    )


async def find_customers(runner: Runner, customer: str | None = None) -> list[Customer]:
    """Every customer, or the one of that name."""
    rows = await runner.all(SQL.customers, customer=customer)
    return [Customer(**dict(row)) for row in rows]


async def get_customer(runner: Runner, customer: str) -> Customer:
    """The customer of that name. Raises: CustomerUnknown."""
    is_name = isinstance(customer, str) and USER_ID.fullmatch(customer) is not None
    found = await find_customers(runner, customer) if is_name else []
    if not found:
        raise CustomerUnknown(str(customer))
    return found[0]


async def set_customer(runner: Runner, customer: Customer) -> None:
    """Create or change a customer."""
    await runner.run(SQL.set_customer, **msgspec.structs.asdict(customer))


PACE_KNOWN_S: Final = 5.0
SENT_WAIT_S: Final = 3600.0
"""A failed link of an uploaded item is due again after this time."""
_APPLIED: Final = (RunState.APPLIED, RunState.DONE)
_SAMPLES: Final = msgspec.json.Decoder(Sample)
_FAULTS: Final = msgspec.json.Decoder(FileFault)
_PAIRS: Final = msgspec.json.Decoder(dict[str, list[str | None]])
_VALUES: Final = msgspec.json.Decoder(dict[str, str | int | float])


async def stage_same(
    runner: Runner, run_id: int, customer: str, *, items: list[str], raw_hashes: list[bytes | None]
) -> list[int]:
    """Stage rows equal to those of the stored items; return the positions of the others."""
    rows = await runner.all(
        SQL.stage_same, run_id=run_id, customer=customer, items=items, raw_hashes=raw_hashes
    )
    return [row["position"] for row in rows]


async def stage(
    runner: Runner, run_id: int, rows: list[ValidatedRow], *, raw_hashes: list[bytes | None]
) -> list[ValidatedRow]:
    """Stage `rows`, each with its hash as read; return those with a duplicate id."""
    taken = await runner.all(
        SQL.stage_rows,
        run_id=run_id,
        items=[row.item for row in rows],
        hashes=[row.hash for row in rows],
        raw_hashes=raw_hashes,
        fields=[row.fields.decode() for row in rows],
        photos=["\n".join(row.photos) for row in rows],
        refused=[
            msgspec.json.encode(row.refused).decode() if row.refused else "{}" for row in rows
        ],
    )
    positions = {row["position"] for row in taken}
    return [row for index, row in enumerate(rows, 1) if index not in positions]


async def note_reading(
    runner: Runner, run_id: int, *, rows: int, invalid: int, problems: int
) -> None:
    """Store the reading progress."""
    await runner.run(
        SQL.note_reading, run_id=run_id, rows_read=rows, invalid=invalid, problems=problems
    )


async def find_runs(
    runner: Runner,
    *,
    run_ids: Sequence[int] | None = None,
    customer: str | None = None,
    states: Sequence[str] | None = None,
    before: int | None = None,
    rows_max: int = 50,
) -> list[Run]:
    """Runs, newest first."""
    rows = await runner.all(
        SQL.runs,
        run_ids=None if run_ids is None else list(run_ids),
        customer=customer,
        states=states,
        before=before,
        rows_max=rows_max,
    )
    ended = [row["id"] for row in rows if row["is_whole"] and row["state"] in _APPLIED]
    undoable: set[int] = set()
    if ended:
        found = await runner.all(SQL.runs_to_undo, run_ids=ended, runs_kept=UNDOABLE_RUNS)
        undoable = {row["id"] for row in found if _undo_refusal(row) is None}
    return [_run(row, can_undo=row["id"] in undoable) for row in rows]


async def undo_refusal(runner: Runner, run_id: int) -> str | None:
    """Why a run cannot be undone; None if it can."""
    return _undo_refusal(
        await runner.one(SQL.runs_to_undo, run_ids=[run_id], runs_kept=UNDOABLE_RUNS)
    )


def _undo_refusal(run: Row) -> str | None:
    reason = None
    if run["undone_by"] is not None:
        reason = f"run {run['undone_by']} has already undone it"
    elif run["state"] not in _APPLIED:
        reason = f"it is {run['state']}, so it made no changes"
    elif run["format"] == UNDO_FORMAT:
        reason = "it undoes another run; run the catalogue again"
    elif run["format"] == SUPPLEMENTAL:
        reason = "it is a supplemental feed; run the previous file again"
    elif not run["is_whole"] or run["format"] == SAME_FORMAT:
        reason = "only a run of a whole catalogue can be undone; send the items as they were"
    elif run["later"]:
        reason = f"run {run['later'][0]} was applied since; undo that one first"
    elif run["newer"] >= UNDOABLE_RUNS:
        reason = f"only the last {UNDOABLE_RUNS} catalogues of a customer can be undone"
    elif not run["is_change"]:
        reason = "it changed no items"
    return reason


async def changes(runner: Runner, run_id: int, *, after: str, rows_max: int) -> list[Change]:
    """A page of a run's changes behind item `after`, by item."""
    rows = await runner.all(
        SQL.changes,
        run_id=run_id,
        after=after,
        rows_max=rows_max,
        characters_max=CHANGE_CHARACTERS_MAX,
    )
    return [
        from_row(
            Change, row, fields=_changed_fields(row), values=_PAIRS.decode(row["values"] or "{}")
        )
        for row in rows
    ]


def _changed_fields(row: Row) -> list[str]:
    has_other_photos = row["kind"] == "changed" and row["has_other_photos"]
    return [*row["fields"], *(["photos"] if has_other_photos else [])]


def pace_of(
    *, paced: float | None, paced_s: float | None, pending: int, rate_per_s: float
) -> tuple[float | None, float | None]:
    """Photos per second and the seconds left for `pending`.

    Computed from `paced` photos in `paced_s` seconds.

    None for the first seconds. The customer's rate limits the estimate after a burst.
    """
    if paced is None or paced_s is None or paced_s < PACE_KNOWN_S:
        return None, None
    per_s = paced / paced_s
    expected = min(per_s, rate_per_s)
    return round(per_s, 2), round(pending / expected, 1) if expected else None


def _run(row: Row, *, can_undo: bool) -> Run:
    by_outcome = msgspec.json.decode(row["by_outcome"] or "{}", type=dict[str, int])
    pending = max(0, row["photos"] - int(row["photos_decided"]))
    photos_per_s, eta_s = pace_of(
        paced=row["paced"],
        paced_s=row["paced_s"],
        pending=pending,
        rate_per_s=row["rate_per_s"],
    )
    return from_row(
        Run,
        row,
        run=row["id"],
        state=RunState(row["state"]),
        rows=row["rows_read"],
        photos_pending=pending,
        photos_by_outcome=dict(sorted(by_outcome.items())),
        photos_per_s=photos_per_s,
        eta_s=eta_s,
        sample=_SAMPLES.decode(row["sample"]) if row["sample"] else None,
        fault=_FAULTS.decode(row["fault"]) if row["fault"] else None,
        can_undo=can_undo,
    )


async def note_photos(
    runner: Runner,
    run_id: int,
    customer: str,
    *,
    recheck_s: float,
    is_whole: bool,
    refresh_s: float | None = None,
) -> None:
    """Store the photos to request and count all others; links stay as they are.

    Failed links skip whole runs (`upkeep`); a run of uploaded items is none. `refresh_s`: the run
    is about links, and good photos older than that are requested, 0 for none. Photos of unchanged
    items come last: the counts before include new and changed items only.
    """
    is_of_many = is_whole or refresh_s is not None
    await runner.run(
        SQL.note_round,
        run_id=run_id,
        customer=customer,
        is_round=is_whole,
        wait_s=None if is_of_many else SENT_WAIT_S,
    )
    await runner.run(SQL.count_refused, run_id=run_id)
    await runner.run(SQL.note_needs, run_id=run_id, customer=customer, recheck_s=recheck_s)
    await runner.run(SQL.count_known, run_id=run_id)
    if is_of_many:
        await runner.run(SQL.avoid_nested_loops)
    await runner.run(SQL.note_retries, run_id=run_id, customer=customer, refresh_s=refresh_s or 0.0)
    if is_of_many:
        await runner.run(SQL.allow_nested_loops)
    await runner.run(SQL.note_photos, run_id=run_id)


async def close_applied(runner: Runner, run_id: int, customer: str, *, is_whole: bool) -> None:
    """Mark a run with enqueued jobs as applied; delete data that no run needs."""
    await runner.run(SQL.note_applied, run_id=run_id)
    if is_whole:
        await runner.run(SQL.supersede_held, run_id=run_id, customer=customer)
        await runner.run(SQL.clear_staged, customer=customer)
        await runner.run(SQL.forget_older_before, customer=customer, runs_kept=UNDOABLE_RUNS)
    else:
        await runner.run(SQL.forget_staged, runs=[run_id])
    old = await runner.all(
        SQL.forget_runs,
        customer=customer,
        is_whole=is_whole,
        runs_kept=RUNS_KEPT if is_whole else SENT_RUNS_KEPT,
    )
    await forget(runner, [row["id"] for row in old])


async def stage_broken(runner: Runner, run_id: int, customer: str) -> None:
    """Stage the items with a failed link or another copy."""
    await runner.run(SQL.avoid_nested_loops)
    await runner.run(SQL.stage_broken, run_id=run_id, customer=customer)
    await runner.run(SQL.allow_nested_loops)


async def forget_comparison(runner: Runner, run_id: int) -> None:
    """Delete the changes found for a run; its rows stay staged."""
    for query in (SQL.forget_changes, SQL.forget_needs, SQL.forget_counts):
        await runner.run(query, runs=[run_id])


async def forget(runner: Runner, run_ids: list[int]) -> None:
    """Delete the rows of deleted runs."""
    if run_ids:
        for query in (
            SQL.forget_changes,
            SQL.forget_needs,
            SQL.forget_staged,
            SQL.forget_pace,
            SQL.forget_before,
        ):
            await runner.run(query, runs=run_ids)


async def insert_problems(runner: Runner, run_id: int, problems: list[RowProblem]) -> None:
    """Store `problems` in order."""
    await runner.run(
        SQL.insert_problems,
        run_id=run_id,
        numbers=[p.row for p in problems],
        lines=[p.line for p in problems],
        items=[p.item for p in problems],
        fields=[p.field for p in problems],
        codes=[p.code for p in problems],
        parameters=[msgspec.json.encode(p.values).decode() for p in problems],
    )


async def row_problems(
    runner: Runner, run_id: int, *, after: int, rows_max: int
) -> list[tuple[int, RowProblem]]:
    """(position, problem) of a page, without its text."""
    rows = await runner.all(SQL.problems, run_id=run_id, after=after, rows_max=rows_max)
    return [
        (
            row["id"],
            from_row(
                RowProblem, row, row=row["row_number"], values=_VALUES.decode(row["parameters"])
            ),
        )
        for row in rows
    ]


async def photo_problems(
    runner: Runner, run_id: int, *, after: int, rows_max: int
) -> list[tuple[int, PhotoProblem]]:
    """(position, photo) of a page, without its text."""
    rows = await runner.all(SQL.photo_problems, run_id=run_id, after=after, rows_max=rows_max)
    return [(row["id"], from_row(PhotoProblem, row, text="")) for row in rows]
