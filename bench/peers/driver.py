"""The frame every system is driven by: prepare its store, enqueue and time it, or work until
stopped.

The payload is 100 bytes for all, the event loop is uvloop for all that have one. Times are of the
calls alone, after some calls that are not counted; the total number of jobs is printed, so that the
drain can be checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from typing import Protocol

import uvloop

URL_VARIABLE = "BENCH_URL"
TEXT = "x" * 89
PAYLOAD = {"text": TEXT}
"""100 bytes as JSON without blanks."""
WARM_UP_CALLS = 20


class Peer(Protocol):
    """What a system's module brings."""

    bulk_jobs: int
    """Jobs of one bulk call, as its documentation does it or as was measured best."""

    async def prepare(self) -> None:
        """Make tables, groups and the like on an empty store."""

    async def open(self) -> None:
        """Connect as a producer."""

    async def enqueue(self) -> None:
        """Enqueue one job."""

    async def enqueue_bulk(self, jobs: int) -> None:
        """Enqueue `jobs` at once."""

    async def work(self) -> None:
        """Run handlers until SIGTERM."""

    async def close(self) -> None:
        """Disconnect the producer."""


def url() -> str:
    """Where the system's store answers."""
    return os.environ[URL_VARIABLE]


def main(peer: Peer) -> None:
    """Run the command of the command line."""
    assert len(json.dumps(PAYLOAD, separators=(",", ":"))) == 100
    command, *numbers = sys.argv[1:]
    if command == "prepare":
        uvloop.run(peer.prepare())
    elif command == "single":
        uvloop.run(_time_single(peer, int(numbers[0])))
    elif command == "bulk":
        uvloop.run(_time_bulk(peer, int(numbers[0])))
    elif command == "work":
        uvloop.run(peer.work())
    else:
        raise SystemExit(f"no command {command!r}: one of prepare, single, bulk, work")


async def _time_single(peer: Peer, jobs: int) -> None:
    await peer.open()
    for _ in range(WARM_UP_CALLS):
        await peer.enqueue()
    clock = Clock()
    for _ in range(jobs):
        await peer.enqueue()
    clock.report(jobs, WARM_UP_CALLS + jobs)
    await peer.close()


async def _time_bulk(peer: Peer, jobs: int) -> None:
    await peer.open()
    size = min(peer.bulk_jobs, max(1, jobs // 2))
    await peer.enqueue_bulk(size)
    clock = Clock()
    left = timed = jobs - size
    while left > 0:
        await peer.enqueue_bulk(min(size, left))
        left -= size
    clock.report(timed, jobs)
    await peer.close()


class Clock:
    """Time and CPU since it was made."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._cpu_s = self._used_s()

    def report(self, timed: int, enqueued: int) -> None:
        """Print what the harness reads."""
        seconds = time.perf_counter() - self._began_s
        cpu_s = self._used_s() - self._cpu_s
        row = {"timed": timed, "enqueued": enqueued, "seconds": seconds, "cpu_s": cpu_s}
        print(json.dumps(row), flush=True)

    def _used_s(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime


async def wait_stop() -> None:
    """Wait for SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
