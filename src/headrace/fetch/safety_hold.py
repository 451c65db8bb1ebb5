"""When a run is held until a person confirms it: its file looks like an accident.

A held run is read and compared like any other and changes nothing. What it may remove is limited for each
customer and for the deployment; a share of 1 turns the limits off. A file without a proper end and one
without a valid row are held in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHRUNK_TO: Final = 10
"""A catalogue with at most one in so many of the published items is held, however few these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldLimits:
    """A run is held if it removes more than `share` of the published items and more than `items`."""

    share: float
    items: int


def hold_reason(
    limits: HoldLimits,
    *,
    rows_valid: int,
    published: int,
    missing: int,
    is_truncated: str | None,
    has_more_unreadable: bool = False,
    unreadable: int = 0,
) -> str | None:
    """Why a person must confirm the run before it is applied, or None.

    `missing` published items are in no row. `is_truncated` is where the file ends too early. `unreadable`
    rows have no readable id; `has_more_unreadable`: more than in the catalogue applied last.
    """
    if is_truncated:
        return f"truncated: {is_truncated}"
    if rows_valid == 0:
        return "empty: no valid row"
    if limits.share < 1:
        if rows_valid * SHRUNK_TO <= published:
            return f"shrunk: {rows_valid} valid rows where {published} items are published"
        if missing > limits.items and missing > limits.share * published:
            return f"removed: {missing} of {published} published items are in no row"
    if has_more_unreadable and missing:
        return (
            f"unreadable: {unreadable} rows have no readable id, and {missing} published items, which may"
            " be theirs, are in no row"
        )
    return None
