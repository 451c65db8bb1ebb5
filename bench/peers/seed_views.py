"""The scheme that views replaces, built for the measurement alone.

A Lua script raises a total if it is cached and pushes the hit on a list; a worker pops a batch,
adds it up and upserts totals and days.

It is given its best: the stock client with libvalkey, the script by its hash, 20 hits in one
pipeline, batches of 10,000 in the worker, one statement for totals and one for days. As in the
original the two are no transaction, and a batch that was popped is lost when the worker dies (or
doubled when it is put back).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import asyncpg
from valkey.asyncio import Valkey

QUEUE = "seed:hits"
HIT = """
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('INCR', KEYS[1]) end
return redis.call('LPUSH', KEYS[2], ARGV[1])
"""
TABLES = """
CREATE TABLE seed_total (id text PRIMARY KEY, total bigint NOT NULL);
CREATE TABLE seed_day (id text, day date, views bigint NOT NULL, PRIMARY KEY (id, day));
"""
TOTALS = """
INSERT INTO seed_total AS t SELECT * FROM unnest($1::text[], $2::bigint[])
ON CONFLICT (id) DO UPDATE SET total = t.total + excluded.total
"""
DAYS = """
INSERT INTO seed_day AS d SELECT id, current_date, n FROM unnest($1::text[], $2::bigint[]) u (id, n)
ON CONFLICT (id, day) DO UPDATE SET views = d.views + excluded.views
"""
BATCH = 10_000


class SeedViews:
    """Hits and their worker."""

    def __init__(self, valkey_url: str) -> None:
        self.client: Any = Valkey.from_url(valkey_url)
        self._hit: str | None = None

    async def hits(self, items: Sequence[str]) -> None:
        """Count these, in one round trip."""
        if self._hit is None:
            self._hit = await self.client.script_load(HIT)
        pipeline = self.client.pipeline(transaction=False)
        for item in items:
            pipeline.evalsha(self._hit, 2, f"seed:c:{item}", QUEUE, item)
        await pipeline.execute()

    async def flush(self, connection: asyncpg.Connection) -> int:
        """Write one batch; how many rows it was."""
        batch = await self.client.rpop(QUEUE, BATCH)
        if not batch:
            return 0
        counts = Counter(item.decode() for item in batch)
        ids, views = list(counts), list(counts.values())
        await connection.execute(TOTALS, ids, views)
        await connection.execute(DAYS, ids, views)
        return 2 * len(ids)

    async def close(self) -> None:
        """Disconnect."""
        await self.client.aclose()


class PlainViews:
    """INCR alone, dumped from time to time.

    Fast, without hours, and all since the last dump may be lost.
    """

    def __init__(self, valkey_url: str) -> None:
        self.client: Any = Valkey.from_url(valkey_url)

    async def hits(self, items: Sequence[str]) -> None:
        """Count these, in one round trip."""
        pipeline = self.client.pipeline(transaction=False)
        for item in items:
            pipeline.incr(f"plain:{item}")
        await pipeline.execute()

    async def dump(self, connection: asyncpg.Connection) -> int:
        """Write every counter; how many rows it was."""
        rows = 0
        cursor = 0
        while True:
            cursor, keys = await self.client.scan(cursor, match="plain:*", count=BATCH)
            if keys:
                values = await self.client.mget(keys)
                ids = [key.decode()[6:] for key in keys]
                await connection.execute(
                    TOTALS.replace("t.total + ", ""), ids, [int(v) for v in values]
                )
                rows += len(ids)
            if cursor == 0:
                return rows

    async def close(self) -> None:
        """Disconnect."""
        await self.client.aclose()
