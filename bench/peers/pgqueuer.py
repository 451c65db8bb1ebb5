"""pgqueuer: asyncpg, bulk enqueue of 1,000, unlimited concurrency, logged (durable) tables."""

from __future__ import annotations

from datetime import timedelta

import asyncpg
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, PgQueuer, Queries

from bench.peers.driver import TEXT, main, url
from bench.tally import Tally

BATCH_SIZE = 1_000
"""Measured, jobs/s: 100 gave 8,900-10,000, 500 gave 9,600-14,100, 1,000 gave 8,800-15,900."""
PAYLOAD = TEXT.encode().ljust(100, b"x")


class Pgqueuer:
    """Drives pgqueuer."""

    bulk_jobs = 1_000

    async def prepare(self) -> None:
        """Install its schema, with the autovacuum settings that it recommends."""
        connection = await asyncpg.connect(url())
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    async def open(self) -> None:
        """Connect."""
        self._connection = await asyncpg.connect(url())
        self._queries = Queries(AsyncpgDriver(self._connection))

    async def enqueue(self) -> None:
        """One job."""
        await self._queries.enqueue("noop", PAYLOAD)

    async def enqueue_bulk(self, jobs: int) -> None:
        """Many in one statement."""
        await self._queries.enqueue(["noop"] * jobs, [PAYLOAD] * jobs, [0] * jobs)

    async def work(self) -> None:
        """One worker."""
        tally = Tally()
        async with asyncpg.create_pool(url(), min_size=2, max_size=4) as pool:
            worker = PgQueuer(AsyncpgPoolDriver(pool))

            @worker.entrypoint("noop")
            async def noop(job: Job) -> None:
                tally.add()

            await worker.qm.run(batch_size=BATCH_SIZE, dequeue_timeout=timedelta(seconds=5))

    async def close(self) -> None:
        """Disconnect."""
        await self._connection.close()


if __name__ == "__main__":
    main(Pgqueuer())
