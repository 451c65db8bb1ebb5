"""Publishing: from decided photos to consumers, by the publish task and the item task.

Publishing writes one row per version of an item, exactly once, in the transaction that closes the
run's change and enqueues one job per consumer. A version that a later catalogue replaced before
its publication is closed without a result.

An unchanged item whose photos were requested again gets a new version only if a copy arrived or
changed. The same holds for an item published at its deadline, when its last photo is decided.

A consumer receives the versions of an item in order, the newest at least once. A job delivers the
newest version, whichever it was created for. A job whose version was delivered is dropped; a job
that finds another job at the same item waits. The action (publish, edit, unpublish) follows from
what that consumer received, so a dropped version never leaves it with an edit of an unknown item.

Each delivery is a job of its own: a call that hangs occupies one place, and any exception of a
handler costs its own job an attempt. Their reads and writes of PostgreSQL are batched, as those of
photos are (`DeliveryStore`). That includes SystemExit, which would end the process if it
left the task.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.consumers import HOOK, Consumers, Handler, ItemJob, deliveries
from headrace.fetch.errors import NotHeld
from headrace.fetch.model import PUBLISH_QUEUE, Item, Result
from headrace.fetch.sql import SQL
from headrace.fetch.store.outcomes import Decision
from headrace.fetch.store.results import DeliveryRequest, DeliveryStore, NewResult
from headrace.fetch.webhook_delivery import WebhookSender
from headrace.jobs import Batch, JobContext, Jobs, LeaseLost, NewJob, Snooze
from headrace.jobs.slots.isolation import HandlerThreads
from headrace.jobs.tasks.payloads import is_async
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point

_LOG: Final = logger(__name__)
DELIVERIES_AT_ONCE: Final = 50
"""Concurrent handler calls of a worker."""
LATE_ITEMS_AT_ONCE: Final = 200
LATE: Final = "failed:late"
"""Outcome of a photo that is missing at its item's deadline."""
BUSY_SLACK_S: Final = 30.0
"""Margin of an item's claim over the time limit of the call."""
BUSY_AGAIN_S: Final = 1.0
HOOK_ABSENT_S: Final = 15.0
"""Delay of a publication in a process without the `before_publish` handler."""
ABSENT_SHARE: Final = 0.5
ABSENT_S: Final = (1.0, 300.0)
"""Limits of the retry delay of a delivery without a handler in this process.

The delay is ABSENT_SHARE of the absence so far: short enough to reach another process that has the
handler, long enough for an absence of a day. A worker with the handler enqueues all waiting
deliveries when it starts.
"""


class PublishJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload: an item of a run whose photos are decided."""

    run: int
    item: str
    late: bool = False
    """The item is past its deadline: it is published with the photos it has, and again later."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An open change of an item, locked, and what it publishes now."""

    key: tuple[int, str]
    """Run and item."""
    customer: str
    result: NewResult | None
    is_photo_edit: bool
    is_gone: bool
    is_late: bool


class Publishing:
    """Handlers of the publish queue and the item queue."""

    def __init__(
        self,
        postgres: Postgres,
        jobs: Jobs,
        consumers: Consumers,
        webhooks: WebhookSender,
        *,
        handler_timeout_s: float,
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._consumers = consumers
        self._webhooks = webhooks
        self._handler_timeout_s = handler_timeout_s
        self._deliveries = DeliveryStore(postgres, busy_s=handler_timeout_s + BUSY_SLACK_S)
        self._ids: Batcher[None, dict[str, int]] = Batcher(self._read_ids)

    async def publish(self, batch: Batch[PublishJob]) -> None:
        """Publish every open change of `batch` in one transaction."""
        try:
            # The worker recorded them at its start, unless it is embedded in another program.
            await self._consumers.declare()
            async with self._postgres.transaction() as tx:
                if not await self._jobs.lock_leases(tx, [batch.lease_id]):
                    raise LeaseLost(batch.lease_id)
                prepared = await self.prepare(tx, [job.payload for job in batch])
                if HOOK in await self.store(tx, prepared):
                    self._consumers.handler(HOOK)
                    raise Snooze(HOOK_ABSENT_S)
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def prepare(self, tx: Tx, payloads: Sequence[PublishJob]) -> list[Prepared]:
        """Lock the open changes of `payloads` and return what each publishes now."""
        ended = {(p.run, p.item) for p in payloads if not p.late}
        keys = sorted({(p.run, p.item) for p in payloads})
        changes = [
            dict(row, is_late=row["is_late"] and (row["run_id"], row["item"]) in ended)
            for row in await tx.all(
                SQL.lock_changes, runs=[k[0] for k in keys], items=[k[1] for k in keys]
            )
        ]
        over = [row for row in changes if (row["run_id"], row["item"]) in ended]
        late = [row for row in changes if (row["run_id"], row["item"]) not in ended]
        await self._settle_undecided(tx, over)
        found = await self._prepared(tx, over, is_late=False)
        return [*found, *await self._mark_missing(tx, await self._prepared(tx, late, is_late=True))]

    async def store(self, tx: Tx, prepared: list[Prepared]) -> dict[str, int]:
        """Publish results and close their changes; return the ids of all consumers, by name."""
        edits = [one.key for one in prepared if one.is_photo_edit]
        if edits:
            runs, items = [k[0] for k in edits], [k[1] for k in edits]
            await tx.run(SQL.note_photo_edits, runs=runs, items=items)
        await tx.run(SQL.lock_result_order)
        seen = [one for one in prepared if one.result is not None or one.is_gone]
        customers, items = [one.customer for one in seen], [one.key[1] for one in seen]
        await tx.run(SQL.forget_held, customers=customers, items=items)
        ids = await self._insert(tx, [one.result for one in prepared if one.result is not None])
        closed = [one.key for one in prepared if not one.is_late]
        await tx.run(SQL.note_published, runs=[k[0] for k in closed], items=[k[1] for k in closed])
        return ids

    async def publish_late(self, run_id: int) -> int:
        """Publish the items of a run that still wait for photos; return the number.

        Each item once. Its change stays open, and later photos make a further version. If there is
        a `before_publish` handler, jobs of the publish queue call it.
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
                items = [row["item"] for row in changes]
                await tx.run(SQL.lock_result_order)
                if HOOK in await self._consumers.ids(tx):
                    await self._jobs.enqueue_many([_late_job(row) for row in changes], tx=tx)
                else:
                    late = await self._prepared(tx, changes, is_late=True)
                    await self.store(tx, await self._mark_missing(tx, late))
                await tx.run(SQL.note_late, runs=[run_id] * len(items), items=items)
            crash_point("fetch.published_late")
            count += len(changes)

    async def _mark_missing(self, tx: Tx, late: list[Prepared]) -> list[Prepared]:
        """Set the outcome of photos that are missing at the deadline."""
        runs, items = [one.key[0] for one in late], [one.key[1] for one in late]
        rows = await tx.all(SQL.undecided_needs, runs=runs, items=items) if late else []
        missing = {(row["run_id"], row["item"], row["url"]) for row in rows}
        for one in late:
            if one.result is not None:
                one.result.photos[:] = [
                    msgspec.structs.replace(photo, outcome=LATE)
                    if photo.key is None and (*one.key, photo.url) in missing
                    else photo
                    for photo in one.result.photos
                ]
        return late

    async def release(self, customer: str, item: str) -> None:
        """Publish a held item as it is. Raises: NotHeld."""
        async with self._postgres.transaction() as tx:
            row = await tx.one(SQL.lock_held, customer=customer, item=item)
            if row is None:
                raise NotHeld(customer, item)
            [one] = await self._prepared(tx, [row], is_late=True)
            await self.store(tx, [one])

    async def _insert(self, tx: Tx, results: list[NewResult]) -> dict[str, int]:
        """Insert results and enqueue the jobs of their receivers; return the consumers."""
        ids = await self._consumers.ids(tx)
        if results:
            published = await store.results.insert_results(tx, results)
            receivers = {name: id_ for name, id_ in ids.items() if name != HOOK}
            await self._jobs.enqueue_many(deliveries(published, receivers), tx=tx)
            await self._webhooks.notify(tx, {result.customer for result in results})
        return ids

    async def _settle_undecided(self, tx: Tx, changes: list[Any]) -> None:
        """Set the outcome of photos whose jobs ended without one (quarantined, cancelled)."""
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
            await store.outcomes.decide(tx, lost)

    async def _prepared(self, tx: Tx, changes: list[Any], *, is_late: bool) -> list[Prepared]:
        """What each change publishes now; nothing if a later version replaced it."""
        keys = [(row["customer"], row["item"]) for row in changes]
        photos = await store.outcomes.item_photos(tx, keys) if keys else {}
        last = await store.results.last_results(tx, keys) if keys else {}
        found = []
        for key, row in zip(keys, changes, strict=True):
            last_action, last_photos = last.get(key, ("unpublish", "[]"))
            is_newest = row["version"] == row["item_version"]
            is_again = row["kind"] == "retry" or row["is_late"]
            is_same = is_again and store.results.has_same_photos(last_photos, photos[key])
            is_edit = is_newest and is_again and not is_same
            action = next_action(is_gone=row["is_gone"], is_shown=last_action != "unpublish")
            result = None
            if action is not None and is_newest and not is_same:
                version = row["version"] + is_edit
                result = NewResult(*key, version, action, row["fields"], photos[key])
            place = (row["run_id"], row["item"])
            is_gone = row["is_gone"] and is_newest
            found.append(Prepared(place, key[0], result, is_edit, is_gone, is_late))
        return found

    async def deliver(self, job: JobContext[ItemJob]) -> None:
        """Call the consumer of a job; an error of the handler retries the job."""
        try:
            await self._deliver(job, await self._ids.submit(None))
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _read_ids(self, requests: list[None]) -> list[dict[str, int]]:
        return [await self._consumers.ids()] * len(requests)

    async def _deliver(self, job: JobContext[ItemJob], ids: dict[str, int]) -> None:
        """Deliver the newest version of the job's item to its consumer, or snooze the job."""
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
        request = DeliveryRequest(consumer, job.payload.seq, job.id)
        found = await self._deliveries.begin(request)
        if found is None:
            job.done()
            return
        result = found.result
        if not found.is_taken:
            if found.delivered_version >= result.version:
                await self._postgres.run(SQL.forget_absent, consumer=consumer, seq=job.payload.seq)
                job.done()
            else:
                job.snooze(BUSY_AGAIN_S)
            return
        # Version 0 of a shown item: a replay to a consumer that may have lost it.
        is_known = found.delivered_version > 0 or result.action == "unpublish"
        error = await self._call(handler, result, is_shown=found.is_shown and is_known)
        if error is None:
            await self._deliveries.end(request, result)
            job.done()
            return
        place = {"consumer": consumer, "customer": result.customer, "item": result.id}
        _LOG.warning("item_handler_failed", **place, error=repr(error), exc_info=error)
        await self._postgres.run(SQL.drop_delivery, **place, job_id=job.id)
        job.retry(None, f"{type(error).__name__}: {error}")

    async def _call(
        self, handler: Handler, result: Result, *, is_shown: bool
    ) -> BaseException | None:
        """Call `handler` if the item changed for it; return its exception or None."""
        action = next_action(is_gone=result.action == "unpublish", is_shown=is_shown)
        if action is None:
            return None
        item = store.results.item_of(result, action)
        limit_s, threads = self._handler_timeout_s, self._consumers.threads
        return (await call_handler(handler, item, timeout_s=limit_s, threads=threads))[1]


async def call_handler(
    handler: Callable[[Item], Any], item: Item, *, timeout_s: float, threads: HandlerThreads
) -> tuple[Any, BaseException | None]:
    """Call `handler`, a plain function in a thread; return its result, or its exception.

    Raises: CancelledError if the worker stops.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if is_async(handler):
                return await handler(item), None
            found = await threads.run(partial(handler, item), [])
            return (await found if inspect.isawaitable(found) else found), None
    except BaseException as error:
        # A handler may raise anything; only its own job fails.
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if not limit.expired():
            return None, error
        late = TimeoutError(f"the handler exceeded fetch.handler_timeout ({timeout_s:g} s)")
        late.__cause__ = error
        return None, late


def _late_job(row: Any) -> NewJob:
    payload = PublishJob(run=row["run_id"], item=row["item"], late=True)
    return NewJob(queue=PUBLISH_QUEUE, payload=payload, lane=row["customer"])


def absent_wait_s(away_s: float) -> float:
    """Retry delay of a delivery without a handler for `away_s`."""
    least_s, most_s = ABSENT_S
    return min(most_s, max(least_s, away_s * ABSENT_SHARE))


def next_action(*, is_gone: bool, is_shown: bool) -> str | None:
    """Action for a receiver that shows the item or not; None: no action."""
    if is_gone:
        return "unpublish" if is_shown else None
    return "edit" if is_shown else "publish"
