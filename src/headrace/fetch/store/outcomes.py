"""Outcomes of photos, links and stored contents; batched access of photo jobs.

Photos are jobs of their own. Their rows are batched over a few milliseconds, so many photos share
a statement or a transaction. One transaction locks the leases of all its outcomes. Outcomes of a
lost lease are left out and raise LeaseLost, so a worker that lost its jobs writes nothing. If a
transaction fails because of one photo, each is written alone, and only that photo fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.engines.postgres import Postgres, Runner, from_row
from headrace.fetch.model import ItemPhoto, Link
from headrace.fetch.outcomes import PHOTOS_DECIDED
from headrace.fetch.sql import SQL
from headrace.jobs import Jobs
from headrace.jobs.errors import LeaseLost
from headrace.kernel import metrics
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import Unavailable
from headrace.kernel.resilience import crash_point


@dataclass(frozen=True, slots=True)
class NewPhoto:
    """A photo content whose bytes are stored."""

    sha256: str
    key: str
    format: str
    size_bytes: int
    width: int
    height: int
    hash: int | None = None
    """Perceptual hash, if the photo was decoded now."""


_NO_PHOTO: Final = NewPhoto("", "", "", 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of one photo of one run."""

    run: int
    customer: str
    item: str
    url: str
    outcome: str
    photo: NewPhoto | None = None
    etag: str | None = None
    last_modified: str | None = None
    touches_link: bool = True
    """False if the outcome was copied from the link."""


async def decide(runner: Runner, decisions: Sequence[Decision]) -> None:
    """Record contents and outcomes of links and needs; a decided need keeps its outcome."""
    photos = [d.photo or _NO_PHOTO for d in decisions]
    await runner.run(
        SQL.decide,
        runs=[d.run for d in decisions],
        customers=[d.customer for d in decisions],
        items=[d.item for d in decisions],
        urls=[d.url for d in decisions],
        outcomes=[d.outcome for d in decisions],
        etags=[d.etag for d in decisions],
        last_modifieds=[d.last_modified for d in decisions],
        touch_links=[d.touches_link for d in decisions],
        hashes=[p.sha256 or None for p in photos],
        keys=[p.key for p in photos],
        formats=[p.format for p in photos],
        sizes_bytes=[p.size_bytes for p in photos],
        widths=[p.width for p in photos],
        heights=[p.height for p in photos],
        photo_hashes=[p.hash for p in photos],
    )


async def item_photos(
    runner: Runner, keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], list[ItemPhoto]]:
    """The photos of each (customer, item), in the order of the item's list."""
    # A batch may publish an item for two runs.
    found: dict[tuple[str, str], list[ItemPhoto]] = {key: [] for key in keys}
    rows = await runner.all(
        SQL.photos_of_items, customers=[k[0] for k in found], items=[k[1] for k in found]
    )
    for row in rows:
        values = {name: row[name] for name in ItemPhoto.__struct_fields__}
        found[row["customer"], row["item"]].append(ItemPhoto(**values))
    return found


async def links_of_url(runner: Runner, url: str) -> list[Link]:
    """The record of `url` per customer, without its text."""
    rows = await runner.all(SQL.links_of_url, url=url)
    return [from_row(Link, row, run=row["run_id"], text="") for row in rows]


async def waiting_runs(runner: Runner, url: str) -> dict[str, list[int]]:
    """Runs that will request `url`, by customer. Reads their complete lists of photos."""
    found: dict[str, list[int]] = {}
    for row in await runner.all(SQL.waiting_needs, url=url):
        found.setdefault(row["customer"], []).append(row["run_id"])
    return found


@dataclass(frozen=True, slots=True)
class _Entry:
    """A decision to record under a lease."""

    lease_id: int
    decision: Decision


class OutcomeStore:
    """Batched reads and writes of a worker's photo jobs."""

    def __init__(self, postgres: Postgres, jobs: Jobs) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._states: Batcher[tuple[int, str, str, str], Any] = Batcher(self._read_states)
        self._entries: Batcher[_Entry, None] = Batcher(self._write_all)

    async def state(self, run: int, customer: str, item: str, url: str) -> Any:
        """State of a photo: needed, decided, last result of the link."""
        return await self._states.submit((run, customer, item, url))

    async def record(self, lease_id: int, decision: Decision) -> None:
        """Record an outcome under its lease. Raises: LeaseLost."""
        await self._entries.submit(_Entry(lease_id, decision))

    async def _read_states(self, keys: list[tuple[int, str, str, str]]) -> list[Any]:
        rows = await self._postgres.all(
            SQL.photo_states,
            runs=[key[0] for key in keys],
            customers=[key[1] for key in keys],
            items=[key[2] for key in keys],
            urls=[key[3] for key in keys],
        )
        return sorted(rows, key=lambda row: int(row["position"]))

    async def _write_all(self, entries: list[_Entry]) -> list[Exception | None]:
        try:
            return await self._write(entries)
        except Unavailable:
            raise
        except Exception:
            if len(entries) == 1:
                raise
        responses: list[Exception | None] = []
        for entry in entries:
            try:
                responses += await self._write([entry])
            except Exception as error:  # noqa: BLE001 - raised again to the caller
                responses.append(error)
        return responses

    async def _write(self, entries: list[_Entry]) -> list[Exception | None]:
        """Record the entries with a held lease in one transaction; LeaseLost for the others."""
        crash_point("fetch.stored_before_row")
        async with self._postgres.transaction() as tx:
            held = await self._jobs.lock_leases(tx, {entry.lease_id for entry in entries})
            ours = [entry for entry in entries if entry.lease_id in held]
            if ours:
                await decide(tx, [entry.decision for entry in ours])
        for entry in ours:
            outcome = entry.decision.outcome
            metrics.bound(PHOTOS_DECIDED, "fetch_photos_total", outcome=outcome).inc()
        return [None if entry.lease_id in held else LeaseLost(entry.lease_id) for entry in entries]
