"""One run for the kill tests: `python catalogue_process.py URL FOLDER FILE|send|late|undo:RUN`.

Prints the run's id.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headrace.engines.blobs import Blobs
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.fetch import Fetch, FetchConfig
from headrace.fetch.model import SentItem
from headrace.jobs import Jobs, JobsConfig, Registry

SENT = [SentItem(customer="shop", item=f"i{n}", fields={"name": "Sent"}) for n in range(50)]


async def main(url: str, folder: Path, what: str) -> None:
    """Run a catalogue of customer `shop`, or send items of his."""
    postgres = Postgres(url, PostgresConfig())
    registry = Registry()
    jobs = Jobs(postgres, JobsConfig(), registry)
    registry.bind(lambda: jobs)
    fetch = Fetch(postgres, Blobs((folder / "blobs").as_uri()), jobs, FetchConfig())
    fetch.register(registry)
    if what == "send":
        (run,) = await fetch.send_items(SENT)
    elif what == "late":
        await fetch.upkeep.publish_late()
        return
    elif what.startswith("undo:"):
        run = await fetch.runs.undo(int(what.removeprefix("undo:")))
    else:
        run = await fetch.run_catalogue(Path(what), "shop")
    print(run.run, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
