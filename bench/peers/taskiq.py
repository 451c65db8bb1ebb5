"""taskiq with taskiq-redis: streams (its acknowledging broker), hiredis, 200 tasks at once,
prefetch 200.

It has no bulk call: its documentation gathers sends. The worker is its own command.
"""

from __future__ import annotations

import asyncio

from taskiq_redis import RedisStreamBroker

from bench.peers.driver import TEXT, main, url
from bench.tally import Tally

broker = RedisStreamBroker(url(), consumer_id="0", max_connection_pool_size=64, xread_count=200)
SENDS_AT_ONCE = 50
_tally: list[Tally] = []


@broker.task(task_name="noop")
async def noop(text: str) -> None:
    """Count."""
    if not _tally:
        _tally.append(Tally())
    _tally[0].add()


class Taskiq:
    """Drives taskiq."""

    bulk_jobs = 1_000

    async def prepare(self) -> None:
        """Make the consumer group."""
        await broker.startup()
        await broker.shutdown()

    async def open(self) -> None:
        """Connect."""
        await broker.startup()

    async def enqueue(self) -> None:
        """One job."""
        await noop.kiq(TEXT)

    async def enqueue_bulk(self, jobs: int) -> None:
        """Fifty sends at a time."""
        for start in range(0, jobs, SENDS_AT_ONCE):
            sends = (noop.kiq(TEXT) for _ in range(min(SENDS_AT_ONCE, jobs - start)))
            await asyncio.gather(*sends)

    async def work(self) -> None:
        """Done by the command `taskiq worker bench.peers.taskiq:broker`."""
        raise SystemExit("start `taskiq worker bench.peers.taskiq:broker` instead")

    async def close(self) -> None:
        """Disconnect."""
        await broker.shutdown()


if __name__ == "__main__":
    main(Taskiq())
