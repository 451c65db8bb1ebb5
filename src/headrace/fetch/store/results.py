"""Results, the published versions of items, and the progress of each customer's webhook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres, Row, Runner, from_row
from headrace.fetch.model import Item, ItemPhoto, Result, Webhook
from headrace.fetch.sql import SQL
from headrace.kernel.batching import Batcher

_PHOTOS: Final = msgspec.json.Decoder(list[ItemPhoto])
WAITING_COUNTED_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class NewResult:
    """A version of an item, ready to be published."""

    customer: str
    item: str
    version: int
    action: str
    fields: str
    photos: list[ItemPhoto]


async def insert_results(runner: Runner, results: list[NewResult]) -> list[tuple[int, str]]:
    """Publish `results` in order; return `seq` and customer of each new one."""
    rows = await runner.all(
        SQL.insert_results,
        customers=[r.customer for r in results],
        items=[r.item for r in results],
        versions=[r.version for r in results],
        actions=[r.action for r in results],
        fields=[r.fields for r in results],
        photos=[msgspec.json.encode(r.photos).decode() for r in results],
    )
    return [(row["seq"], row["customer"]) for row in rows]


def result_of(row: Row) -> Result:
    """The result of a row."""
    return from_row(
        Result,
        row,
        id=row["item"],
        fields=msgspec.json.decode(row["fields"]),
        photos=_PHOTOS.decode(row["photos"]),
    )


async def last_results(
    runner: Runner, keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[str, str]]:
    """(action, photos as stored) of the last result per (customer, item)."""
    rows = await runner.all(
        SQL.last_results, customers=[k[0] for k in keys], items=[k[1] for k in keys]
    )
    return {(row["customer"], row["item"]): (row["action"], row["photos"]) for row in rows}


def has_same_photos(kept: str, photos: list[ItemPhoto]) -> bool:
    """Whether the stored photos of a result have the same copies as `photos`."""
    return [photo.key for photo in _PHOTOS.decode(kept)] == [photo.key for photo in photos]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The newest version of an item for one job of a consumer."""

    result: Result
    is_taken: bool
    """The job has the claim on the item."""
    is_shown: bool
    delivered_version: int


@dataclass(frozen=True, slots=True)
class DeliveryRequest:
    """A job that delivers result `seq` to a consumer."""

    consumer: str
    seq: int
    job_id: int


class DeliveryStore:
    """Batched reads and writes of a worker's deliveries."""

    def __init__(self, postgres: Postgres, *, busy_s: float) -> None:
        self._postgres = postgres
        self._busy_s = busy_s
        self._begun: Batcher[DeliveryRequest, Delivery | None] = Batcher(self._begin_all)
        self._ended: Batcher[tuple[DeliveryRequest, Result], None] = Batcher(self._end_all)

    async def begin(self, request: DeliveryRequest) -> Delivery | None:
        """Claim an item for a job; None if its result no longer exists."""
        return await self._begun.submit(request)

    async def end(self, request: DeliveryRequest, result: Result) -> None:
        """Record that `result` was delivered and release the claim."""
        await self._ended.submit((request, result))

    async def _begin_all(self, requests: list[DeliveryRequest]) -> list[Delivery | None]:
        rows = await self._postgres.all(
            SQL.begin_deliveries,
            consumers=[r.consumer for r in requests],
            seqs=[r.seq for r in requests],
            job_ids=[r.job_id for r in requests],
            busy_s=self._busy_s,
        )
        found: list[Delivery | None] = [None] * len(requests)
        for row in rows:
            index = row["position"] - 1
            found[index] = Delivery(
                result=result_of(row),
                is_taken=row["is_taken"],
                is_shown=row["is_shown"],
                delivered_version=row["delivered_version"],
            )
        return found

    async def _end_all(self, ended: list[tuple[DeliveryRequest, Result]]) -> list[None]:
        await self._postgres.run(
            SQL.end_deliveries,
            consumers=[request.consumer for request, _ in ended],
            customers=[result.customer for _, result in ended],
            items=[result.id for _, result in ended],
            seqs=[request.seq for request, _ in ended],
            job_ids=[request.job_id for request, _ in ended],
            versions=[result.version for _, result in ended],
            are_shown=[result.action != "unpublish" for _, result in ended],
        )
        return [None] * len(ended)


def item_of(found: Result, action: str) -> Item:
    """The argument of a handler call."""
    return Item(
        customer=found.customer,
        id=found.id,
        version=found.version,
        action=action,
        fields=found.fields,
        photos=found.photos,
    )


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook with its secrets, for the sender only."""

    shown: Webhook
    id: int
    turn: int
    secrets: tuple[str, ...]
    """Newest first; two for a while after a rotation."""


@dataclass(frozen=True, slots=True)
class WebhookTurn:
    """The turn whose job may send for a webhook."""

    customer: str
    id: int
    turn: int


async def find_webhooks(
    runner: Runner,
    *,
    customer: str | None = None,
    after: str = "",
    rows_max: int = 1,
    is_counted: bool = True,
) -> list[Hook]:
    """Webhooks by customer, or the one of `customer`; `is_counted`: with their backlog."""
    rows = await runner.all(
        SQL.webhooks,
        customer=customer,
        after=after,
        rows_max=rows_max,
        count_max=WAITING_COUNTED_MAX if is_counted else 0,
    )
    return [
        Hook(
            shown=Webhook(**{name: row[name] for name in Webhook.__struct_fields__}),
            id=row["id"],
            turn=row["turn"],
            secrets=tuple(s for s in (row["secret"], row["old_secret"]) if s),
        )
        for row in rows
    ]


async def set_webhook(
    runner: Runner, customer: str, *, url: str, secret: str
) -> tuple[WebhookTurn, bool]:
    """Create a webhook or change its URL; return its turn and whether `secret` is new."""
    row = await runner.one(SQL.set_webhook, customer=customer, url=url, secret=secret)
    assert row is not None, "an upsert returns its row"
    return WebhookTurn(customer, row["id"], row["turn"]), row["is_new"]


async def rewind(runner: Runner, customer: str, *, after: int) -> WebhookTurn | None:
    """Resend results behind `after`; None if the customer has no webhook."""
    row = await runner.one(SQL.rewind_webhook, customer=customer, after=after)
    return None if row is None else WebhookTurn(customer, row["id"], row["turn"])


async def lock_turns(runner: Runner, customers: list[str]) -> list[WebhookTurn]:
    """Lock the enabled webhooks of customers, so that none goes idle before the commit."""
    rows = await runner.all(SQL.lock_webhooks, customers=customers)
    return [WebhookTurn(row["customer"], row["id"], row["turn"]) for row in rows]


async def unsent_results(
    runner: Runner, customer: str, *, after: int, rows_max: int, bytes_max: int
) -> list[Result]:
    """Results of a customer behind `after` within both limits, at least one."""
    rows = await runner.all(
        SQL.unsent_results, customer=customer, after=after, rows_max=rows_max, bytes_max=bytes_max
    )
    return [result_of(row) for row in rows]


async def turns_behind(runner: Runner, *, after: str, rows_max: int) -> list[WebhookTurn]:
    """Webhooks with a backlog, by customer."""
    rows = await runner.all(SQL.behind_webhooks, after=after, rows_max=rows_max)
    return [WebhookTurn(row["customer"], row["id"], row["turn"]) for row in rows]


async def end_turn(runner: Runner, customer: str, turn: int) -> bool:
    """End a turn without backlog, inside a transaction; False if there are results left.

    The check is a statement after the lock, so it reads everything that committed before the lock.
    """
    row = await runner.one(SQL.lock_webhook, customer=customer, turn=turn)
    if row is None:
        return True
    after = row["taken_seq"]
    if await runner.value(SQL.has_results_after, customer=customer, after=after):
        return False
    await runner.run(SQL.end_turn, customer=customer, turn=turn)
    return True
