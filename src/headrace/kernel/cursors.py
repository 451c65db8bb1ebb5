"""Cursors: where a list goes on, opaque to whoever holds it and signed by us.

A cursor is `base64url(key id . position . signature)`. The signature also covers the list's name and its filter, so a
cursor of one list is refused by another and by the same one asked differently, instead of skipping rows
silently. It holds a position only, no rights: whoever reads the next page is checked as for the first.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.kernel.errors import Malformed
from headrace.kernel.secrets import Key

USE: Final = "cursor"
"""What the key of cursors is derived for: `derive_key(root, USE)`."""
SIGNATURE_BYTES: Final = 16
CURSOR_CHARACTERS_MAX: Final = 1_024


class CursorInvalid(Malformed):
    """A cursor was changed, belongs to another list or filter, or was signed with a key that is gone."""

    code = "cursor.invalid"

    def __init__(self) -> None:
        super().__init__(
            "cursor: not one of this list with this filter: take it unchanged from the page before, keep"
            " the filter, or leave it out to begin at the first page"
        )


def sign_cursor(key: Key, listing: str, filters: Mapping[str, Any], position: Any) -> str:
    """A cursor that continues `listing` (its name) under `filters` after `position` (JSON)."""
    plain = key.id.encode() + b"." + msgspec.json.encode(position)
    signature = key.sign(_covered(listing, filters, plain))[:SIGNATURE_BYTES]
    return base64.urlsafe_b64encode(signature + plain).rstrip(b"=").decode()


def read_cursor(key: Key, listing: str, filters: Mapping[str, Any], cursor: str) -> Any:
    """The position in a cursor of this very listing. Raises: CursorInvalid."""
    if len(cursor) > CURSOR_CHARACTERS_MAX:
        raise CursorInvalid
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error) as error:
        raise CursorInvalid from error
    signature, plain = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
    key_id, _, position = plain.partition(b".")
    if key_id != key.id.encode() or not key.verify_start(
        _covered(listing, filters, plain), signature
    ):
        raise CursorInvalid
    return msgspec.json.decode(position)


def _covered(listing: str, filters: Mapping[str, Any], plain: bytes) -> bytes:
    kept = sorted((name, value) for name, value in filters.items() if value is not None)
    return msgspec.json.encode([listing, kept]) + b"\0" + plain
