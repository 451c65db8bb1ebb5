"""Making staged rows true: the diff, the items, the photos to ask for and every job, in one transaction.

    staged rows --diff--> changes --> items, needs --> a group of photo jobs an item, or its publishing

The caller's transaction holds all of it, so a crash leaves the whole run or nothing of it. The diff is a
few statements over whole sets; jobs go in pages of 1,000 items, so memory stays bounded at a million. One
run of a customer is applied at a time, whoever applies it: a catalogue or items sent by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.engines.postgres import Row, Tx
from headrace.fetch import store
from headrace.fetch.door import refusal
from headrace.fetch.guard import Policy
from headrace.fetch.intake import IntakeRow
from headrace.fetch.model import PUBLISH_QUEUE
from headrace.fetch.settings import FetchConfig
from headrace.fetch.speeds import Speeds
from headrace.fetch.store.sql import SQL
from headrace.jobs import Jobs, NewGroup, NewJob
from headrace.kernel.resilience import crash_point

ITEMS_OF_PAGE: Final = 1000
ROWS_TO_ANALYZE: Final = 5000
APPLY_S_MAX: Final = 600.0
"""A statement of a diff may take longer than others: a million rows take seconds."""


@dataclass(frozen=True, slots=True)
class Changes:
    """How many items a run changes, or would."""

    new: int
    changed: int
    gone: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.new + self.changed + self.gone


class Applying:
    """Applies runs, in the transactions of others."""

    def __init__(self, jobs: Jobs, config: FetchConfig, speeds: Speeds, policy: Policy) -> None:
        self._jobs = jobs
        self._config = config
        self._speeds = speeds
        self._policy = policy

    async def compare(self, tx: Tx, run_id: int, customer: str, *, is_whole: bool) -> Changes:
        """Note the changes and their counts, and the photos that they would ask for."""
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
        judged: int | None = None,
    ) -> None:
        """Apply a run whose rows are staged. `judged`: how many of them have content, if that is known."""
        changes = await self._diff(tx, run_id, customer, is_whole=is_whole)
        crash_point("fetch.compared")
        if is_whole and changes.changed + changes.gone:
            await tx.run(SQL.keep_before, run_id=run_id, customer=customer)
        await self._store(tx, run_id, customer, changes)
        if not is_whole:
            await tx.run(SQL.note_sent, run_id=run_id, customer=customer)
        elif judged is None or judged > changes.new + changes.changed:
            await tx.run(SQL.remember_rows, run_id=run_id, customer=customer)
        if changes.new > ROWS_TO_ANALYZE:
            await tx.run(SQL.analyze_items)
        crash_point("fetch.items_stored")
        await self.ask_photos(tx, run_id, customer, is_whole=is_whole)

    async def stage_stored(self, tx: Tx, run_id: int, rows: Sequence[Row]) -> None:
        """Stage items of which the content is stored, with their links judged as of now."""
        staged = []
        for number, row in enumerate(rows, 1):
            refused = {url: code for url in row["photos"] if (code := refusal(url, self._policy))}
            fields = row["fields"].encode()
            staged.append(
                IntakeRow(number, 0, row["item"], fields, row["photos"], refused, row["hash"])
            )
        await store.runs.stage(tx, run_id, staged, raw_hashes=[row["raw_hash"] for row in rows])

    async def restore(self, tx: Tx, run_id: int, customer: str) -> None:
        """Apply staged rows of earlier content; photos that have a good copy are not asked for."""
        changes = await self._diff(tx, run_id, customer, is_whole=False)
        await self._store(tx, run_id, customer, changes)
        await tx.run(SQL.keep_photos, run_id=run_id)
        await self.ask_photos(tx, run_id, customer, is_whole=False)

    async def _store(self, tx: Tx, run_id: int, customer: str, changes: Changes) -> None:
        if changes.new + changes.changed:
            await tx.run(SQL.store_items, run_id=run_id, customer=customer)
        if changes.gone:
            await tx.run(SQL.mark_gone, run_id=run_id, customer=customer)

    async def ask_photos(self, tx: Tx, run_id: int, customer: str, *, is_whole: bool) -> None:
        """Note the photos of a run's changes and of links that are due, and enqueue all of its jobs."""
        await self._note_photos(tx, run_id, customer, is_whole=is_whole)
        await tx.run(SQL.refuse_links, run_id=run_id, customer=customer)
        await self._enqueue(tx, run_id, customer)
        crash_point("fetch.jobs_enqueued")
        await store.runs.close_applied(tx, run_id, customer, is_whole=is_whole)

    async def ask_links(self, tx: Tx, run_id: int, customer: str, *, refresh_s: float) -> None:
        """Note the links of staged items that are due, and enqueue the run's jobs."""
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
        """A group of photo jobs an item, or its publishing at once where nothing is to be asked."""
        after = ""
        while rows := await tx.all(
            SQL.changes_page, run_id=run_id, after=after, rows_max=ITEMS_OF_PAGE
        ):
            after = rows[-1]["item"]
            urls = {url for row in rows for url in row["urls"] or ()}
            queues = await self._speeds.queues(tx, customer, urls) if urls else {}
            groups: list[NewGroup] = []
            at_once: list[NewJob] = []
            for row in rows:
                publish = NewJob(
                    queue=PUBLISH_QUEUE,
                    payload={"run": run_id, "item": row["item"]},
                    lane=customer,
                )
                if row["urls"]:
                    about = {"run": run_id, "customer": customer, "item": row["item"]}
                    photos = [
                        NewJob(queue=queues[url], payload={**about, "url": url}, lane=customer)
                        for url in row["urls"]
                    ]
                    groups.append(NewGroup(members=photos, on_done=publish))
                else:
                    at_once.append(publish)
            if groups:
                await self._jobs.enqueue_groups(groups, tx=tx)
            if at_once:
                await self._jobs.enqueue_many(at_once, tx=tx)
