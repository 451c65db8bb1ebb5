"""Routes of webhooks: where a customer's results are sent by themselves."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.fetch.http.scopes import READ, WRITE
from headrace.fetch.model import NewSecret, Webhook, WebhookReplay, WebhookTrial
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX


class WebhooksAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of webhooks."""

    webhooks: list[Webhook]


@get(
    "/v1/fetch/webhooks",
    operation_id="listFetchWebhooks",
    summary="List webhooks",
    opt=READ,
)
async def list_webhooks(
    fetch: NamedDependency[Fetch],
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> WebhooksAnswer:
    """Webhooks by customer, with what waits and what failed; the next page is `after` the last customer."""
    return WebhooksAnswer(webhooks=await fetch.webhooks.list(after=after, webhooks_max=limit))


@get(
    "/v1/fetch/customers/{customer:str}/webhook",
    operation_id="getFetchWebhook",
    summary="Show a customer's webhook",
    opt=READ,
)
async def get_webhook(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> Webhook:
    """Where its results go, how far the receiver is, and what was wrong last."""
    return await fetch.webhooks.get(customer)


@delete(
    "/v1/fetch/customers/{customer:str}/webhook",
    operation_id="removeFetchWebhook",
    summary="Forget a customer's webhook",
    opt=WRITE,
)
async def remove_webhook(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> None:
    """Send its results nowhere any more; they stay for whoever polls."""
    await fetch.webhooks.remove(customer)


@post(
    "/v1/fetch/customers/{customer:str}/webhook/rotate",
    operation_id="rotateFetchWebhookSecret",
    summary="Give a webhook a new secret",
    opt=WRITE,
    status_code=200,
)
async def rotate_secret(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> NewSecret:
    """The new secret, told this once; the one before signs as well for a day."""
    return await fetch.webhooks.rotate(customer)


@post(
    "/v1/fetch/customers/{customer:str}/webhook/replay",
    operation_id="replayFetchWebhook",
    summary="Send a webhook its results once more",
    opt=WRITE,
    status_code=202,
)
async def replay_webhook(
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    after: Annotated[int, QueryParameter(ge=0)] = 0,
) -> WebhookReplay:
    """Every result after number `after` is sent again, in order, from now on."""
    return await fetch.webhooks.replay(customer, after=after)


@post(
    "/v1/fetch/customers/{customer:str}/webhook/test",
    operation_id="testFetchWebhook",
    summary="Send a webhook a test message",
    opt=WRITE,
    status_code=200,
)
async def try_webhook(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> WebhookTrial:
    """Send one signed message without results now and say what the receiver answers."""
    return await fetch.webhooks.test(customer)


ROUTES: Final[list[Any]] = [
    list_webhooks,
    get_webhook,
    remove_webhook,
    rotate_secret,
    replay_webhook,
    try_webhook,
]
