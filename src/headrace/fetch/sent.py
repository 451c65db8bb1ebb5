"""Items sent by themselves, by those who have no catalogue files: the same diff, for these items alone.

    items --judged--> staged --diff--> changes, photos, jobs      all in the caller's one transaction

They belong to the same set as those of catalogues, and the last word counts: what is sent here holds until
a catalogue that was begun later says otherwise, and a catalogue rules over all items of its customer: one that
it does not name is gone. Of an item sent without fields only the photos change. Each call is a run of
each customer in it, to be followed like a catalogue's; a faulty item is told in the run and left as it was.
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
from headrace.fetch.errors import CustomerUnknown, InvalidItems
from headrace.fetch.guard import Policy
from headrace.fetch.intake import (
    Chunk,
    IntakeRow,
    Rules,
    judge_photos,
    judge_row,
    problem_of,
    seal_row,
)
from headrace.fetch.item_ids import find_item_id
from headrace.fetch.model import ITEMS_SENT_MAX, SentItem
from headrace.fetch.readers import Fault, RawRow
from headrace.fetch.staging import Staging
from headrace.fetch.store.sql import SQL
from headrace.kernel.ids import USER_ID
from headrace.kernel.resilience import crash_point

FORMAT: Final = "items"
"""Of runs of items sent by themselves."""
SENDING_AT_ONCE: Final = 4
"""Calls of a process that hold a connection: those of one customer wait for each other in the database."""


class Sent:
    """Takes items in without a catalogue."""

    def __init__(self, postgres: Postgres, applying: Applying, policy: Policy) -> None:
        self._postgres = postgres
        self._applying = applying
        self._policy = policy
        self._places = asyncio.Semaphore(SENDING_AT_ONCE)

    async def send(self, items: Sequence[SentItem], *, tx: Tx | None = None) -> list[int]:
        """Apply up to 1,000 items, all or none, within `tx` if given; the runs, one a customer.

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
                    f"item {key[1][:200]!r} of customer {item.customer[:128]!r} is in the call twice:"
                    " send each once"
                )
            seen.add(key)
            by_customer[item.customer].append(item)
        for customer in sorted(by_customer):
            is_name = USER_ID.fullmatch(customer) is not None
            if not is_name or not await store.customers.find_customers(tx, customer):
                raise CustomerUnknown(customer)
        # In one order for all callers, for each customer's items are locked.
        return [
            await self._send(tx, customer, by_customer[customer], rules)
            for customer in sorted(by_customer)
        ]

    async def _rules(self, tx: Tx) -> Rules:
        """Asked in the transaction: many callers that each hold one connection must not wait for a second."""
        found = await store.schemas.find_schemas(tx)
        return Rules(self._policy, {one.category: one.schema for one in found})

    async def _send(self, tx: Tx, customer: str, items: list[SentItem], rules: Rules) -> int:
        # The lock comes before the number: a later run of the customer has a higher one.
        await tx.one(SQL.lock_items, customer=customer)
        run_id: int = await tx.value(
            SQL.insert_run, customer=customer, file_name=FORMAT, format=FORMAT, is_whole=False
        )
        chunk, gone = _judge(items, await self._stored(tx, customer, items), rules)
        staging = Staging(self._postgres, run_id, customer, rules)
        await staging.stage_judged(tx, chunk)
        if gone:
            await tx.run(SQL.stage_gone, run_id=run_id, items=gone)
        await staging.note(tx, rows=len(items))
        await self._applying.apply(tx, run_id, customer, is_whole=False)
        crash_point("fetch.items_sent")
        return run_id

    async def _stored(self, tx: Tx, customer: str, items: list[SentItem]) -> dict[str, bytes]:
        """The fields of those that are sent without any, as they stand."""
        bare = [find_item_id(item.item) for item in items if item.fields is None]
        if not any(bare):
            return {}
        rows = await tx.all(SQL.stored_fields, customer=customer, items=[i for i in bare if i])
        return {row["item"]: row["fields"].encode() for row in rows}


def _judge(
    items: list[SentItem], stored: dict[str, bytes], rules: Rules
) -> tuple[Chunk, list[str]]:
    """The rows of items, and the ids of those that are gone."""
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
        row: IntakeRow | None
        if item.fields is None and item_id is not None:
            row = bare = IntakeRow(number, number, item_id)
            faults = judge_photos(bare, item.photos, rules.policy)
            seal_row(bare, stored.get(item_id, b"{}"))
        else:
            row, faults = judge_row(raw, rules)
        if row is not None:
            chunk.rows.append(row)
        named = row.item if row is not None else None
        chunk.problems.extend(problem_of(raw, named, fault) for fault in faults)
    return chunk, gone


def _texts(item: SentItem) -> dict[str, Any]:
    """The fields as a catalogue's row has them: texts."""
    values = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in (item.fields or {}).items()
        if value not in (None, "")
    }
    return {**values, "id": item.item}


def wrong_count(count: int) -> InvalidItems:
    """The error of a call with `count` items."""
    return InvalidItems(f"{count} items in one call: send 1 to {ITEMS_SENT_MAX:,} at a time")
