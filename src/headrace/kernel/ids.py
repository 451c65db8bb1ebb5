"""Validation of users' ids, and new UUIDs.

A user's id occurs in URLs, Valkey keys, file names and log lines, so its characters need no
escaping in any of them. Our ids are bigint from PostgreSQL, or UUIDv7 if the database does not
create them (RFC 9562, section 5.7: sortable by time, so indexes grow at one end).
"""

from __future__ import annotations

import os
import random
import re
import time
from typing import Final
from uuid import UUID

from headrace.kernel.errors import InvalidInput

USER_ID: Final = re.compile(r"[A-Za-z0-9._:@~-]{1,128}")
_FREE_BITS: Final = ~(0xF << 76 | 0x3 << 62)
_FIXED_BITS: Final = 0x7 << 76 | 0x2 << 62
"""Version 7 and the variant of RFC 9562."""
_FOLDERS: Final = frozenset({".", ".."})


class InvalidId(InvalidInput):
    """A user's id has characters that are not permitted, or is too long."""

    code = "invalid_id"


def require_id(what: str, value: str) -> str:
    """Return `value` if it is a valid id; `what` names it in the error. Raises: InvalidId."""
    if USER_ID.fullmatch(value) is None:
        shown = value if len(value) <= 40 else f"{value[:40]}... ({len(value)} characters)"
        raise InvalidId(
            f"{what} {shown!r} is not a valid id: use 1 to 128 of the characters"
            " A-Z a-z 0-9 . _ : @ ~ -"
        )
    return value


def require_new_id(what: str, value: str) -> str:
    """Return `value` if it is a valid id for a new thing. Raises: InvalidId.

    `.` and `..` are refused because browsers remove them from URLs. `require_id` still finds
    existing things with these names.
    """
    if value in _FOLDERS:
        raise InvalidId(
            f"{what} {value!r} is not a valid id: URLs cannot contain `.` and `..` as names;"
            " use a name with another character"
        )
    return require_id(what, value)


def new_uuid7() -> UUID:
    """A new UUIDv7: 48 bits of milliseconds, 74 random bits."""
    bits = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return UUID(int=bits & _FREE_BITS | _FIXED_BITS)


def new_request_id() -> str:
    """A new UUIDv7 as text from a fast random source; it is unique but not secret."""
    bits = (time.time_ns() // 1_000_000) << 80 | random.getrandbits(80)
    digits = f"{bits & _FREE_BITS | _FIXED_BITS:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
