"""What operators look for: things that failed or wait for a person, and things by name.

Every read is bounded, because the console repeats it every few seconds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from headrace.engines.postgres import Postgres, from_row
from headrace.fetch.model import Run
from headrace.fetch.sql import SQL
from headrace.fetch.store.runs import find_runs
from headrace.fetch.validation import find_item_id

TROUBLES_COUNTED_MAX: Final = 1_000
"""Things of one kind are counted up to this."""
SEARCH_CUSTOMERS_MAX: Final = 500
"""A search for items looks at so many customers, by name."""
PART_CHARACTERS_MAX: Final = 128
_LAST: Final = "\U0010ffff"
"""Sorts after every character of an id."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Things of one kind that failed or wait for a person."""

    kind: str
    """`held_item`, `held_run`, `source` (not imported) or `webhook` (not accepted)."""
    things: int
    """Counted up to 1,000."""
    since_at: datetime | None
    """The earliest moment."""
    cause: str | None
    """The commonest reason or error."""
    customer: str
    """A customer of one of them."""
    run: int | None
    """The newest run of them, if they are runs or sources."""


class ItemName(NamedTuple):
    """An item and its customer."""

    customer: str
    item: str


class Lookup:
    """Troubles, and customers and items by the begin of their name: `fetch.lookup`."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def troubles(self) -> list[Trouble]:
        """Held items and runs, sources that fail, and webhooks that fail or are disabled."""
        rows = await self._postgres.all(SQL.troubles, rows_max=TROUBLES_COUNTED_MAX)
        return [from_row(Trouble, row) for row in rows]

    async def faulty_runs(self, *, runs_max: int = 200) -> list[Run]:
        """Newest run of each customer, if it was refused or abandoned, or lacks photos."""
        rows = await self._postgres.all(SQL.faulty_newest_runs, rows_max=runs_max)
        ids = [row["id"] for row in rows]
        return await find_runs(self._postgres, run_ids=ids, rows_max=runs_max) if ids else []

    async def customers(self, part: str, *, rows_max: int = 5) -> list[str]:
        """Customers whose name contains `part`; those that begin with it first."""
        if not _is_part(part):
            return []
        rows = await self._postgres.all(SQL.customers_like, part=part, rows_max=rows_max)
        return [row["customer"] for row in rows]

    async def items(self, part: str, *, rows_max: int = 5) -> list[ItemName]:
        """Items whose id begins with `part`, of the first 500 customers by name."""
        found = find_item_id(part) if _is_part(part) else None
        if found is None:
            return []
        rows = await self._postgres.all(
            SQL.items_like,
            part=found,
            last=found + _LAST,
            customers_max=SEARCH_CUSTOMERS_MAX,
            rows_max=rows_max,
        )
        return [ItemName(row["customer"], row["item"]) for row in rows]


def _is_part(part: str) -> bool:
    return 0 < len(part) <= PART_CHARACTERS_MAX and part.isprintable()
