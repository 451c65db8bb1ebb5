"""Headrace as a producer, through the calls of the README and the guides, in the peers' frame.

The calls are `task.enqueue(field=...)`, `task.enqueue_many` of dicts, 1,000 a call, and
`task.sync.enqueue(field=...)` from a script. `callers` and `calls` make the first two calls from
several coroutines at once.

`BENCH_QUEUE` names the queue; with `BENCH_LANES` jobs are spread over that many lanes in turn. A
trace is open, as it is in a web request.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from itertools import count

import uvloop

from bench.peers.driver import PAYLOAD, TEXT, WARM_UP_CALLS, Clock, main, url
from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.kernel.logs import current_traceparent, new_traceparent
from headrace.kernel.spans import endpoint

QUEUE = os.environ.get("BENCH_QUEUE", "noop")
LANES = int(os.environ.get("BENCH_LANES", "0"))


def open_app(postgres_url: str) -> Headrace:
    """An app on the database of a cell; close it."""
    app = Headrace()
    app.use_endpoints(Endpoints(postgres_url, "unix:///nowhere", "file:///nowhere"))
    return app


class Ours:
    """Drives Headrace."""

    bulk_jobs = int(os.environ.get("BENCH_BULK", "1000"))

    def __init__(self) -> None:
        self._app = open_app(url())
        self._lane = count()
        self._task = self._app.task(QUEUE)(nothing)

    async def prepare(self) -> None:
        """The template database has the tables; the queue is declared by its first use."""

    async def open(self) -> None:
        """Connect."""
        if endpoint() is None:  # else each call begins a trace: `bench.traces`
            current_traceparent.set(new_traceparent())
        await self._app.jobs.queues.declare()

    async def enqueue(self) -> None:
        """One job."""
        if LANES:
            await self._task.enqueue(text=TEXT, lane=self._next_lane())
        else:
            await self._task.enqueue(text=TEXT)

    async def enqueue_bulk(self, jobs: int) -> None:
        """Many in one round trip; jobs of lanes with a lane each."""
        if LANES:
            ids = await self._task.enqueue_many(
                self._task.job(text=TEXT, lane=self._next_lane()) for _ in range(jobs)
            )
        else:
            ids = await self._task.enqueue_many([PAYLOAD] * jobs)
        assert len(ids) == jobs

    def time_sync(self, jobs: int) -> None:
        """Enqueue one by one without an event loop, as a script, Django or Flask does."""
        self._app.sync.jobs.queues.declare()
        for _ in range(WARM_UP_CALLS):
            self._task.sync.enqueue(text=TEXT)
        clock = Clock()
        for _ in range(jobs):
            self._task.sync.enqueue(text=TEXT)
        clock.report(jobs, WARM_UP_CALLS + jobs)

    async def time_at_once(self, command: str, jobs: int) -> None:
        """Enqueue one by one from 16 callers, or 1,000 a call from two, and time it."""
        await self.open()
        call, callers, size = {
            "callers": (self.enqueue, 16, 1),
            "calls": (partial(self.enqueue_bulk, self.bulk_jobs), 2, self.bulk_jobs),
        }[command]
        left = count(jobs, -size)

        async def repeat() -> None:
            while next(left) > 0:
                await call()

        for _ in range(WARM_UP_CALLS):
            await call()
        clock = Clock()
        await asyncio.gather(*[repeat() for _ in range(callers)])
        clock.report(jobs, WARM_UP_CALLS * size + jobs)
        await self.close()

    async def work(self) -> None:
        """Done by `systems.worker`."""
        raise SystemExit("our worker is a role of `headrace`")

    async def close(self) -> None:
        """Disconnect."""
        await self._app.close()

    def _next_lane(self) -> str:
        return f"customer:{next(self._lane) % LANES}"


async def nothing(text: str) -> None:
    """Never run here."""


if __name__ == "__main__":
    if sys.argv[1] == "sync":
        Ours().time_sync(int(sys.argv[2]))
    elif sys.argv[1] in {"callers", "calls"}:
        uvloop.run(Ours().time_at_once(sys.argv[1], int(sys.argv[2])))
    else:
        main(Ours())
