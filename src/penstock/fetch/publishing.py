"""From decided photos to consumers: the publish task and the item task.

Publishing writes one row for each version of an item, exactly once, in the transaction that closes the
run's change and enqueues a job for each consumer. A version that a later catalogue replaced before it
was published is closed without a result.

A consumer gets an item's versions in order, at least once: a job whose version is older than one
delivered is dropped, and one that finds another job at the same item waits. What an item is *to a
consumer* (publish, edit, unpublish) follows from what that consumer was shown, so a dropped version
never leaves it with an edit of something it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import msgspec

from penstock.engines.postgres import Postgres, Tx
from penstock.fetch import store
from penstock.fetch.model import ITEM_QUEUE, Item, Result
from penstock.fetch.store import SQL, Decision, NewResult
from penstock.jobs import Batch, JobInHand, Jobs, NewJob, Snooze
from penstock.kernel.errors import Unavailable
from penstock.kernel.logs import logger

Handler: TypeAlias = Callable[[Item], Awaitable[None]]
HANDLER_BUSY_S: Final = 600.0
"""A consumer's call is given up after this; its item is then free for another try."""
BUSY_AGAIN_S: Final = 1.0
_LOG: Final = logger(__name__)


class PublishJob(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: an item of a run whose photos are decided."""

    run: int
    item: str


class ItemJob(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: a result for a consumer."""

    seq: int
    consumer: str


class Publishing:
    """Handles the publish and the item queue."""

    def __init__(self, postgres: Postgres, jobs: Jobs) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._consumers: dict[str, Handler] = {}

    def add(self, handler: Handler) -> None:
        """Register a consumer under its module and name."""
        name = f"{handler.__module__}.{getattr(handler, '__qualname__', type(handler).__name__)}"
        self._consumers[name] = handler

    async def publish(self, batch: Batch[PublishJob]) -> None:
        """Publish every change of `batch` that is open, in one transaction."""
        try:
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
        if results:
            seqs = await store.insert_results(tx, results)
            deliveries = [
                NewJob(queue=ITEM_QUEUE, payload=ItemJob(seq=seq, consumer=consumer))
                for seq in seqs
                for consumer in self._consumers
            ]
            if deliveries:
                await self._jobs.enqueue_many(deliveries, tx=tx)
        await tx.run(SQL.note_published, runs=runs, items=items)

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
            await store.decide(tx, lost)

    async def _results_of(self, tx: Tx, changes: list[Any]) -> list[NewResult]:
        keys = [(row["customer"], row["item"]) for row in changes]
        photos = await store.item_photos(tx, keys)
        rows = await tx.all(
            SQL.last_actions, customers=[k[0] for k in keys], items=[k[1] for k in keys]
        )
        last = {(row["customer"], row["item"]): row["action"] for row in rows}
        results = []
        for key, row in zip(keys, changes, strict=True):
            action = next_action(
                is_gone=row["is_gone"], is_shown=last.get(key, "unpublish") != "unpublish"
            )
            if action is not None:
                results.append(NewResult(*key, row["version"], action, row["fields"], photos[key]))
        return results

    async def deliver(self, batch: Batch[ItemJob]) -> None:
        """Call the consumers, each item on its own; a handler's error sends its job alone to retry."""
        try:
            await asyncio.gather(*(self._deliver(job) for job in batch))
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _deliver(self, job: JobInHand[ItemJob]) -> None:
        consumer = job.payload.consumer
        handler = self._consumers.get(consumer)
        if handler is None:
            job.fail(f"no on_item handler named {consumer} is registered in this app")
            return
        found = await store.result(self._postgres, job.payload.seq)
        if found is None:
            job.done()
            return
        place = {"consumer": consumer, "customer": found.customer, "item": found.id}
        taken = await self._postgres.one(
            SQL.begin_delivery, **place, version=found.version, job_id=job.id, busy_s=HANDLER_BUSY_S
        )
        if taken is None:
            delivered = await self._postgres.value(SQL.delivered_version, **place)
            if (delivered or 0) >= found.version:
                job.done()
            else:
                job.snooze(BUSY_AGAIN_S)
            return
        await self._call(job, handler, found, is_shown=taken["is_shown"])

    async def _call(
        self, job: JobInHand[ItemJob], handler: Handler, found: Result, *, is_shown: bool
    ) -> None:
        """Call `handler` and note how far its consumer is."""
        place = {"consumer": job.payload.consumer, "customer": found.customer, "item": found.id}
        action = next_action(is_gone=found.action == "unpublish", is_shown=is_shown)
        if action is not None:
            try:
                async with asyncio.timeout(HANDLER_BUSY_S):
                    await handler(store.item_of(found, action))
            except Exception as error:  # noqa: BLE001 - it may raise anything; its job alone pays
                await self._postgres.run(SQL.drop_delivery, **place, job_id=job.id)
                _LOG.warning("item_handler_failed", **place, error=repr(error), exc_info=True)
                job.retry(None, f"{type(error).__name__}: {error}")
                return
        await self._postgres.run(
            SQL.end_delivery,
            **place,
            job_id=job.id,
            version=found.version,
            is_shown=found.action != "unpublish",
        )
        job.done()


def next_action(*, is_gone: bool, is_shown: bool) -> str | None:
    """What to do about an item for one who does or does not show it now; None: nothing."""
    if is_gone:
        return "unpublish" if is_shown else None
    return "edit" if is_shown else "publish"
