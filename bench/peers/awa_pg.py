"""awa-pg: queue storage, direct COPY, 1,024 workers in one process, claims of 512, no deadline
rescue.

Its configuration guide sizes no-op queues at 1,024 permits and names 512 as the claim size; a
queue without a deadline takes the compact claim rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import awa

from bench.peers import driver
from bench.peers.driver import TEXT, main, wait_stop
from bench.tally import Tally

WORKERS = 1_024
CLAIM = 512
"""Measured: 2,048 with 1,024, and 4,096 with 2,048, were no faster."""
QUEUE = "noop"


@dataclass
class Note:
    """The payload."""

    text: str


def url() -> str:
    """The server's URL with a host, which its parser requires; the socket's folder is used."""
    return driver.url().replace("@/", "@localhost/")


class Awa:
    """Drives awa-pg."""

    bulk_jobs = 1_000

    async def prepare(self) -> None:
        """Migrate, and route new work to its queue storage, as a fresh installation has it."""
        client = awa.AsyncClient(url())
        await client.migrate()
        await client.install_queue_storage()
        await client.close()

    async def open(self) -> None:
        """Connect."""
        self._client = awa.AsyncClient(url(), max_connections=4)

    async def enqueue(self) -> None:
        """One job."""
        await self._client.insert(Note(TEXT), queue=QUEUE)

    async def enqueue_bulk(self, jobs: int) -> None:
        """Many through COPY into the queue storage."""
        sent = await self._client.enqueue_many_copy([Note(TEXT)] * jobs, queue=QUEUE)
        assert sent == jobs

    async def work(self) -> None:
        """One worker process."""
        tally = Tally()
        client = awa.AsyncClient(url(), max_connections=20)

        @client.task(Note, queue=QUEUE)
        async def noop(job: awa.Job) -> None:
            tally.add()

        queue = {
            "name": QUEUE,
            "max_workers": WORKERS,
            "claim_batch_size": CLAIM,
            "deadline_duration_ms": 0,
        }
        await client.start([queue], poll_interval_ms=50)
        await wait_stop()
        await client.shutdown()

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


if __name__ == "__main__":
    main(Awa())
