"""Names of users' things, and ids of ours.

A user's id travels through URLs, keys of Valkey, file names and log lines, so it is held to a set of
characters that needs no escaping in any of them. Ours are bigint from PostgreSQL, or UUIDv7 where the
maker is not the database (RFC 9562, section 5.7: sortable by time, so that indexes grow at one end).
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
_FOLDERS: Final = frozenset({".", ".."})


class InvalidId(InvalidInput):
    """A name given by a user holds characters that ids may not have, or is too long."""

    code = "invalid_id"


def require_id(what: str, value: str) -> str:
    """`value`, if it is a valid id; `what` names it in the message.

    Raises: InvalidId.
    """
    if USER_ID.fullmatch(value) is None:
        shown = value if len(value) <= 40 else f"{value[:40]}... ({len(value)} characters)"
        raise InvalidId(
            f"{what} {shown!r} is no valid id: use 1 to 128 of the characters A-Z a-z 0-9 . _ : @ ~ -"
        )
    return value


def require_new_id(what: str, value: str) -> str:
    """The same for a thing that is made: `.` and `..` are folders in an address, which browsers take away.

    What has such a name from before is still found by `require_id`.

    Raises: InvalidId.
    """
    if value in _FOLDERS:
        raise InvalidId(
            f"{what} {value!r} is no valid id: no address of a page or call could name it, as `.`"
            " and `..` are folders there; use a name with another character in it"
        )
    return require_id(what, value)


def new_uuid7() -> UUID:
    """A fresh UUIDv7: 48 bits of milliseconds, 74 random bits."""
    bits = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    bits = bits & ~(0xF << 76) | 0x7 << 76
    bits = bits & ~(0x3 << 62) | 0x2 << 62
    return UUID(int=bits)


def new_request_id() -> str:
    """A fresh UUIDv7 as text, a third of the cost of the above: it tells requests apart and guards nothing."""
    ms, low = time.time_ns() // 1_000_000, random.getrandbits(74)
    return (
        f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7{low >> 62:03x}-{0x8000 | low >> 48 & 0x3FFF:04x}"
        f"-{low & 0xFFFFFFFFFFFF:012x}"
    )
