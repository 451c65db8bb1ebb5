"""A host that stands still just when its claim is being answered.

`python stuck_claimer.py URL HOST QUEUE`.

Says `ready`, waits for a line, sends its claim and stops itself.

"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.jobs import JobsConfig
from headrace.jobs.leases import LeaseManager


async def main(url: str, host_id: int, queue_id: int) -> None:
    """Claim once for nothing, so that the next claim is one message, then once for good."""
    desk = LeaseManager(Postgres(url, PostgresConfig()), JobsConfig(), host_id)
    await desk.claim_lanes(queue_id, leases_max=1, batch=100)
    print("ready", flush=True)
    sys.stdin.readline()
    claiming = asyncio.create_task(desk.claim_lanes(queue_id, leases_max=1, batch=100))
    for _ in range(3):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    await claiming


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
