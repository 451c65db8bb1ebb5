"""A run: a catalogue file becomes staged rows, a diff, changed items and jobs.

    read in a thread, 1,000 rows a step -> stage (own small transactions) -> hold? -> ONE transaction:
    diff, items, photo needs, every job of the run, state `applied`

So a crash leaves either nothing but staged rows, which the customer's next run clears, or the whole run
applied. One session lock a customer keeps two readings apart, and its loss with the process is what
makes a run `abandoned`. The lock has a connection of its own: ten runs that held one of the pool's ten
while they waited for another stopped everything. A few are read at once, the others wait in line.

The diff is a few statements over whole sets; jobs go in pages of 1,000 items inside the same
transaction, so memory stays bounded at a million items.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.engines.postgres import Postgres, PostgresBusy, Row, Tx
from penstock.fetch import store
from penstock.fetch.guard import Policy
from penstock.fetch.intake import Chunk, read_chunk
from penstock.fetch.model import (
    PHOTO_QUEUE,
    PROBLEMS_KEPT_MAX,
    PUBLISH_QUEUE,
    CatalogueBroken,
    CatalogueTooLarge,
    FetchConfig,
    RowProblem,
    RunNotHeld,
    RunsBusy,
    RunState,
    RunUnderWay,
    RunUnknown,
    hold_reason,
)
from penstock.fetch.readers import Catalogue, open_catalogue
from penstock.fetch.store import SQL
from penstock.jobs import Jobs, NewGroup, NewJob

ITEMS_OF_PAGE: Final = 1000
ROWS_TO_ANALYZE: Final = 5000
APPLY_TRIES: Final = 3
RUNS_AT_ONCE: Final = 4
"""Catalogues that a process reads at once; each uses one connection of the pool at a time."""
IN_LINE_S: Final = 20.0
"""Longest wait for a place among them."""
APPLY_S_MAX: Final = 600.0
"""A statement of a diff may take longer than others: a million rows take seconds."""


@dataclass(slots=True)
class _Reading:
    """What a run has read so far."""

    rows: int = 0
    invalid: int = 0
    problems: int = 0
    truncated: str | None = None
    kept: list[RowProblem] = field(default_factory=list)


class Catalogues:
    """Reads, compares and applies catalogues."""

    def __init__(
        self, postgres: Postgres, jobs: Jobs, config: FetchConfig, *, in_line_s: float = IN_LINE_S
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._config = config
        self._in_line_s = in_line_s
        self._places = asyncio.Semaphore(RUNS_AT_ONCE)
        self._policy = Policy.of(config.allow_networks, config.allow_ports)

    async def run(self, path: Path, customer: str, *, file_name: str, is_dry_run: bool) -> int:
        """Read the file at `path` to the end and apply it; return the run's id.

        The run is then `applied` or `done`, `held` where a person must confirm, or `dry`. Raises:
        NotACatalogue (no run is made), CatalogueBroken, CatalogueTooLarge (the run is `refused`),
        RunUnderWay, RunsBusy.
        """
        catalogue = await asyncio.to_thread(
            open_catalogue, path, bytes_max=self._config.catalogue_max_bytes
        )
        async with self._only_reader(customer):
            await self._postgres.run(SQL.abandon_runs, customer=customer)
            await self._postgres.run(SQL.clear_staged, customer=customer)
            run_id: int = await self._postgres.value(
                SQL.insert_run, customer=customer, file_name=file_name, format=catalogue.format
            )
            try:
                reading = await self._read(run_id, catalogue)
            except (CatalogueBroken, CatalogueTooLarge) as error:
                await self._end(run_id, customer, RunState.REFUSED, error.text)
                raise
            await self._decide(run_id, customer, reading, is_dry_run=is_dry_run)
            return run_id

    async def confirm(self, run_id: int) -> None:
        """Apply a held run. Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy."""
        known = await self._postgres.one(SQL.lock_run, run_id=run_id)
        if known is None:
            raise RunUnknown(run_id)
        customer = known["customer"]
        async with self._only_reader(customer):
            await self._apply(run_id, customer, is_confirmed=True)

    @asynccontextmanager
    async def _only_reader(self, customer: str) -> AsyncIterator[None]:
        async with self.place(customer):
            connection = await self._postgres.connect_alone()
            try:
                session = Tx(connection)
                if not await session.value(SQL.try_lock_customer, customer=customer):
                    raise RunUnderWay(
                        f"another catalogue of customer {customer!r} is being read: wait until it is done"
                    )
                try:
                    yield
                finally:
                    # Said, since the server notices the end of a connection a moment later.
                    await session.run(SQL.unlock_customer, customer=customer)
            finally:
                connection.terminate()

    @asynccontextmanager
    async def place(self, customer: str) -> AsyncIterator[None]:
        """One of the places for catalogues under way. Raises: RunsBusy after a wait in line."""
        try:
            async with asyncio.timeout(self._in_line_s):
                await self._places.acquire()
        except TimeoutError:
            raise RunsBusy(
                f"the catalogue of customer {customer!r} waited {self._in_line_s:g} s for {RUNS_AT_ONCE} others"
                " that are being read, nothing was changed: send it again later",
                retry_after_s=self._in_line_s,
            ) from None
        try:
            yield
        finally:
            self._places.release()

    async def _read(self, run_id: int, catalogue: Catalogue) -> _Reading:
        reading = _Reading()
        is_last = False
        while not is_last:
            chunk = await asyncio.to_thread(read_chunk, catalogue.rows, self._policy)
            is_last = chunk.is_last
            await self._stage(run_id, chunk, reading)
        return reading

    async def _stage(self, run_id: int, chunk: Chunk, reading: _Reading) -> None:
        """Keep one chunk; the same transaction notes how far reading is."""
        async with self._postgres.transaction() as tx:
            doubled = await store.stage(tx, run_id, chunk.rows) if chunk.rows else []
            problems = chunk.problems + [
                RowProblem(
                    row=row.number,
                    line=row.line,
                    item=row.item,
                    field="id",
                    code="duplicate_id",
                    text=f"the id {row.item} was used by an earlier row, which counts",
                )
                for row in doubled
            ]
            valid = sum(row.hash is not None for row in chunk.rows)
            valid -= sum(row.hash is not None for row in doubled)
            reading.rows += chunk.rows_count
            reading.invalid += chunk.rows_count - valid
            reading.truncated = chunk.truncated
            room = max(0, PROBLEMS_KEPT_MAX - reading.problems)
            reading.problems += len(problems)
            if problems[:room]:
                ordered = sorted(problems[:room], key=lambda p: p.row)
                await store.insert_problems(tx, run_id, ordered)
            await tx.run(
                SQL.note_reading,
                run_id=run_id,
                rows_read=reading.rows,
                invalid=reading.invalid,
                problems=reading.problems,
            )

    async def _decide(
        self, run_id: int, customer: str, reading: _Reading, *, is_dry_run: bool
    ) -> None:
        if reading.rows > ROWS_TO_ANALYZE:
            await self._postgres.run(SQL.analyze_staged)
        if is_dry_run:
            async with self._postgres.transaction() as tx:
                await self._diff(tx, run_id, customer)
                recheck_s = self._config.recheck_s
                await store.note_photos(tx, run_id, customer, recheck_s=recheck_s)
                await tx.run(SQL.drop_needs, run_id=run_id)
        reason = hold_reason(
            rows_valid=await self._postgres.value(SQL.staged_count, run_id=run_id),
            published=await self._postgres.value(SQL.published_count, customer=customer),
            is_truncated=reading.truncated,
        )
        if is_dry_run:
            await self._end(run_id, customer, RunState.DRY, reason and f"would be held, {reason}")
        elif reason is not None:
            await self._end(run_id, customer, RunState.HELD, reason)
        else:
            await self._apply(run_id, customer, is_confirmed=False)

    async def _end(self, run_id: int, customer: str, state: RunState, reason: str | None) -> None:
        await self._postgres.run(SQL.end_run, run_id=run_id, state=state.value, reason=reason)
        await self._postgres.run(SQL.clear_staged, customer=customer)

    async def _diff(self, tx: Tx, run_id: int, customer: str) -> int:
        """Note the changes and their counts; return how many there are."""
        await tx.allow_long_statements(APPLY_S_MAX)
        counts: Row = await tx.one(SQL.diff, run_id=run_id, customer=customer)
        new, changed, gone = counts["new"], counts["changed"], counts["gone"]
        await tx.run(SQL.note_counts, run_id=run_id, new=new, changed=changed, gone=gone)
        return int(new + changed + gone)

    async def _apply(self, run_id: int, customer: str, *, is_confirmed: bool) -> None:
        """Everything or nothing; tried again where a publishing worker held an item in the way."""
        for tries_left in reversed(range(APPLY_TRIES)):
            try:
                async with self._postgres.transaction() as tx:
                    await self._apply_once(tx, run_id, customer, is_confirmed=is_confirmed)
            except PostgresBusy:
                if not tries_left:
                    raise
            else:
                return

    async def _apply_once(self, tx: Tx, run_id: int, customer: str, *, is_confirmed: bool) -> None:
        run: Row = await tx.one(SQL.lock_run, run_id=run_id)
        newer = await tx.value(SQL.newer_run, customer=customer, run_id=run_id)
        expected = RunState.HELD if is_confirmed else RunState.READING
        if run["state"] != expected or newer is not None:
            because = f"run {newer} was applied since" if newer else f"it is {run['state']}"
            raise RunNotHeld(f"run {run_id} cannot be applied: {because}; run the catalogue again")
        changes = await self._diff(tx, run_id, customer)
        if changes > ROWS_TO_ANALYZE:
            await tx.run(SQL.analyze_changes)
        await store.apply_changes(tx, run_id, customer, recheck_s=self._config.recheck_s)
        await self._enqueue(tx, run_id, customer)
        await store.close_applied(tx, run_id, customer)

    async def _enqueue(self, tx: Tx, run_id: int, customer: str) -> None:
        """A group of photo jobs an item, or its publishing at once where nothing is to be asked."""
        after = ""
        while rows := await tx.all(
            SQL.changes_page, run_id=run_id, after=after, rows_max=ITEMS_OF_PAGE
        ):
            after = rows[-1]["item"]
            groups: list[NewGroup] = []
            at_once: list[NewJob] = []
            for row in rows:
                publish = NewJob(queue=PUBLISH_QUEUE, payload={"run": run_id, "item": row["item"]})
                if row["urls"]:
                    photos = [_photo_job(run_id, customer, row["item"], url) for url in row["urls"]]
                    groups.append(NewGroup(members=photos, on_done=publish))
                else:
                    at_once.append(publish)
            if groups:
                await self._jobs.enqueue_groups(groups, tx=tx)
            if at_once:
                await self._jobs.enqueue_many(at_once, tx=tx)


def _photo_job(run_id: int, customer: str, item: str, url: str) -> NewJob:
    payload = {"run": run_id, "customer": customer, "item": item, "url": url}
    return NewJob(queue=PHOTO_QUEUE, payload=payload, lane=customer)
