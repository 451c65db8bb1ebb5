"""When a catalogue is held until a person confirms it: its file looks like an accident.

Unpublishing a shop is worse than asking. What is held is read and compared like any other, nothing more.
"""

from __future__ import annotations

from typing import Final

SHRUNK_TO: Final = 10
"""A catalogue of one in so many of the published items, or less, is taken for an accident."""


def hold_reason(
    *,
    rows_valid: int,
    published: int,
    is_truncated: str | None,
    unreadable: int = 0,
    missing: int = 0,
) -> str | None:
    """Why a catalogue is to be confirmed by a person before it is applied, or None.

    `is_truncated` is where the file ends too early; `unreadable` rows have ids that cannot be read, and
    `missing` published items, which may be theirs, are in no row.
    """
    if is_truncated:
        return f"truncated: {is_truncated}"
    if rows_valid == 0:
        return "empty: no valid row"
    if rows_valid * SHRUNK_TO <= published:
        return f"shrunk: {rows_valid} valid rows where {published} items are published"
    if unreadable and missing:
        return (
            f"unreadable: {unreadable} rows have no readable id, and {missing} published items, which may"
            " be theirs, are in no row"
        )
    return None
