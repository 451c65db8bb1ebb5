"""A site of a cell.

Customers, catalogues offered through the real verb, and what became of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from bench.children import Child
from bench.systems import Cell
from headrace import Headrace
from headrace.engines.endpoints import Endpoints

APP = "bench.apps.photos:app"
STARTS_MAX_MOST = 1_000_000
CONNECTIONS_MOST = 1_000
NO_FLAG = "HEADRACE_FETCH_"


@dataclass(frozen=True)
class Offered:
    """An item of a catalogue: its id and its photos' links."""

    item: str
    urls: Sequence[str]


class Site:
    """Offers catalogues and counts; the workers are processes of their own."""

    def __init__(self, cell: Cell, app: Headrace, database: asyncpg.Connection) -> None:
        self.cell = cell
        self.app = app
        self.database = database
        self.blobs_folder = cell.folder / "data" / "blobs"

    async def set_customers(
        self,
        names: Iterable[str],
        *,
        starts_max: int = STARTS_MAX_MOST,
        window_s: float = 60.0,
        connections: int = CONNECTIONS_MOST,
    ) -> None:
        """Make customers with these limits."""
        for name in names:
            await self.app.fetch.customers.set(
                name, starts_max=starts_max, window_s=window_s, connections=connections
            )

    async def offer(self, customer: str, items: Iterable[Offered]) -> int:
        """Run a catalogue of these items; returns the run's id once it is applied."""
        path = write_catalogue(self.cell.folder / f"{customer}.csv", items)
        run = await self.app.fetch.run_catalogue(path, customer)
        assert run.state in ("applied", "done"), run
        return run.run

    async def declare(self) -> None:
        """Store the queues, so that no worker does it while it is measured."""
        await self.app.jobs.queues.declare()

    async def decided(self) -> dict[str, int]:
        """Photos of all runs so far, by outcome."""
        rows = await self.database.fetch(
            "SELECT outcome, sum(photos)::bigint AS photos FROM headrace.fetch_count GROUP BY 1"
        )
        return {row["outcome"]: row["photos"] for row in rows}

    async def pending(self) -> int:
        """Photos that are not decided yet."""
        found = await self.database.fetchval(
            "SELECT count(*) FROM headrace.fetch_need WHERE outcome IS NULL"
        )
        return int(found)

    async def results(self) -> dict[tuple[str, str], float]:
        """(customer, item) -> the moment (wall clock, s) of its first result."""
        rows = await self.database.fetch(
            "SELECT customer, item, extract(epoch FROM at)::double precision AS at_s"
            " FROM headrace.fetch_result WHERE version = 1"
        )
        return {(row["customer"], row["item"]): row["at_s"] for row in rows}

    def work(self, *, slots: int, **settings: str) -> Child:
        """Start an agent with so many slots."""
        return self.cell.work(APP, slots=slots, **settings)

    def schedule(self, **settings: str) -> Child:
        """Start a scheduler with the room's tasks."""
        return self.cell.role("scheduler", APP, **settings)


@asynccontextmanager
async def fetch_site(cell: Cell, settings: Mapping[str, str]) -> AsyncIterator[Site]:
    """The site of `cell`; workers get `settings` too."""
    cell.env = {**cell.env, **settings}
    flags = {f"fetch.{k.removeprefix(NO_FLAG).lower()}": v for k, v in settings.items()}
    app = Headrace(flags={k: v for k, v in flags.items() if "headrace" not in k})
    app.use_endpoints(Endpoints(cell.url, "unix:///nowhere", cell.folder.as_uri()))
    database: Any = await asyncpg.connect(cell.url)
    site = Site(cell, app, database)
    try:
        await site.declare()
        yield site
    finally:
        await database.close()
        await app.close()


def write_catalogue(path: Path, items: Iterable[Offered]) -> Path:
    """A CSV as sellers send them."""
    rows = [f"{each.item},Item {each.item},10.50,{'|'.join(each.urls)}" for each in items]
    path.write_text("\n".join(["id,name,price,photos", *rows, ""]))
    return path
