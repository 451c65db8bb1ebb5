"""Apply a run in one transaction: compare staged rows, store items, enqueue all jobs.

    staged rows --diff--> changes --> items, needed photos --> one group of photo jobs per item,
                                                               or a publish job without photos

The caller's transaction contains everything, so a crash leaves the whole run or nothing. The diff
is a few set-based statements; jobs are enqueued in pages of 1,000 items, which bounds memory. Runs
of one customer are applied one at a time, whether they come from catalogues or from items sent by
API.

**Safety hold.** A run whose file looks like an accident waits for confirmation. A held run is read
and compared, but not applied. The number of items that a run may remove is limited per customer and
for the deployment; a share of 1 disables these limits. A truncated file and a file without a valid
row are always held.
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
from headrace.fetch.model import PUBLISH_QUEUE, ValidatedRow
from headrace.fetch.readers import Truncated
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.fetch.validation import Reading
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

    async def compare_overlays(self, tx: Tx, run_id: int, customer: str) -> Changes:
        """Store the changes of a supplemental feed whose rows are staged, and their counts."""
        await tx.allow_long_statements(APPLY_S_MAX)
        found: Row = await tx.one(SQL.overlay_diff, run_id=run_id, customer=customer)
        return await self._note_counts(tx, run_id, found)

    async def overlay(self, tx: Tx, run_id: int, customer: str) -> None:
        """Apply a supplemental feed whose rows are staged.

        Changed items are staged again as stored: they get their new versions like others, and this
        run requests their photos that an earlier run still waits for.
        """
        changes = await self.compare_overlays(tx, run_id, customer)
        await tx.run(SQL.store_overlays, run_id=run_id, customer=customer)
        await tx.run(SQL.forget_staged, runs=[run_id])
        after = ""
        while page := await tx.all(SQL.changed_page, run_id=run_id, customer=customer, after=after):
            after = page[-1]["item"]
            await self.stage_stored(tx, run_id, page)
        await self._store(tx, run_id, customer, Changes(0, changes.count, 0))
        crash_point("fetch.overlays_stored")
        await tx.run(SQL.refuse_links, run_id=run_id, customer=customer)
        await self.request_links(tx, run_id, customer, refresh_s=0.0)

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
        return await self._note_counts(tx, run_id, found)

    async def _note_counts(self, tx: Tx, run_id: int, found: Row) -> Changes:
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


SHRUNK_TO: Final = 10
"""A catalogue is held if its valid rows are at most this fraction (1/10) of the published items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldLimits:
    """A run is held if it removes more than `share` of the published items and over `items`."""

    share: float
    items: int


def hold_reason(
    limits: HoldLimits,
    *,
    rows_valid: int,
    published: int,
    missing: int,
    truncated: str | None,
    has_more_unreadable: bool = False,
    unreadable: int = 0,
) -> str | None:
    """The reason why a run must be confirmed before it is applied, or None.

    `missing` published items are in no row. `truncated` describes where the file ends too early.
    `unreadable` rows have no valid id; `has_more_unreadable` means more than in the last applied
    catalogue.
    """
    if truncated:
        return f"truncated: {truncated}"
    if rows_valid == 0:
        return "empty: no valid row"
    if limits.share < 1:
        if rows_valid * SHRUNK_TO <= published:
            return f"shrunk: {rows_valid} valid rows, but {published} items are published"
        if missing > limits.items and missing > limits.share * published:
            return f"removed: {missing} of {published} published items are in no row"
    if has_more_unreadable and missing:
        return (
            f"unreadable: {unreadable} rows have no readable id, and {missing} published items,"
            " which may be theirs, are in no row"
        )
    return None


class SafetyHold:
    """Decides whether a run that was read is held."""

    def __init__(self, postgres: Postgres, config: FetchConfig) -> None:
        self._postgres = postgres
        self._config = config

    async def find_reason(
        self, run_id: int, customer: str, reading: Reading, *, is_supplemental: bool
    ) -> str | None:
        """Return the reason why a run is held, or None.

        Sets the fault of `reading` if the file seems truncated.
        """
        if is_supplemental:
            return await self._overlay_reason(run_id, customer, reading)
        await self._check_line_break(run_id, customer, reading)
        run = {"run_id": run_id, "customer": customer}
        postgres = self._postgres
        before = reading.unreadable and await slow_value(postgres, SQL.unreadable_before, **run)
        return hold_reason(
            await self._limits(customer),
            rows_valid=await slow_value(postgres, SQL.staged_count, run_id=run_id),
            published=await slow_value(postgres, SQL.published_count, customer=customer),
            missing=await slow_value(postgres, SQL.missing_count, **run),
            truncated=reading.truncated,
            has_more_unreadable=reading.unreadable > before,
            unreadable=reading.unreadable,
        )

    async def _overlay_reason(self, run_id: int, customer: str, reading: Reading) -> str | None:
        async with self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            found: Row = await tx.one(SQL.overlay_counts, run_id=run_id, customer=customer)
        overlays, missing = found["overlays"], found["missing"]
        limits = await self._limits(customer)
        if reading.truncated:
            return f"truncated: {reading.truncated}"
        if overlays and not found["valid"]:
            return "empty: no valid row"
        is_over = missing > limits.items and missing > limits.share * overlays
        if (is_over and limits.share < 1) or (reading.unreadable and missing):
            return f"dropped: {missing} of {overlays} items are in no row"
        return None

    async def _limits(self, customer: str) -> HoldLimits:
        [own] = await store.runs.find_customers(self._postgres, customer)
        share, items = own.hold_share, own.hold_items
        return HoldLimits(
            share=self._config.hold_share if share is None else share,
            items=self._config.hold_items if items is None else items,
        )

    async def _check_line_break(self, run_id: int, customer: str, reading: Reading) -> None:
        """Treat a table as truncated if only the last applied one had a final line break."""
        if reading.has_line_break is None:
            return
        had_line_break = await self._postgres.value(
            SQL.note_line_break,
            run_id=run_id,
            customer=customer,
            has_line_break=reading.has_line_break,
        )
        if had_line_break and not reading.has_line_break and reading.fault is None:
            cut = Truncated("truncated_end", reading.last_line)
            reading.truncated, reading.fault = cut.where, cut.fault
