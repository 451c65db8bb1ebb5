"""What runs still need, and what became of it: read and written for many photos at a time.

Photos are jobs of their own; their rows are gathered over a few milliseconds, so that many share a
statement or a transaction. One transaction locks the leases of all that it writes: what belongs to a
lease that was lost meanwhile is left out and refused, so a worker that lost its jobs writes nothing.
Where a transaction fails for a fault of one photo, each is written alone, and one pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.gathering import Gathering
from headrace.fetch.model import PHOTOS_DECIDED
from headrace.fetch.store.photos import Decision
from headrace.jobs import Jobs
from headrace.jobs.errors import LeaseLost
from headrace.kernel import metrics
from headrace.kernel.errors import Unavailable
from headrace.kernel.resilience import crash_point


@dataclass(frozen=True, slots=True)
class _Entry:
    """A decision to record under a lease."""

    lease_id: int
    decision: Decision


class Ledger:
    """Reads and writes what a worker's photo jobs need of PostgreSQL."""

    def __init__(self, postgres: Postgres, jobs: Jobs) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._states: Gathering[tuple[int, str, str, str], Any] = Gathering(self._read_states)
        self._entries: Gathering[_Entry, None] = Gathering(self._write_all)

    async def state(self, run: int, customer: str, item: str, url: str) -> Any:
        """Whether a photo is needed or decided, and what is known of its link."""
        return await self._states.ask((run, customer, item, url))

    async def record(self, lease_id: int, decision: Decision) -> None:
        """Write an outcome, if the lease still is ours. Raises: LeaseLost."""
        await self._entries.ask(_Entry(lease_id, decision))

    async def _read_states(self, keys: list[tuple[int, str, str, str]]) -> list[Any]:
        return await store.photos.photo_states(self._postgres, keys)

    async def _write_all(self, entries: list[_Entry]) -> list[Exception | None]:
        try:
            return await self._write(entries)
        except Unavailable:
            raise
        except Exception:
            if len(entries) == 1:
                raise
        answers: list[Exception | None] = []
        for entry in entries:
            try:
                answers += await self._write([entry])
            except Exception as error:  # noqa: BLE001 - raised again to whoever asked
                answers.append(error)
        return answers

    async def _write(self, entries: list[_Entry]) -> list[Exception | None]:
        """Write those whose lease is held, in one transaction; the others' answer is LeaseLost."""
        crash_point("fetch.stored_before_row")
        async with self._postgres.transaction() as tx:
            held = await self._jobs.lock_leases(tx, {entry.lease_id for entry in entries})
            ours = [entry for entry in entries if entry.lease_id in held]
            if ours:
                await store.photos.decide(tx, [entry.decision for entry in ours])
        for entry in ours:
            outcome = entry.decision.outcome
            metrics.bound(PHOTOS_DECIDED, "fetch_photos_total", outcome=outcome).inc()
        return [None if entry.lease_id in held else LeaseLost(entry.lease_id) for entry in entries]
