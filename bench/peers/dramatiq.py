"""dramatiq on Redis: hiredis, one process, 8 threads (its default), sends one by one: it has no
bulk call.
"""

from __future__ import annotations

from threading import Lock

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.peers.driver import TEXT, main, url
from bench.tally import Tally

broker = RedisBroker(url=url())
dramatiq.set_broker(broker)
_tally: list[Tally] = []
_lock = Lock()


@dramatiq.actor
def noop(text: str) -> None:
    """Count; its eight threads share one page."""
    with _lock:
        if not _tally:
            _tally.append(Tally())
        _tally[0].add()


class Dramatiq:
    """Drives dramatiq."""

    bulk_jobs = 1_000

    async def prepare(self) -> None:
        """Nothing to make."""

    async def open(self) -> None:
        """Connects by itself."""

    async def enqueue(self) -> None:
        """One job."""
        noop.send(TEXT)

    async def enqueue_bulk(self, jobs: int) -> None:
        """One by one."""
        for _ in range(jobs):
            noop.send(TEXT)

    async def work(self) -> None:
        """Done by the command `dramatiq bench.peers.dramatiq`."""
        raise SystemExit("start `dramatiq bench.peers.dramatiq:broker` instead")

    async def close(self) -> None:
        """Disconnect."""
        broker.close()


if __name__ == "__main__":
    main(Dramatiq())
