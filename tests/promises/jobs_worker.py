"""A worker process for the kill tests: `python jobs_worker.py URL FOLDER`.

Its one handler writes a line `started ID PID`, waits until the file `go` exists, tries to lock its lease,
and writes `effect ID PID` if it still holds it, `refused ID PID` if not.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from penstock.engines.postgres import Postgres, PostgresConfig
from penstock.jobs import Batch, Jobs, JobsConfig, LeaseLost, Registry
from penstock.jobs.worker import Worker
from penstock.testing.waiting import wait_true


async def main(url: str, folder: Path) -> None:
    """Work until killed."""
    registry = Registry()
    postgres = Postgres(url, PostgresConfig())
    config = JobsConfig(poll_s=0.1, heartbeat_s=0.2)
    jobs = Jobs(postgres, config, registry)
    registry.bind(lambda: jobs)

    def note(word: str, batch: Batch[dict]) -> None:
        with (folder / "log.txt").open("a") as log:
            for job in batch:
                log.write(f"{word} {job.id} {os.getpid()}\n")

    @registry.task("held", batch=5)
    async def held(batch: Batch[dict]) -> None:
        note("started", batch)
        await wait_true((folder / "go").exists, deadline_s=60)
        try:
            async with postgres.transaction() as tx:
                await jobs.lock_lease(tx, batch.lease_id)
        except LeaseLost:
            note("refused", batch)
            raise
        note("effect", batch)

    await Worker(postgres, jobs, config, host_name="worker").run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
