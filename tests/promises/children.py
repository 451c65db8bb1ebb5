"""What runs in forked processes of the promises and may die at a crash point."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from headrace.engines.blobs import Blobs
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.fetch import Fetch, FetchConfig
from headrace.fetch.model import SentItem
from headrace.fetch.service.sellers import SELLER_USE, LinkSigning
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.jobs.fleet.scheduler import Scheduler
from headrace.jobs.leases import LeaseManager
from headrace.kernel.signing import derive_key

SENT = [SentItem(customer="shop", item=f"i{n}", fields={"name": "Sent"}) for n in range(50)]


async def run_fetch(url: str, folder: Path, what: str) -> None:
    """Send items, publish late ones, or run the catalogue in the file `what`.

    `undo:RUN` and `confirm:RUN` act on a run; `review:FILE` uploads for review.
    """
    postgres = Postgres(url, PostgresConfig())
    registry = Registry()
    jobs = Jobs(postgres, JobsConfig(), registry)
    registry.bind(lambda: jobs)
    blobs, key = Blobs((folder / "blobs").as_uri()), derive_key("seller" * 8, SELLER_USE)
    fetch = Fetch(postgres, blobs, jobs, FetchConfig(), link_signing=LinkSigning(lambda: key))
    fetch.register(registry)
    if what == "send":
        await fetch.send_items(SENT)
    elif what == "late":
        await fetch.upkeep.publish_late()
    elif what.startswith("undo:"):
        await fetch.runs.undo(int(what.removeprefix("undo:")))
    elif what.startswith("confirm:"):
        await fetch.runs.confirm(int(what.removeprefix("confirm:")))
    else:
        file = folder / what.removeprefix("review:")
        await fetch.run_catalogue(
            file,
            "shop",
            is_review=what.startswith("review:"),
            is_supplemental=what.startswith("supplement"),
        )


async def schedule(url: str, name: str, period_s: float) -> None:
    """Schedule until killed; hosts of the test need not report again."""
    postgres = Postgres(url, PostgresConfig())
    config = JobsConfig(plan_every_s=period_s, cron_every_s=0.05, host_silent_s=3600.0)
    jobs = Jobs(postgres, config, Registry())
    await Scheduler(postgres, jobs, name=name).run(asyncio.Event())


async def stop_in_claim(url: str, host_id: int, queue_id: int, ready: Path, go: Path) -> None:
    """Send a claim and stop this process before it reads the reply."""
    manager = LeaseManager(Postgres(url, PostgresConfig()), JobsConfig(), host_id)
    # Once for nothing, so that the next claim is one message.
    await manager.claim_lanes(queue_id, leases_max=1, batch=100)
    ready.touch()
    while not go.exists():
        await asyncio.sleep(0)
    claiming = asyncio.create_task(manager.claim_lanes(queue_id, leases_max=1, batch=100))
    for _ in range(3):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    await claiming
