"""Consumers: the `on_item` handlers that receive results, recorded in PostgreSQL.

They are recorded so that an absence loses no result. A process whose application has `on_item`
handlers records them when it starts to work. From then on every result is enqueued for each
recorded consumer, whichever process publishes it. A delivery whose consumer is not in this process
waits for a worker that has it, with growing delays, and is enqueued again when such a worker
starts. So a restart without the application, a renamed function or a fleet of several applications
delays deliveries and drops none. Only a person removes a consumer (`remove`): deliveries carry its
id, and those with an unknown id are dropped when they run.

Recording takes the same lock as publishing. A result is either delivered to a new consumer or
older than it, which is logged; `replay` delivers the older ones.

A `before_publish` handler (`publish_check.py`) is recorded as the consumer HOOK. A process without
it then publishes nothing: its jobs wait for a process that has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final, TypeAlias

import msgspec

from headrace.engines.postgres import Postgres, Runner
from headrace.fetch import store
from headrace.fetch.errors import ConsumerUnknown, NothingToReplay
from headrace.fetch.model import CONSUMER_CHARACTERS_MAX, ITEM_QUEUE, Consumer, Item
from headrace.fetch.sql import SQL
from headrace.jobs import Jobs, NewJob
from headrace.jobs.slots.isolation import HandlerThreads
from headrace.kernel.logs import logger

Handler: TypeAlias = Callable[[Item], Any]
"""`async def`, or `def`, which is called in a thread."""
ITEMS_OF_PAGE: Final = 5000
WARN_EVERY_S: Final = 60.0
HOOK: Final = "before_publish"
"""Name under which a `before_publish` handler is recorded; a handler's name has a dot."""
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
        self._has_hook = False
        self._is_declared = True
        self._warned_s: dict[str, float] = {}

    @cached_property
    def threads(self) -> HandlerThreads:
        """Threads of `def` handlers, created at the first call: after the fork of a slot."""
        return HandlerThreads()

    def close(self) -> None:
        """Let the idle threads of handlers end."""
        if "threads" in self.__dict__:
            self.threads.close()

    def add(self, handler: Handler) -> None:
        """Register a handler of this process by its module and name."""
        name = f"{handler.__module__}.{getattr(handler, '__qualname__', type(handler).__name__)}"
        self._handlers[name] = handler
        self._is_declared = False

    def add_hook(self) -> None:
        """Record that this process has a `before_publish` handler."""
        self._has_hook = True
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
                text="its items wait for a worker whose application has this handler;"
                f" to do without it: headrace fetch consumer rm '{name}'",
            )
        return found

    async def declare(self) -> None:
        """Record the handlers of this process, once until another is added."""
        if self._is_declared:
            return
        names = [*self._handlers, *([HOOK] if self._has_hook else [])]
        async with self._postgres.transaction() as tx:
            await tx.run(SQL.lock_result_order)
            new = [r["name"] for r in await tx.all(SQL.add_consumers, names=names)]
            has_results = bool(new) and await tx.value(SQL.has_results)
        self._is_declared = True
        await self._enqueue_waiting()
        for name in new:
            _LOG.info("item_consumer_added", consumer=name)
            if has_results and name != HOOK:
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
        Raises: ConsumerUnknown, CustomerUnknown, NothingToReplay.
        """
        if name == HOOK:
            raise NothingToReplay(
                f"{HOOK} is the check before publishing and receives no deliveries: send the items"
                " or their catalogue again"
            )
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
