"""Supplemental feeds: files that overlay price and stock of items by id.

    file --readers--> rows --validation--> staged --overlay_diff--> changes, overlays, jobs
    item as published = fields of the catalogue, overlaid by those of the supplemental feed

A customer has one supplemental feed beside its catalogue. A row has an id and some of FIELDS;
other columns and photos are ignored. It neither adds nor removes items. A file is the whole feed:
the overlay of an item stays, whatever the catalogue contains, until a file without its id is
applied. Google Merchant Center has the same rules.

Overlays are stored beside the items and merged when an item is read or published. So catalogues
are compared as before, and a field returns to the value of the newest catalogue. An overlay of an
id that no catalogue lists yet is stored too, reported as `unknown_item`, and takes effect with the
item. An invalid row leaves the overlay of its item as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace.engines.postgres import Tx
from headrace.fetch.guard import Policy
from headrace.fetch.readers import Fault, RawRow
from headrace.fetch.schemas import DEFAULT, FieldRule, Schema
from headrace.fetch.sql import SQL
from headrace.fetch.validation import Chunk, Rules, Staging, id_problem

_PRICE: Final = FieldRule(type="price")
_COUNT: Final = FieldRule(type="number", least=0)
_TEXT: Final = FieldRule(length_most=100)
FIELDS: Final = {
    "price": _PRICE,
    "old_price": _PRICE,
    "oldprice": _PRICE,
    "currency": _TEXT,
    "availability": _TEXT,
    "available": _TEXT,
    "stock": _COUNT,
    "quantity": _COUNT,
}
"""The fields of a row, with their rules; `oldprice` and `available` are names of YML."""


def supplemental_rules(policy: Policy) -> Rules:
    """The validation rules of a supplemental feed, whose rows need no name."""
    return Rules(policy, {DEFAULT: Schema(fields={"name": FieldRule(), **FIELDS})})


def supplemental_rows(rows: Iterator[RawRow]) -> Iterator[RawRow]:
    """Rows with their ids and FIELDS alone; a row without any of FIELDS has a fault."""
    for row in rows:
        item = row.item
        row.photos = []
        row.values = {name: row.values[name] for name in FIELDS if name in row.values}
        if row.fault is None and item.strip() and not row.values:
            row.fault = Fault("row", "nothing_supplemental", {"fields": ", ".join(FIELDS)})
        row.values["id"] = item
        yield row


class SupplementalStaging(Staging):
    """Stages the rows of a supplemental feed."""

    async def stage_validated(
        self, tx: Tx, chunk: Chunk, hashes: dict[int, bytes | None] | None = None
    ) -> None:
        """Stage validated rows; report those whose item is not published."""
        valid = [row for row in chunk.rows if row.hash is not None]
        known = await tx.all(
            SQL.stored_fields, customer=self._customer, items=[row.item for row in valid]
        )
        items = {row["item"] for row in known}
        chunk.problems += [
            id_problem(row, "unknown_item") for row in valid if row.item not in items
        ]
        await super().stage_validated(tx, chunk, hashes)
