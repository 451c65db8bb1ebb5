"""Bounds that more than one room needs, each with its reason."""

from __future__ import annotations

from typing import Final

PAYLOAD_BYTES_MAX: Final = 64 * 1024
"""A job's payload: larger things belong in the object store, with their key in the payload."""

PAGE_ROWS_MAX: Final = 1000
"""Rows of one page of any listing."""
