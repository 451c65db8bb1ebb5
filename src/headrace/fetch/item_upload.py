"""Item upload: items without a catalogue file take the same validation and diff.

    items --validate--> staged --diff--> changes, photos, jobs  all in the caller's one transaction

Uploaded items and items of catalogues are one set, and the latest write wins. An upload holds
until a catalogue that starts later differs. A catalogue lists all items of its customer, so an
item that it omits is unpublished. For an item without fields only the photos change. Each call
creates one run per customer; a faulty item is a problem of its run and stays unchanged.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.applying import Applying
from headrace.fetch.errors import InvalidItems
from headrace.fetch.guard import Policy
from headrace.fetch.model import ITEMS_SENT_MAX, SentItem
from headrace.fetch.readers import Fault, RawRow
from headrace.fetch.sql import SQL
from headrace.fetch.staging import Staging
from headrace.fetch.validation import (
    Chunk,
    Rules,
    ValidatedRow,
    find_item_id,
    problem_of,
    set_content,
    validate_photos,
    validate_row,
)
from headrace.kernel.resilience import crash_point

FORMAT: Final = "items"
"""Format of runs of uploaded items."""
SENDING_AT_ONCE: Final = 4
"""Calls of a process that hold a connection; those of one customer wait for each other."""


class ItemUpload:
    """Uploads items without a catalogue."""

    def __init__(self, postgres: Postgres, applying: Applying, policy: Policy) -> None:
        self._postgres = postgres
        self._applying = applying
        self._policy = policy
        self._places = asyncio.Semaphore(SENDING_AT_ONCE)

    async def send(self, items: Sequence[SentItem], *, tx: Tx | None = None) -> list[int]:
        """Apply up to 1,000 items, all or none; return one run id per customer.

        All of it within `tx` if given.

        Raises: InvalidItems, CustomerUnknown.
        """
        if not 1 <= len(items) <= ITEMS_SENT_MAX:
            raise wrong_count(len(items))
        if tx is None:
            async with self._places, self._postgres.transaction() as own:
                return await self.send(items, tx=own)
        rules = await self._rules(tx)
        by_customer: dict[str, list[SentItem]] = defaultdict(list)
        seen: set[tuple[str, str]] = set()
        for item in items:
            key = (item.customer, find_item_id(item.item) or item.item)
            if key in seen:
                raise InvalidItems(
                    f"item {key[1][:200]!r} of customer {item.customer[:128]!r} occurs twice:"
                    " send each once"
                )
            seen.add(key)
            by_customer[item.customer].append(item)
        for customer in sorted(by_customer):
            await store.catalogues.get_customer(tx, customer)
        # In one order for all callers, since the items of each customer are locked.
        return [
            await self._send(tx, customer, by_customer[customer], rules)
            for customer in sorted(by_customer)
        ]

    async def _rules(self, tx: Tx) -> Rules:
        """Current rules, read in the transaction: a caller must not need a second connection."""
        found = await store.catalogues.find_schemas(tx)
        return Rules(self._policy, {one.category: one.schema for one in found})

    async def _send(self, tx: Tx, customer: str, items: list[SentItem], rules: Rules) -> int:
        # Lock before the insert, so that a later run of the customer has a higher id.
        await tx.one(SQL.lock_items, customer=customer)
        run_id: int = await tx.value(
            SQL.insert_run, customer=customer, file_name=FORMAT, format=FORMAT, is_whole=False
        )
        chunk, gone = _judge(items, await self._stored(tx, customer, items), rules)
        staging = Staging(self._postgres, run_id, customer, rules)
        await staging.stage_validated(tx, chunk)
        if gone:
            await tx.run(SQL.stage_gone, run_id=run_id, items=gone)
        await staging.note(tx, rows=len(items))
        await self._applying.apply(tx, run_id, customer, is_whole=False)
        crash_point("fetch.items_sent")
        return run_id

    async def _stored(self, tx: Tx, customer: str, items: list[SentItem]) -> dict[str, bytes]:
        """Stored fields of the items that are uploaded without fields."""
        bare = [find_item_id(item.item) for item in items if item.fields is None]
        if not any(bare):
            return {}
        rows = await tx.all(SQL.stored_fields, customer=customer, items=[i for i in bare if i])
        return {row["item"]: row["fields"].encode() for row in rows}


def _judge(
    items: list[SentItem], stored: dict[str, bytes], rules: Rules
) -> tuple[Chunk, list[str]]:
    """Validated rows of items, and the ids of items to unpublish."""
    chunk = Chunk()
    gone = []
    for number, item in enumerate(items, 1):
        raw = RawRow(number, number, _texts(item), item.photos)
        item_id = find_item_id(item.item)
        if item.gone and item_id is not None:
            gone.append(item_id)
            continue
        chunk.rows_count += 1
        faults: list[Fault]
        row: ValidatedRow | None
        if item.fields is None and item_id is not None:
            row = bare = ValidatedRow(number, number, item_id)
            faults = validate_photos(bare, item.photos, rules.policy)
            set_content(bare, stored.get(item_id, b"{}"))
        else:
            row, faults = validate_row(raw, rules)
        if row is not None:
            chunk.rows.append(row)
        named = row.item if row is not None else None
        chunk.problems.extend(problem_of(raw, named, fault) for fault in faults)
    return chunk, gone


def _texts(item: SentItem) -> dict[str, Any]:
    """The fields as texts, as a catalogue row has them."""
    values = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in (item.fields or {}).items()
        if value not in (None, "")
    }
    return {**values, "id": item.item}


def wrong_count(count: int) -> InvalidItems:
    """The error of a call with an invalid number of items."""
    return InvalidItems(f"{count} items in one call: send 1 to {ITEMS_SENT_MAX:,} at a time")
