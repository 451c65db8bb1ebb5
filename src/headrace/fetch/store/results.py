"""Results: versions of items as they were published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.engines.postgres import Row, Runner
from headrace.fetch.model import Item, ItemPhoto, Result
from headrace.fetch.store.sql import SQL

_PHOTOS: Final = msgspec.json.Decoder(list[ItemPhoto])


@dataclass(frozen=True, slots=True)
class NewResult:
    """A version of an item, ready to be published."""

    customer: str
    item: str
    version: int
    action: str
    fields: str
    photos: list[ItemPhoto]


async def insert_results(runner: Runner, results: list[NewResult]) -> list[tuple[int, str]]:
    """Publish `results` in order; return `seq` and customer of each that was not published before."""
    rows = await runner.all(
        SQL.insert_results,
        customers=[r.customer for r in results],
        items=[r.item for r in results],
        versions=[r.version for r in results],
        actions=[r.action for r in results],
        fields=[r.fields for r in results],
        photos=[msgspec.json.encode(r.photos).decode() for r in results],
    )
    return [(row["seq"], row["customer"]) for row in rows]


def result_of(row: Row) -> Result:
    """A row as a result."""
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


async def find_results(
    runner: Runner, *, after: int, rows_max: int, customer: str | None
) -> list[Result]:
    """A page of results."""
    rows = await runner.all(SQL.results, after=after, rows_max=rows_max, customer=customer)
    return [result_of(row) for row in rows]


async def results_before(
    runner: Runner, *, before: int, rows_max: int, customer: str | None
) -> list[Result]:
    """A page of results from the newest on."""
    rows = await runner.all(SQL.results_before, before=before, rows_max=rows_max, customer=customer)
    return [result_of(row) for row in rows]


async def newest_result(runner: Runner, seq: int) -> Result | None:
    """The newest result of the item that result `seq` is of."""
    row = await runner.one(SQL.newest_result, seq=seq)
    return None if row is None else result_of(row)


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
