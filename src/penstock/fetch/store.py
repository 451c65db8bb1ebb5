"""The truth of fetch in PostgreSQL: one method a query, values in, values out; no transaction begun here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.engines.postgres import Row, Runner
from penstock.engines.sql import load_queries
from penstock.fetch.intake import IntakeRow
from penstock.fetch.model import (
    RUNS_KEPT,
    Customer,
    Item,
    ItemPhoto,
    Link,
    PhotoProblem,
    Result,
    RowProblem,
    Run,
    RunState,
)
from penstock.fetch.outcomes import describe_outcome

SQL: Final = load_queries("penstock.fetch")
_PHOTOS: Final = msgspec.json.Decoder(list[ItemPhoto])


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one photo of one run."""

    run: int
    customer: str
    item: str
    url: str
    outcome: str
    sha256: str | None = None
    etag: str | None = None
    last_modified: str | None = None
    touches_link: bool = True
    """False where the outcome was taken over from the link itself."""

    @property
    def is_good(self) -> bool:
        """Whether the photo is there."""
        return self.outcome in ("stored", "unchanged", "known")


@dataclass(frozen=True, slots=True)
class NewPhoto:
    """A content whose bytes are stored."""

    sha256: str
    key: str
    format: str
    size_bytes: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class NewResult:
    """A version of an item, ready to be published."""

    customer: str
    item: str
    version: int
    action: str
    fields: str
    photos: list[ItemPhoto]


async def customers(runner: Runner, customer: str | None = None) -> list[Customer]:
    """Every customer, or the one of that name."""
    rows = await runner.all(SQL.customers, customer=customer)
    return [Customer(**dict(row)) for row in rows]


async def set_customer(runner: Runner, customer: Customer) -> None:
    """Make or change a customer."""
    await runner.run(SQL.set_customer, **msgspec.structs.asdict(customer))


async def stage(runner: Runner, run_id: int, rows: list[IntakeRow]) -> list[IntakeRow]:
    """Stage `rows`; return those not taken because their id was there before."""
    taken = await runner.all(
        SQL.stage_rows,
        run_id=run_id,
        items=[row.item for row in rows],
        hashes=[row.hash for row in rows],
        fields=[row.fields.decode() for row in rows],
        photos=[msgspec.json.encode(row.photos).decode() for row in rows],
        refused=[msgspec.json.encode(row.refused).decode() for row in rows],
    )
    positions = {row["position"] for row in taken}
    return [row for index, row in enumerate(rows, 1) if index not in positions]


async def insert_problems(runner: Runner, run_id: int, problems: list[RowProblem]) -> None:
    """Keep `problems` in order."""
    await runner.run(
        SQL.insert_problems,
        run_id=run_id,
        numbers=[p.row for p in problems],
        lines=[p.line for p in problems],
        items=[p.item for p in problems],
        fields=[p.field for p in problems],
        codes=[p.code for p in problems],
        texts=[p.text for p in problems],
    )


async def problems(
    runner: Runner, run_id: int, *, after: int, rows_max: int
) -> list[tuple[int, RowProblem]]:
    """(position, problem) of a page."""
    rows = await runner.all(SQL.problems, run_id=run_id, after=after, rows_max=rows_max)
    return [
        (
            row["id"],
            RowProblem(
                row=row["row_number"],
                line=row["line"],
                item=row["item"],
                field=row["field"],
                code=row["code"],
                text=row["problem"],
            ),
        )
        for row in rows
    ]


async def photo_problems(
    runner: Runner, run_id: int, *, after: int, rows_max: int
) -> list[tuple[int, PhotoProblem]]:
    """(position, problem) of a page."""
    rows = await runner.all(SQL.photo_problems, run_id=run_id, after=after, rows_max=rows_max)
    return [
        (
            row["id"],
            PhotoProblem(
                item=row["item"],
                url=row["url"],
                outcome=row["outcome"],
                text=describe_outcome(row["outcome"]),
            ),
        )
        for row in rows
    ]


async def runs(
    runner: Runner, *, run_id: int | None = None, customer: str | None = None, rows_max: int = 50
) -> list[Run]:
    """Runs, newest first."""
    rows = await runner.all(SQL.runs, run_id=run_id, customer=customer, rows_max=rows_max)
    return [_run(row) for row in rows]


def _run(row: Row) -> Run:
    by_outcome = msgspec.json.decode(row["by_outcome"] or "{}", type=dict[str, int])
    return Run(
        run=row["id"],
        customer=row["customer"],
        state=RunState(row["state"]),
        file_name=row["file_name"],
        format=row["format"],
        reason=row["reason"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        rows=row["rows_read"],
        invalid=row["invalid"],
        new=row["new"],
        changed=row["changed"],
        unchanged=row["unchanged"],
        gone=row["gone"],
        problems=row["problems"],
        items_pending=row["items_pending"],
        photos=row["photos"],
        photos_pending=max(0, row["photos"] - int(row["photos_decided"])),
        photos_by_outcome=dict(sorted(by_outcome.items())),
    )


async def apply_changes(runner: Runner, run_id: int, customer: str, *, recheck_s: float) -> None:
    """Make items what the run's changes say and note which photos to ask for."""
    await runner.run(SQL.store_items, run_id=run_id, customer=customer)
    await runner.run(SQL.mark_gone, run_id=run_id, customer=customer)
    await note_photos(runner, run_id, customer, recheck_s=recheck_s)
    await runner.run(SQL.refuse_links, run_id=run_id, customer=customer)


async def note_photos(runner: Runner, run_id: int, customer: str, *, recheck_s: float) -> None:
    """Note the photos to ask for and count all others; links stay as they are.

    Those of unchanged items come last: the counts before are of new and changed items alone.
    """
    await runner.run(SQL.count_refused, run_id=run_id)
    await runner.run(SQL.note_needs, run_id=run_id, customer=customer, recheck_s=recheck_s)
    await runner.run(SQL.count_known, run_id=run_id)
    await runner.run(SQL.avoid_nested_loops)
    await runner.run(SQL.note_retries, run_id=run_id, customer=customer)
    await runner.run(SQL.allow_nested_loops)
    await runner.run(SQL.note_photos, run_id=run_id)


async def close_applied(runner: Runner, run_id: int, customer: str) -> None:
    """The run's jobs are enqueued: note that, and drop what no run needs any more."""
    await runner.run(SQL.note_applied, run_id=run_id)
    await runner.run(SQL.supersede_held, run_id=run_id, customer=customer)
    await runner.run(SQL.clear_staged, customer=customer)
    await runner.run(SQL.forget_runs, customer=customer, runs_kept=RUNS_KEPT)


async def photo_states(runner: Runner, keys: Sequence[tuple[int, str, str, str]]) -> list[Row]:
    """For each (run, customer, item, url), in order: is it needed, decided, and what is its link."""
    rows = await runner.all(
        SQL.photo_states,
        runs=[key[0] for key in keys],
        customers=[key[1] for key in keys],
        items=[key[2] for key in keys],
        urls=[key[3] for key in keys],
    )
    return sorted(rows, key=lambda row: int(row["position"]))


async def known_photos(runner: Runner, hashes: list[str]) -> set[str]:
    """Which of these contents are recorded, hence stored."""
    return {row["sha256"] for row in await runner.all(SQL.known_photos, hashes=hashes)}


async def insert_photos(runner: Runner, photos: list[NewPhoto]) -> None:
    """Record contents; those recorded already stay as they are."""
    await runner.run(
        SQL.insert_photos,
        hashes=[p.sha256 for p in photos],
        keys=[p.key for p in photos],
        formats=[p.format for p in photos],
        sizes_bytes=[p.size_bytes for p in photos],
        widths=[p.width for p in photos],
        heights=[p.height for p in photos],
    )


async def decide(runner: Runner, decisions: list[Decision]) -> None:
    """Write outcomes to links and needs and count them; a need that has one keeps it."""
    links = [d for d in decisions if d.touches_link]
    if links:
        await runner.run(
            SQL.upsert_links,
            customers=[d.customer for d in links],
            urls=[d.url for d in links],
            outcomes=[d.outcome for d in links],
            hashes=[d.sha256 for d in links],
            etags=[d.etag for d in links],
            last_modifieds=[d.last_modified for d in links],
            are_good=[d.is_good for d in links],
            runs=[d.run for d in links],
        )
    await runner.run(
        SQL.decide_needs,
        runs=[d.run for d in decisions],
        items=[d.item for d in decisions],
        urls=[d.url for d in decisions],
        outcomes=[d.outcome for d in decisions],
    )


async def item_photos(
    runner: Runner, keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], list[ItemPhoto]]:
    """The photos of each (customer, item), in the order of the item's list."""
    found: dict[tuple[str, str], list[ItemPhoto]] = {key: [] for key in keys}
    rows = await runner.all(
        SQL.photos_of_items, customers=[k[0] for k in keys], items=[k[1] for k in keys]
    )
    for row in rows:
        values = {name: row[name] for name in ItemPhoto.__struct_fields__}
        found[row["customer"], row["item"]].append(ItemPhoto(**values))
    return found


async def insert_results(runner: Runner, results: list[NewResult]) -> list[int]:
    """Publish `results` in order; return the `seq` of each that was not published before."""
    rows = await runner.all(
        SQL.insert_results,
        customers=[r.customer for r in results],
        items=[r.item for r in results],
        versions=[r.version for r in results],
        actions=[r.action for r in results],
        fields=[r.fields for r in results],
        photos=[msgspec.json.encode(r.photos).decode() for r in results],
    )
    return [row["seq"] for row in rows]


def _result(row: Row) -> Result:
    return Result(
        seq=row["seq"],
        at=row["at"],
        customer=row["customer"],
        id=row["item"],
        version=row["version"],
        action=row["action"],
        fields=msgspec.json.decode(row["fields"]),
        photos=_PHOTOS.decode(row["photos"]),
    )


async def last_results(
    runner: Runner, keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[str, str]]:
    """(action, photos as they are kept) of what was published last of each (customer, item)."""
    rows = await runner.all(
        SQL.last_results, customers=[k[0] for k in keys], items=[k[1] for k in keys]
    )
    return {(row["customer"], row["item"]): (row["action"], row["photos"]) for row in rows}


def has_same_photos(kept: str, photos: list[ItemPhoto]) -> bool:
    """Whether the photos of a result show the same copies as `photos`."""
    return [photo.key for photo in _PHOTOS.decode(kept)] == [photo.key for photo in photos]


async def results(
    runner: Runner, *, after: int, rows_max: int, customer: str | None
) -> list[Result]:
    """A page of results."""
    rows = await runner.all(SQL.results, after=after, rows_max=rows_max, customer=customer)
    return [_result(row) for row in rows]


async def newest_result(runner: Runner, seq: int) -> Result | None:
    """The newest result of the item that result `seq` is of."""
    row = await runner.one(SQL.newest_result, seq=seq)
    return None if row is None else _result(row)


def item_of(found: Result, action: str) -> Item:
    """What a handler is called with."""
    return Item(
        customer=found.customer,
        id=found.id,
        version=found.version,
        action=action,
        fields=found.fields,
        photos=found.photos,
    )


async def links_of_url(runner: Runner, url: str) -> list[Link]:
    """What each customer's runs found behind `url`."""
    rows = await runner.all(SQL.links_of_url, url=url)
    names = [name for name in Link.__struct_fields__ if name not in ("run", "text")]
    return [
        Link(
            run=row["run_id"],
            text=describe_outcome(row["outcome"]),
            **{name: row[name] for name in names},
        )
        for row in rows
    ]
