"""Routes of customers, their webhooks, and the consumers of results."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.fetch.errors import InvalidRate
from headrace.fetch.http.requests import READ, WRITE
from headrace.fetch.model import (
    Consumer,
    Customer,
    CustomerSet,
    NewSecret,
    Webhook,
    WebhookReplay,
    WebhookTrial,
    parse_rate,
)
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX

WINDOW_S: Final = 60.0


class CustomersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every customer, by name."""

    customers: list[Customer]


class WebhookTo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """URL that receives results."""

    url: str


class CustomerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `starts_max` requests in any `window_s` (60) seconds, `connections` at once.

    `rate` is another form of the first two.
    """

    starts_max: int | None = None
    window_s: float | None = None
    rate: str | None = None
    """`600/m`, `10/s`, `20/5s`, `5000/h`."""
    connections: int = 8
    webhook: WebhookTo | msgspec.UnsetType | None = msgspec.UNSET
    """URL that receives its results; null: none; omitted: unchanged."""
    hold_share: float | msgspec.UnsetType | None = msgspec.UNSET
    """A catalogue that removes more than this share of the items, 0 to 1, and more than
    `hold_items` is held; 1: never; null: `fetch.hold_share`; omitted: unchanged.
    """
    hold_items: int | msgspec.UnsetType | None = msgspec.UNSET
    """Null: `fetch.hold_items`; omitted: unchanged."""
    refresh_s: float | msgspec.UnsetType | None = msgspec.UNSET
    """Good photos are requested again after this number of seconds; 0: never; null:
    `fetch.refresh`; omitted: unchanged.
    """


@put("/v1/fetch/customers/{customer:str}", opt=WRITE)
async def set_fetch_customer(
    fetch: NamedDependency[Fetch], customer: FromPath[str], data: JSONBody[CustomerLimits]
) -> CustomerSet:
    """Create a customer or change its limits, at once, for photos not started yet.

    Only this response contains the secret of a new webhook.
    """
    to = data.webhook
    starts_max, window_s = _limit_of(data)
    return await fetch.customers.set(
        customer,
        starts_max=starts_max,
        window_s=window_s,
        connections=data.connections,
        webhook=to.url if isinstance(to, WebhookTo) else to,
        hold_share=data.hold_share,
        hold_items=data.hold_items,
        refresh_s=data.refresh_s,
    )


def _limit_of(data: CustomerLimits) -> tuple[int, float]:
    """Requests and their window, from either form. Raises: InvalidRate."""
    if data.rate is not None and data.starts_max is None and data.window_s is None:
        return parse_rate(data.rate)
    if data.rate is None and data.starts_max is not None:
        return data.starts_max, WINDOW_S if data.window_s is None else data.window_s
    raise InvalidRate("expected either rate, such as 600/m, or starts_max, with window_s if not 60")


@get("/v1/fetch/customers", opt=READ)
async def list_fetch_customers(fetch: NamedDependency[Fetch]) -> CustomersAnswer:
    """Every customer with its limits."""
    return CustomersAnswer(customers=await fetch.customers.all())


@get("/v1/fetch/customers/{customer:str}", opt=READ)
async def get_fetch_customer(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> Customer:
    """Show a customer's limits."""
    return await fetch.customers.get(customer)


class WebhooksAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of webhooks."""

    webhooks: list[Webhook]


@get("/v1/fetch/webhooks", opt=READ)
async def list_fetch_webhooks(
    fetch: NamedDependency[Fetch],
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> WebhooksAnswer:
    """Webhooks by customer with backlog and failures; continue with `after` = the last customer."""
    return WebhooksAnswer(webhooks=await fetch.webhooks.list(after=after, webhooks_max=limit))


@get("/v1/fetch/customers/{customer:str}/webhook", opt=READ)
async def get_fetch_webhook(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> Webhook:
    """URL, progress and last error of a webhook."""
    return await fetch.webhooks.get(customer)


@delete("/v1/fetch/customers/{customer:str}/webhook", opt=WRITE)
async def remove_fetch_webhook(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> None:
    """Delete the webhook. Results remain available by polling."""
    await fetch.webhooks.remove(customer)


@post("/v1/fetch/customers/{customer:str}/webhook/rotate", opt=WRITE, status_code=200)
async def rotate_fetch_webhook_secret(
    fetch: NamedDependency[Fetch], customer: FromPath[str]
) -> NewSecret:
    """Return the new secret, only once; the previous one also signs for a day."""
    return await fetch.webhooks.rotate(customer)


@post("/v1/fetch/customers/{customer:str}/webhook/replay", opt=WRITE, status_code=202)
async def replay_fetch_webhook(
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    after: Annotated[int, QueryParameter(ge=0)] = 0,
) -> WebhookReplay:
    """Resend every result after number `after`, in order."""
    return await fetch.webhooks.replay(customer, after=after)


@post("/v1/fetch/customers/{customer:str}/webhook/test", opt=WRITE, status_code=200)
async def test_fetch_webhook(
    fetch: NamedDependency[Fetch], customer: FromPath[str]
) -> WebhookTrial:
    """Send a signed test message without results; return the receiver's response."""
    return await fetch.webhooks.test(customer)


class ConsumersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every consumer."""

    consumers: list[Consumer]


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Number of items delivered to the consumer again."""

    consumer: str
    items: int


@get("/v1/fetch/consumers", opt=READ)
async def list_fetch_consumers(fetch: NamedDependency[Fetch]) -> ConsumersAnswer:
    """Every `on_item` handler that a worker has started with, with its number of delivered
    items.
    """
    return ConsumersAnswer(consumers=await fetch.consumers.all())


@delete("/v1/fetch/consumers/{name:str}", opt=WRITE)
async def remove_fetch_consumer(fetch: NamedDependency[Fetch], name: FromPath[str]) -> None:
    """Remove a consumer and its waiting deliveries; a worker with its handler adds it again."""
    await fetch.consumers.remove(name)


@post("/v1/fetch/consumers/{name:str}/replay", opt=WRITE, status_code=202)
async def replay_fetch_consumer(
    fetch: NamedDependency[Fetch], name: FromPath[str], customer: FromQuery[str | None] = None
) -> ReplayAnswer:
    """Deliver the newest version of every item again, of one customer or of all."""
    items = await fetch.consumers.replay(name, customer=customer)
    return ReplayAnswer(consumer=name, items=items)
