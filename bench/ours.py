"""Penstock as a producer, driven by the same frame as the peers: `enqueue`, and `enqueue_many` of
1,000.

`BENCH_QUEUE` names the queue; with `BENCH_LANES` jobs go into that many lanes in turn. A trace is
open, as it is in a web request.
"""

from __future__ import annotations

import os
from itertools import count

from bench.peers.driver import PAYLOAD, main, url
from penstock import Penstock
from penstock.engines.endpoints import Endpoints
from penstock.jobs import NewJob
from penstock.kernel.trace import current_traceparent, new_traceparent

QUEUE = os.environ.get("BENCH_QUEUE", "noop")
LANES = int(os.environ.get("BENCH_LANES", "0"))


def open_app(postgres_url: str) -> Penstock:
    """An app on the database of a cell; close it."""
    app = Penstock()
    app.use_endpoints(Endpoints(postgres_url, "unix:///nowhere", "file:///nowhere"))
    return app


class Ours:
    """Drives Penstock."""

    bulk_jobs = int(os.environ.get("BENCH_BULK", "1000"))

    def __init__(self) -> None:
        self._app = open_app(url())
        self._lane = count()
        self._app.task(QUEUE)(_nothing)

    async def prepare(self) -> None:
        """The template database has the tables; the queue is declared by its first use."""

    async def open(self) -> None:
        """Connect."""
        current_traceparent.set(new_traceparent())
        await self._app.jobs.declare_queues()

    async def enqueue(self) -> None:
        """One job."""
        await self._app.jobs.enqueue(self._job())

    async def enqueue_bulk(self, jobs: int) -> None:
        """Many in one round trip."""
        ids = await self._app.jobs.enqueue_many([self._job() for _ in range(jobs)])
        assert len(ids) == jobs

    async def work(self) -> None:
        """Done by `systems.worker`."""
        raise SystemExit("our worker is a role of `penstock`")

    async def close(self) -> None:
        """Disconnect."""
        await self._app.close()

    def _job(self) -> NewJob:
        lane = f"customer:{next(self._lane) % LANES}" if LANES else None
        return NewJob(queue=QUEUE, payload=PAYLOAD, lane=lane)


async def _nothing(text: str) -> None:
    """Never run here."""


if __name__ == "__main__":
    main(Ours())
