"""Apply a run in one transaction: compare staged rows, store items, enqueue all jobs.

    staged rows --diff--> changes --> items, needed photos --> one group of photo jobs per item,
                                                               or a publish job without photos

The caller's transaction contains everything, so a crash leaves the whole run or nothing. The diff
is a few set-based statements; jobs are enqueued in pages of 1,000 items, which bounds memory. Runs
of one customer are applied one at a time, whether they come from catalogues or from items sent by
API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.engines.postgres import Postgres, Row, Tx
from headrace.engines.sql import Query
from headrace.fetch import store
from headrace.fetch.guard import Policy, refusal_reason
from headrace.fetch.host_stats import HostStats
from headrace.fetch.model import PUBLISH_QUEUE
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.fetch.validation import ValidatedRow
from headrace.jobs import Jobs, NewGroup, NewJob
from headrace.kernel.resilience import crash_point

ITEMS_OF_PAGE: Final = 1000
ROWS_TO_ANALYZE: Final = 5000
APPLY_S_MAX: Final = 600.0
"""Statement timeout for a diff, which takes seconds for a million rows."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The number of items that a run changes, or would change."""

    new: int
    changed: int
    gone: int

    @property
    def count(self) -> int:
        """The number of all changed items."""
        return self.new + self.changed + self.gone


async def slow_value(postgres: Postgres, query: Query, **parameters: Any) -> Any:
    """Run a query over all rows of a run with a raised statement timeout; return its value."""
    async with postgres.transaction() as tx:
        await tx.allow_long_statements(APPLY_S_MAX)
        return await tx.value(query, **parameters)


class Applying:
    """Applies runs within the transactions of callers."""

    def __init__(self, jobs: Jobs, config: FetchConfig, speeds: HostStats, policy: Policy) -> None:
        self._jobs = jobs
        self._config = config
        self._speeds = speeds
        self._policy = policy

    async def compare(self, tx: Tx, run_id: int, customer: str, *, is_whole: bool) -> Changes:
        """Store the changes of a run, their counts, and the photos that they need."""
        changes = await self._diff(tx, run_id, customer, is_whole=is_whole)
        await self._note_photos(tx, run_id, customer, is_whole=is_whole)
        return changes

    async def apply(
        self,
        tx: Tx,
        run_id: int,
        customer: str,
        *,
        is_whole: bool = True,
        validated: int | None = None,
    ) -> None:
        """Apply a run whose rows are staged.

        `validated` is the number of rows staged with content, if known.
        """
        changes = await self._diff(tx, run_id, customer, is_whole=is_whole)
        crash_point("fetch.compared")
        if is_whole and changes.changed + changes.gone:
            await tx.run(SQL.keep_before, run_id=run_id, customer=customer)
        await self._store(tx, run_id, customer, changes)
        if not is_whole:
            await tx.run(SQL.note_sent, run_id=run_id, customer=customer)
        elif validated is None or validated > changes.new + changes.changed:
            await tx.run(SQL.remember_rows, run_id=run_id, customer=customer)
        if changes.new > ROWS_TO_ANALYZE:
            await tx.run(SQL.analyze_items)
        crash_point("fetch.items_stored")
        await self.request_photos(tx, run_id, customer, is_whole=is_whole)

    async def stage_stored(self, tx: Tx, run_id: int, rows: Sequence[Row]) -> None:
        """Stage items from their stored content; their links are checked again."""
        staged = []
        for number, row in enumerate(rows, 1):
            refused = {
                url: code for url in row["photos"] if (code := refusal_reason(url, self._policy))
            }
            fields = row["fields"].encode()
            staged.append(
                ValidatedRow(number, 0, row["item"], fields, row["photos"], refused, row["hash"])
            )
        await store.runs.stage(tx, run_id, staged, raw_hashes=[row["raw_hash"] for row in rows])

    async def restore(self, tx: Tx, run_id: int, customer: str) -> None:
        """Apply staged rows of earlier content; photos with a stored copy are not downloaded."""
        changes = await self._diff(tx, run_id, customer, is_whole=False)
        await self._store(tx, run_id, customer, changes)
        await tx.run(SQL.keep_photos, run_id=run_id)
        await self.request_photos(tx, run_id, customer, is_whole=False)

    async def _store(self, tx: Tx, run_id: int, customer: str, changes: Changes) -> None:
        if changes.new + changes.changed:
            await tx.run(SQL.store_items, run_id=run_id, customer=customer)
        if changes.gone:
            await tx.run(SQL.mark_gone, run_id=run_id, customer=customer)

    async def request_photos(self, tx: Tx, run_id: int, customer: str, *, is_whole: bool) -> None:
        """Store the photos that a run needs, changed or due for a retry, and enqueue its jobs."""
        await self._note_photos(tx, run_id, customer, is_whole=is_whole)
        await tx.run(SQL.refuse_links, run_id=run_id, customer=customer)
        await self._enqueue(tx, run_id, customer)
        crash_point("fetch.jobs_enqueued")
        await store.runs.close_applied(tx, run_id, customer, is_whole=is_whole)

    async def request_links(self, tx: Tx, run_id: int, customer: str, *, refresh_s: float) -> None:
        """Store the due links of staged items, and enqueue the jobs of the run."""
        await self._note_photos(tx, run_id, customer, is_whole=False, refresh_s=refresh_s)
        await self._enqueue(tx, run_id, customer)
        await store.runs.close_applied(tx, run_id, customer, is_whole=False)

    async def _diff(self, tx: Tx, run_id: int, customer: str, *, is_whole: bool) -> Changes:
        if is_whole:
            await tx.allow_long_statements(APPLY_S_MAX)
        found: Row = await tx.one(SQL.diff, run_id=run_id, customer=customer, is_whole=is_whole)
        changes = Changes(found["new"], found["changed"], found["gone"])
        await tx.run(
            SQL.note_counts,
            run_id=run_id,
            new=changes.new,
            changed=changes.changed,
            gone=changes.gone,
        )
        if changes.count > ROWS_TO_ANALYZE:
            await tx.run(SQL.analyze_changes)
        return changes

    async def _note_photos(
        self,
        tx: Tx,
        run_id: int,
        customer: str,
        *,
        is_whole: bool,
        refresh_s: float | None = None,
    ) -> None:
        await store.runs.note_photos(
            tx,
            run_id,
            customer,
            is_whole=is_whole,
            recheck_s=self._config.recheck_s,
            refresh_s=refresh_s,
        )

    async def _enqueue(self, tx: Tx, run_id: int, customer: str) -> None:
        """Enqueue one group of photo jobs per item, or a publish job if it needs no photo."""
        after = ""
        while rows := await tx.all(
            SQL.changes_page, run_id=run_id, after=after, rows_max=ITEMS_OF_PAGE
        ):
            after = rows[-1]["item"]
            urls = {url for row in rows for url in row["urls"] or ()}
            queues = await self._speeds.queues(tx, customer, urls) if urls else {}
            groups: list[NewGroup] = []
            without_photos: list[NewJob] = []
            for row in rows:
                publish = NewJob(
                    queue=PUBLISH_QUEUE,
                    payload={"run": run_id, "item": row["item"]},
                    lane=customer,
                )
                if row["urls"]:
                    payload = {"run": run_id, "customer": customer, "item": row["item"]}
                    photos = [
                        NewJob(queue=queues[url], payload={**payload, "url": url}, lane=customer)
                        for url in row["urls"]
                    ]
                    groups.append(NewGroup(members=photos, on_done=publish))
                else:
                    without_photos.append(publish)
            if groups:
                await self._jobs.enqueue_groups(groups, tx=tx)
            if without_photos:
                await self._jobs.enqueue_many(without_photos, tx=tx)
