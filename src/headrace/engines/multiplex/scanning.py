"""Steps through keys: through all keys of a single server, or hash slot by hash slot in a cluster.

In a cluster a pattern with a hash tag makes SCAN go through that hash slot alone, so each part is asked for on its own,
where it is; without one a part would cost a walk through everything. A cursor of a cluster is `<cursor>@<part>`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.engines.multiplex import Multiplexer

BEGIN: Final = b"0"
"""Where a scan begins, and what it tells at the end."""
STEP: Final = 1_000


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that begin with one of `starts`, each with a hash tag of its own; `pattern` matches all of them."""

    pattern: str
    starts: Sequence[str]


async def scan(line: Multiplexer, keys: Keys, cursor: bytes) -> tuple[bytes, list[str]]:
    """Where to go on, and some of the keys. Raises: ValkeyDown."""
    if not await line.is_cluster():
        cursor, found = await line.command("SCAN", cursor, "MATCH", keys.pattern, "COUNT", STEP)
        return bytes(cursor), [key.decode() for key in found]
    at, _, number = cursor.partition(b"@")
    part = int(number or 0)
    if part >= len(keys.starts):
        return BEGIN, []
    start = keys.starts[part]
    at, found = await line.command("SCAN", at, "MATCH", f"{start}*", "COUNT", STEP, near=start)
    if at == BEGIN:
        part += 1
    is_over = at == BEGIN and part == len(keys.starts)
    return BEGIN if is_over else b"%s@%d" % (at, part), [key.decode() for key in found]


async def every(line: Multiplexer, keys: Keys) -> AsyncIterator[list[str]]:
    """All of the keys that are there throughout, some of them more than once. Raises: ValkeyDown."""
    homes, cursor = await _homes(line, keys), BEGIN
    while True:
        cursor, found = await scan(line, keys, cursor)
        yield found
        if cursor == BEGIN:
            before, homes = homes, await _homes(line, keys)
            # A hash slot that moved meanwhile was perhaps looked for where it is no more.
            if homes == before:
                return


async def _homes(line: Multiplexer, keys: Keys) -> list[str]:
    return [await line.owner(start) for start in keys.starts] if await line.is_cluster() else []
