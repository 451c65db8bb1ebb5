"""Bounds that more than one room needs, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.kernel.errors import HeadraceError

PAYLOAD_BYTES_MAX: Final = 64 * 1024
"""A job's payload: larger things belong in the object store, with their key in the payload."""

PAGE_ROWS_MAX: Final = 1000
"""Rows of one page of any listing."""


class ItemsMax(NamedTuple):
    """The most items that a route takes in one JSON array; stands in its handler's `opt` as `items_max`."""

    most: int
    refuse: Callable[[int], HeadraceError]
    """The room's error for a list of at least so many items."""
