"""Safety hold: a run whose file looks like an accident waits for confirmation.

A held run is read and compared, but not applied. The number of items that a run may remove is
limited per customer and for the deployment; a share of 1 disables these limits. A truncated file
and a file without a valid row are always held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.applying import slow_value
from headrace.fetch.readers import Truncated
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.fetch.staging import Reading

SHRUNK_TO: Final = 10
"""A catalogue is held if its valid rows are at most this fraction (1/10) of the published items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldLimits:
    """A run is held if it removes more than `share` of the published items and over `items`."""

    share: float
    items: int


def hold_reason(
    limits: HoldLimits,
    *,
    rows_valid: int,
    published: int,
    missing: int,
    truncated: str | None,
    has_more_unreadable: bool = False,
    unreadable: int = 0,
) -> str | None:
    """The reason why a run must be confirmed before it is applied, or None.

    `missing` published items are in no row. `truncated` describes where the file ends too early.
    `unreadable` rows have no valid id; `has_more_unreadable` means more than in the last applied
    catalogue.
    """
    if truncated:
        return f"truncated: {truncated}"
    if rows_valid == 0:
        return "empty: no valid row"
    if limits.share < 1:
        if rows_valid * SHRUNK_TO <= published:
            return f"shrunk: {rows_valid} valid rows, but {published} items are published"
        if missing > limits.items and missing > limits.share * published:
            return f"removed: {missing} of {published} published items are in no row"
    if has_more_unreadable and missing:
        return (
            f"unreadable: {unreadable} rows have no readable id, and {missing} published items,"
            " which may be theirs, are in no row"
        )
    return None


class SafetyHold:
    """Decides whether a run that was read is held."""

    def __init__(self, postgres: Postgres, config: FetchConfig) -> None:
        self._postgres = postgres
        self._config = config

    async def find_reason(self, run_id: int, customer: str, reading: Reading) -> str | None:
        """Return the reason why a run is held, or None.

        Sets the fault of `reading` if the file seems truncated.
        """
        await self._check_line_break(run_id, customer, reading)
        run = {"run_id": run_id, "customer": customer}
        postgres = self._postgres
        before = reading.unreadable and await slow_value(postgres, SQL.unreadable_before, **run)
        [limits] = await store.catalogues.find_customers(postgres, customer)
        share, items = limits.hold_share, limits.hold_items
        return hold_reason(
            HoldLimits(
                share=self._config.hold_share if share is None else share,
                items=self._config.hold_items if items is None else items,
            ),
            rows_valid=await slow_value(postgres, SQL.staged_count, run_id=run_id),
            published=await slow_value(postgres, SQL.published_count, customer=customer),
            missing=await slow_value(postgres, SQL.missing_count, **run),
            truncated=reading.truncated,
            has_more_unreadable=reading.unreadable > before,
            unreadable=reading.unreadable,
        )

    async def _check_line_break(self, run_id: int, customer: str, reading: Reading) -> None:
        """Treat a table as truncated if only the last applied one had a final line break."""
        if reading.has_line_break is None:
            return
        had_line_break = await self._postgres.value(
            SQL.note_line_break,
            run_id=run_id,
            customer=customer,
            has_line_break=reading.has_line_break,
        )
        if had_line_break and not reading.has_line_break and reading.fault is None:
            cut = Truncated("truncated_end", reading.last_line)
            reading.truncated, reading.fault = cut.where, cut.fault
