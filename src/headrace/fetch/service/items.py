"""The verbs of items and of their results."""

from __future__ import annotations

import msgspec

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.errors import ItemUnknown
from headrace.fetch.item_ids import find_item_id
from headrace.fetch.model import BIGINT_MAX, Result, StoredItem
from headrace.fetch.store.sql import SQL
from headrace.kernel.ids import USER_ID
from headrace.kernel.routes import PAGE_ROWS_MAX


class Items:
    """Items as they stand, and what was published of them."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def get(self, customer: str, item: str) -> StoredItem:
        """An item as it stands, with its photos. Raises: ItemUnknown."""
        found = find_item_id(item) if USER_ID.fullmatch(customer) else None
        row = found and await self._postgres.one(SQL.item, customer=customer, item=found)
        if not row:
            raise ItemUnknown(
                f"customer {customer[:128]!r} has no item {item[:200]!r}: no catalogue named it"
            )
        key = (customer, row["item"])
        photos = await store.photos.item_photos(self._postgres, [key])
        return StoredItem(
            customer=customer,
            id=row["item"],
            version=row["version"],
            is_gone=row["is_gone"],
            run=row["run_id"],
            fields=msgspec.json.decode(row["fields"]),
            photos=photos[key],
        )

    async def results(self, *, after: int, results_max: int, customer: str | None) -> list[Result]:
        """Results behind `after` in the order of their commits."""
        after = min(max(0, after), BIGINT_MAX)
        rows_max = min(max(1, results_max), PAGE_ROWS_MAX)
        return await store.results.find_results(
            self._postgres, after=after, rows_max=rows_max, customer=customer
        )

    async def newest_results(
        self, *, before: int | None, results_max: int, customer: str | None
    ) -> list[Result]:
        """The newest results, those before number `before`, newest first."""
        return await store.results.results_before(
            self._postgres,
            before=BIGINT_MAX if before is None else min(max(0, before), BIGINT_MAX),
            rows_max=min(max(1, results_max), PAGE_ROWS_MAX),
            customer=customer,
        )
