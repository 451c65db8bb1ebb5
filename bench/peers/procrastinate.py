"""procrastinate: psycopg pool, batch_defer of 1,000, finished jobs deleted, 20 jobs at once."""

from __future__ import annotations

from procrastinate import App, PsycopgConnector

from bench.peers.driver import PAYLOAD, main, url
from bench.tally import Tally

CONCURRENCY = 20
"""Measured: 10, 20 and 50 differ less than their runs."""


class Procrastinate:
    """Drives procrastinate."""

    bulk_jobs = 1_000

    def __init__(self) -> None:
        self._app = App(connector=PsycopgConnector(conninfo=url(), min_size=2, max_size=10))
        self._tally: Tally | None = None
        self._noop = self._app.task(self._count, name="noop")

    async def prepare(self) -> None:
        """Apply its schema."""
        async with self._app.open_async():
            await self._app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        """Connect."""
        await self._app.open_async()

    async def enqueue(self) -> None:
        """One job."""
        await self._noop.defer_async(**PAYLOAD)

    async def enqueue_bulk(self, jobs: int) -> None:
        """Many in one statement."""
        await self._noop.batch_defer_async(*[PAYLOAD] * jobs)

    async def work(self) -> None:
        """One worker."""
        self._tally = Tally()
        async with self._app.open_async():
            await self._app.run_worker_async(
                concurrency=CONCURRENCY,
                delete_jobs="always",
                fetch_job_polling_interval=1.0,
                shutdown_graceful_timeout=5.0,
            )

    async def close(self) -> None:
        """Disconnect."""
        await self._app.close_async()

    async def _count(self, text: str) -> None:
        assert self._tally is not None
        self._tally.add()


if __name__ == "__main__":
    main(Procrastinate())
