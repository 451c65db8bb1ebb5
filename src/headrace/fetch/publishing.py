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

**Consumers** are `on_item` handlers, recorded in PostgreSQL so that an absence loses no result. A
process whose application has `on_item` handlers records them when it starts to work. From then on
every result is enqueued for each recorded consumer, whichever process publishes it. A delivery
whose consumer is not in this process waits for a worker that has it, with growing delays, and is
enqueued again when such a worker starts. So a restart without the application, a renamed function
or a fleet of several applications delays deliveries and drops none. Only a person removes a
consumer (`remove`): deliveries carry its id, and those with an unknown id are dropped when they
run.

Recording takes the same lock as publishing. A result is either delivered to a new consumer or
older than it, which is logged; `replay` delivers the older ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import msgspec

from headrace.engines.postgres import Postgres, Runner, Tx
from headrace.fetch import store
from headrace.fetch.errors import ConsumerUnknown
from headrace.fetch.model import CONSUMER_CHARACTERS_MAX, ITEM_QUEUE, Consumer, Item, Result
from headrace.fetch.sql import SQL
from headrace.fetch.store.outcomes import Decision
from headrace.fetch.store.results import DeliveryRequest, DeliveryStore, NewResult
from headrace.fetch.webhook_delivery import WebhookSender
from headrace.jobs import Batch, JobContext, Jobs, NewJob, Snooze
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point

Handler: TypeAlias = Callable[[Item], Awaitable[None]]
ITEMS_OF_PAGE: Final = 5000
WARN_EVERY_S: Final = 60.0
_LOG: Final = logger(__name__)


class ItemJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload: a result of an item for a consumer."""

    seq: int
    consumer: str
    consumer_id: int


class Consumers:
    """Recorded consumers, and the handlers of this process: `fetch.consumers`."""

    def __init__(self, postgres: Postgres, jobs: Jobs) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._handlers: dict[str, Handler] = {}
        self._is_declared = True
        self._warned_s: dict[str, float] = {}

    def add(self, handler: Handler) -> None:
        """Register a handler of this process by its module and name."""
        name = f"{handler.__module__}.{getattr(handler, '__qualname__', type(handler).__name__)}"
        self._handlers[name] = handler
        self._is_declared = False

    def handler(self, name: str) -> Handler | None:
        """The handler of a consumer; logs a warning once a minute if this process has none."""
        found = self._handlers.get(name)
        now_s = time.monotonic()
        if found is None and now_s - self._warned_s.get(name, -WARN_EVERY_S) >= WARN_EVERY_S:
            self._warned_s[name] = now_s
            _LOG.warning(
                "item_consumer_not_here",
                consumer=name,
                text="deliveries wait for a worker whose application has this on_item handler;"
                f" to drop them: headrace fetch consumer rm '{name}'",
            )
        return found

    async def declare(self) -> None:
        """Record the handlers of this process, once until another is added."""
        if self._is_declared:
            return
        async with self._postgres.transaction() as tx:
            await tx.run(SQL.lock_result_order)
            new = [r["name"] for r in await tx.all(SQL.add_consumers, names=list(self._handlers))]
            has_results = bool(new) and await tx.value(SQL.has_results)
        self._is_declared = True
        await self._enqueue_waiting()
        for name in new:
            _LOG.info("item_consumer_added", consumer=name)
            if has_results:
                _LOG.warning(
                    "item_consumer_came_late",
                    consumer=name,
                    text="items published before it are not delivered: replay them with"
                    f" headrace fetch consumer replay '{name}'",
                )

    async def _enqueue_waiting(self) -> None:
        """Enqueue the deliveries that waited for handlers of this process.

        Their old jobs find them done.
        """
        count = ITEMS_OF_PAGE
        while count == ITEMS_OF_PAGE:
            async with self._postgres.transaction() as tx:
                rows = await tx.all(
                    SQL.take_absent, names=list(self._handlers), rows_max=ITEMS_OF_PAGE
                )
                ids = await self.ids(tx)
                jobs = [
                    job
                    for name in self._handlers.keys() & ids.keys()
                    for job in deliveries(
                        [(r["seq"], r["customer"]) for r in rows if r["consumer"] == name],
                        {name: ids[name]},
                    )
                ]
                await self._jobs.enqueue_many(jobs, tx=tx)
            count = len(rows)

    async def ids(self, runner: Runner | None = None) -> dict[str, int]:
        """The id of each recorded consumer, by name."""
        rows = await (runner or self._postgres).all(SQL.consumer_ids)
        return {row["name"]: row["id"] for row in rows}

    async def all(self) -> list[Consumer]:
        """Every consumer, by name."""
        rows = await self._postgres.all(SQL.consumers)
        return [Consumer(**dict(row)) for row in rows]

    async def remove(self, name: str) -> None:
        """Remove a consumer and drop its deliveries; a worker with its handler records it again.

        Raises: ConsumerUnknown.
        """
        if not _is_name(name) or not await self._postgres.run(SQL.remove_consumer, name=name):
            raise ConsumerUnknown(name)

    async def replay(self, name: str, *, customer: str | None = None) -> int:
        """Redeliver the newest version of every item to a consumer; return the number of items.

        Each page of items is a transaction, so an interrupted replay can be repeated safely.
        Raises: ConsumerUnknown, CustomerUnknown.
        """
        if customer is not None:
            await store.runs.get_customer(self._postgres, customer)
        items, page_items, place = 0, ITEMS_OF_PAGE, ("", "")
        while page_items == ITEMS_OF_PAGE:
            async with self._postgres.transaction() as tx:
                consumer_id = (
                    await tx.value(SQL.lock_consumer, name=name) if _is_name(name) else None
                )
                if consumer_id is None:
                    raise ConsumerUnknown(name)
                rows = await tx.all(
                    SQL.replay_page,
                    name=name,
                    customer=customer,
                    after_customer=place[0],
                    after_item=place[1],
                    rows_max=ITEMS_OF_PAGE,
                )
                await tx.run(
                    SQL.rewind_deliveries,
                    name=name,
                    customers=[row["customer"] for row in rows],
                    items=[row["item"] for row in rows],
                )
                results = [(row["seq"], row["customer"]) for row in rows]
                jobs = deliveries(results, {name: consumer_id})
                await self._jobs.enqueue_many(jobs, tx=tx)
            page_items = len(rows)
            items += page_items
            place = (rows[-1]["customer"], rows[-1]["item"]) if rows else place
        return items


def deliveries(results: list[tuple[int, str]], consumers: dict[str, int]) -> list[NewJob]:
    """One job per result (its `seq` and customer) and consumer."""
    return [
        NewJob(
            queue=ITEM_QUEUE,
            payload=ItemJob(seq=seq, consumer=name, consumer_id=consumer_id),
            lane=customer,
        )
        for seq, customer in results
        for name, consumer_id in consumers.items()
    ]


def _is_name(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= CONSUMER_CHARACTERS_MAX


DELIVERIES_AT_ONCE: Final = 50
"""Concurrent handler calls of a worker."""
LATE_ITEMS_AT_ONCE: Final = 200
LATE: Final = "failed:late"
"""Outcome of a photo that is missing at its item's deadline."""
BUSY_SLACK_S: Final = 30.0
"""Margin of an item's claim over the time limit of the call."""
BUSY_AGAIN_S: Final = 1.0
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
                await self._jobs.lock_lease(tx, batch.lease_id)
                await self._publish(tx, [job.payload for job in batch])
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _publish(self, tx: Tx, payloads: list[PublishJob]) -> None:
        keys = sorted({(p.run, p.item) for p in payloads})
        runs, items = [k[0] for k in keys], [k[1] for k in keys]
        changes = await tx.all(SQL.lock_changes, runs=runs, items=items)
        await tx.run(SQL.lock_result_order)
        await self._settle_undecided(tx, changes)
        results = await self._results_of(
            tx, [row for row in changes if row["version"] == row["item_version"]]
        )
        await self._insert(tx, results)
        await tx.run(SQL.note_published, runs=runs, items=items)

    async def publish_late(self, run_id: int) -> int:
        """Publish the items of a run that still wait for photos; return the number.

        Each item once. Its change stays open, and later photos make a further version.
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
                await tx.run(SQL.lock_result_order)
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
        """Insert results and enqueue the jobs of their receivers."""
        if results:
            published = await store.results.insert_results(tx, results)
            jobs = deliveries(published, await self._consumers.ids(tx))
            await self._jobs.enqueue_many(jobs, tx=tx)
            await self._webhooks.notify(tx, {result.customer for result in results})

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

    async def _results_of(self, tx: Tx, changes: list[Any]) -> list[NewResult]:
        keys = [(row["customer"], row["item"]) for row in changes]
        photos = await store.outcomes.item_photos(tx, keys)
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
        return await self._failure_of(handler, store.results.item_of(result, action))

    async def _failure_of(self, handler: Handler, item: Item) -> BaseException | None:
        """Call `handler`; return its exception or None.

        Raises: CancelledError if the worker stops.
        """
        limit = asyncio.timeout(self._handler_timeout_s)
        try:
            async with limit:
                await handler(item)
        except BaseException as error:
            # A handler may raise anything; only its own job fails.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if not limit.expired():
                return error
            late = TimeoutError(
                f"the handler exceeded fetch.handler_timeout ({self._handler_timeout_s:g} s)"
            )
            late.__cause__ = error
            return late
        return None


def absent_wait_s(away_s: float) -> float:
    """Retry delay of a delivery without a handler for `away_s`."""
    least_s, most_s = ABSENT_S
    return min(most_s, max(least_s, away_s * ABSENT_SHARE))


def next_action(*, is_gone: bool, is_shown: bool) -> str | None:
    """Action for a receiver that shows the item or not; None: no action."""
    if is_gone:
        return "unpublish" if is_shown else None
    return "edit" if is_shown else "publish"
