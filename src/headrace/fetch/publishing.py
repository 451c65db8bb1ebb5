"""From decided photos to consumers: the publish task and the item task.

Publishing writes one row for each version of an item, exactly once, in the transaction that closes the
run's change and enqueues a job for each consumer. A version that a later catalogue replaced before it
was published is closed without a result.

An unchanged item whose photos were asked again gets a version of its own only where a copy came or
changed; otherwise its change is closed without a word. So does an item that was published at its deadline,
when its last photo is decided.

A consumer gets an item's versions in order, the newest at least once: a job brings the newest version
there is, whichever it was made for, one whose version was delivered is dropped, and one that finds
another job at the same item waits. What an item is *to a consumer* (publish, edit, unpublish) follows
from what that consumer was shown, so a dropped version never leaves it with an edit of something it
does not know.

Each delivery is a job of its own: a call that hangs holds one place of many, and whatever a handler
raises costs its own job a try. That includes SystemExit: one that leaves a task of the event loop ends
the process (in batches of 50 it took the 49 beside it along, until all were quarantined).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.consumers import Consumers, Handler, ItemJob, deliveries
from headrace.fetch.gathering import Gathering
from headrace.fetch.model import Item, Result
from headrace.fetch.store.photos import Decision
from headrace.fetch.store.results import NewResult
from headrace.fetch.store.sql import SQL
from headrace.fetch.webhooks import WebhookSending
from headrace.jobs import Batch, JobInHand, Jobs, Snooze
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point

DELIVERIES_AT_ONCE: Final = 50
"""Calls of handlers under way in a worker."""
LATE_ITEMS_AT_ONCE: Final = 200
LATE: Final = "failed:late"
"""The outcome of a photo that is missing at its item's deadline."""
BUSY_SLACK_S: Final = 30.0
"""An item is kept for its call that much longer than the call may take."""
BUSY_AGAIN_S: Final = 1.0
ABSENT_SHARE: Final = 0.5
ABSENT_S: Final = (1.0, 300.0)
"""A delivery whose consumer is not in this process is looked at again after half of the time that it
was away so far, within these bounds; where another process has the consumer it soon finds it, and one that is away
for a day costs each of its deliveries a look every five minutes. A worker that has the consumer wakes
them all when it begins."""
_LOG: Final = logger(__name__)


class PublishJob(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: an item of a run whose photos are decided."""

    run: int
    item: str


class Publishing:
    """Handles the publish and the item queue."""

    def __init__(
        self,
        postgres: Postgres,
        jobs: Jobs,
        consumers: Consumers,
        webhooks: WebhookSending,
        *,
        handler_timeout_s: float,
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._consumers = consumers
        self._webhooks = webhooks
        self._handler_timeout_s = handler_timeout_s
        self._ids: Gathering[None, dict[str, int]] = Gathering(self._read_ids)

    async def publish(self, batch: Batch[PublishJob]) -> None:
        """Publish every change of `batch` that is open, in one transaction."""
        try:
            # The worker recorded them when it began, unless it runs inside a program of its own.
            await self._consumers.declare()
            async with self._postgres.transaction() as tx:
                await self._jobs.lock_lease(tx, batch.lease_id)
                await self._publish(tx, [job.payload for job in batch])
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _publish(self, tx: Tx, payloads: list[PublishJob]) -> None:
        keys = sorted({(p.run, p.item) for p in payloads})
        runs, items = [k[0] for k in keys], [k[1] for k in keys]
        changes = await tx.all(SQL.lock_changes, runs=runs, items=items)
        await tx.run(SQL.take_turn)
        await self._settle_undecided(tx, changes)
        results = await self._results_of(
            tx, [row for row in changes if row["version"] == row["item_version"]]
        )
        await self._insert(tx, results)
        await tx.run(SQL.note_published, runs=runs, items=items)

    async def publish_late(self, run_id: int) -> int:
        """Publish the items of a run that still wait for photos with those that they have; how many.

        Each once; their changes stay open, and photos that come make a further version.
        """
        after, count = "", 0
        while True:
            async with self._postgres.transaction() as tx:
                rows = await tx.all(
                    SQL.lock_late, run_id=run_id, after=after, rows_max=LATE_ITEMS_AT_ONCE
                )
                if not rows:
                    return count
                after = rows[-1]["item"]
                changes = [row for row in rows if row["version"] == row["item_version"]]
                await tx.run(SQL.take_turn)
                await self._insert(tx, await self._late_results(tx, changes))
                items = [row["item"] for row in changes]
                await tx.run(SQL.note_late, runs=[run_id] * len(items), items=items)
            crash_point("fetch.published_late")
            count += len(changes)

    async def _late_results(self, tx: Tx, changes: list[Any]) -> list[NewResult]:
        runs, items = [r["run_id"] for r in changes], [r["item"] for r in changes]
        missing = {
            (row["item"], row["url"])
            for row in await tx.all(SQL.undecided_needs, runs=runs, items=items)
        }
        results = await self._results_of(tx, changes)
        for result in results:
            result.photos[:] = [
                msgspec.structs.replace(photo, outcome=LATE)
                if photo.key is None and (result.item, photo.url) in missing
                else photo
                for photo in result.photos
            ]
        return results

    async def _insert(self, tx: Tx, results: list[NewResult]) -> None:
        """Publish results and make the jobs of those that they go to."""
        if results:
            published = await store.results.insert_results(tx, results)
            jobs = deliveries(published, await self._consumers.ids(tx))
            await self._jobs.enqueue_many(jobs, tx=tx)
            await self._webhooks.wake(tx, {result.customer for result in results})

    async def _settle_undecided(self, tx: Tx, changes: list[Any]) -> None:
        """A photo whose job ended without an outcome (quarantined, cancelled) gets one here."""
        runs, items = [r["run_id"] for r in changes], [r["item"] for r in changes]
        rows = await tx.all(SQL.undecided_needs, runs=runs, items=items)
        if rows:
            customers = {(r["run_id"], r["item"]): r["customer"] for r in changes}
            lost = [
                Decision(
                    r["run_id"],
                    customers[r["run_id"], r["item"]],
                    r["item"],
                    r["url"],
                    "failed:lost",
                )
                for r in rows
            ]
            await store.photos.decide(tx, lost)

    async def _results_of(self, tx: Tx, changes: list[Any]) -> list[NewResult]:
        keys = [(row["customer"], row["item"]) for row in changes]
        photos = await store.photos.item_photos(tx, keys)
        last = await store.results.last_results(tx, keys)
        results = []
        photo_edits = []
        for key, row in zip(keys, changes, strict=True):
            last_action, last_photos = last.get(key, ("unpublish", "[]"))
            version = row["version"]
            if row["kind"] == "retry" or row["is_late"]:
                if store.results.has_same_photos(last_photos, photos[key]):
                    continue
                photo_edits.append(row)
                version += 1
            action = next_action(is_gone=row["is_gone"], is_shown=last_action != "unpublish")
            if action is not None:
                results.append(NewResult(*key, version, action, row["fields"], photos[key]))
        if photo_edits:
            await tx.run(
                SQL.note_photo_edits,
                runs=[row["run_id"] for row in photo_edits],
                items=[row["item"] for row in photo_edits],
            )
        return results

    async def deliver(self, job: JobInHand[ItemJob]) -> None:
        """Call a job's consumer; a handler's error sends its job to retry."""
        try:
            await self._deliver(job, await self._ids.ask(None))
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _read_ids(self, asked: list[None]) -> list[dict[str, int]]:
        return [await self._consumers.ids()] * len(asked)

    async def _deliver(self, job: JobInHand[ItemJob], ids: dict[str, int]) -> None:
        """Bring the newest version of the job's item to its consumer, or leave the job for later."""
        consumer = job.payload.consumer
        if ids.get(consumer) != job.payload.consumer_id:
            job.done()  # a person removed the consumer
            return
        handler = self._consumers.handler(consumer)
        if handler is None:
            away_s = await self._postgres.value(
                SQL.note_absent, consumer=consumer, seq=job.payload.seq
            )
            job.snooze(absent_wait_s(away_s))
            return
        found = await store.results.newest_result(self._postgres, job.payload.seq)
        if found is None:
            job.done()
            return
        place = {"consumer": consumer, "customer": found.customer, "item": found.id}
        taken = await self._postgres.one(
            SQL.begin_delivery,
            **place,
            version=found.version,
            job_id=job.id,
            busy_s=self._handler_timeout_s + BUSY_SLACK_S,
        )
        if taken is None:
            delivered = await self._postgres.value(SQL.delivered_version, **place)
            if (delivered or 0) >= found.version:
                await self._postgres.run(SQL.forget_absent, consumer=consumer, seq=job.payload.seq)
                job.done()
            else:
                job.snooze(BUSY_AGAIN_S)
            return
        # Version 0 of an item that is shown: it is replayed, to one who may not know it any more.
        is_known = taken["version"] > 0 or found.action == "unpublish"
        await self._call(job, handler, found, is_shown=taken["is_shown"] and is_known)

    async def _call(
        self, job: JobInHand[ItemJob], handler: Handler, found: Result, *, is_shown: bool
    ) -> None:
        """Call `handler` and note how far its consumer is."""
        place = {"consumer": job.payload.consumer, "customer": found.customer, "item": found.id}
        action = next_action(is_gone=found.action == "unpublish", is_shown=is_shown)
        if action is not None:
            error = await self._failure_of(handler, store.results.item_of(found, action))
            if error is not None:
                _LOG.warning("item_handler_failed", **place, error=repr(error), exc_info=error)
                await self._postgres.run(SQL.drop_delivery, **place, job_id=job.id)
                job.retry(None, f"{type(error).__name__}: {error}")
                return
        await self._postgres.run(
            SQL.end_delivery,
            **place,
            seq=job.payload.seq,
            job_id=job.id,
            version=found.version,
            is_shown=found.action != "unpublish",
        )
        job.done()

    async def _failure_of(self, handler: Handler, item: Item) -> BaseException | None:
        """Call `handler`; what it raised, or None. Raises: CancelledError where the worker stops."""
        limit = asyncio.timeout(self._handler_timeout_s)
        try:
            async with limit:
                await handler(item)
        except BaseException as error:
            # It may raise anything, and its job alone pays.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if not limit.expired():
                return error
            late = TimeoutError(
                f"it ran over fetch.handler_timeout ({self._handler_timeout_s:g} s)"
            )
            late.__cause__ = error
            return late
        return None


def absent_wait_s(away_s: float) -> float:
    """Seconds until a delivery whose consumer is away so long looks for it again."""
    least_s, most_s = ABSENT_S
    return min(most_s, max(least_s, away_s * ABSENT_SHARE))


def next_action(*, is_gone: bool, is_shown: bool) -> str | None:
    """What to do about an item for one who does or does not show it now; None: nothing."""
    if is_gone:
        return "unpublish" if is_shown else None
    return "edit" if is_shown else "publish"
