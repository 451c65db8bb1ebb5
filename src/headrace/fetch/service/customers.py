"""Customers and their webhooks: limits, and the URL that receives results."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from headrace.engines.postgres import Postgres, Runner
from headrace.fetch import store
from headrace.fetch.download import PostFailed
from headrace.fetch.errors import InvalidCustomer, InvalidRate, WebhookUnknown
from headrace.fetch.guard import Policy, judge_url
from headrace.fetch.model import (
    BIGINT_MAX,
    LIMITER,
    Customer,
    CustomerSet,
    NewSecret,
    Webhook,
    WebhookReplay,
    WebhookTrial,
)
from headrace.fetch.sql import SQL
from headrace.fetch.store.results import Hook
from headrace.fetch.webhook_delivery import (
    OVERLAP_S,
    WebhookSender,
    new_secret,
    webhook_job,
)
from headrace.jobs import Jobs
from headrace.kernel.ids import USER_ID, require_new_id
from headrace.kernel.routes import PAGE_ROWS_MAX

STARTS_MAX_MAX: Final = 1_000_000
CONNECTIONS_MAX: Final = 1000
HOLD_ITEMS_MAX: Final = 1_000_000_000
REFRESH_S_MIN: Final = 3600.0
REFRESH_S_MAX: Final = 10 * 365 * 86_400.0
_JSON: Final = msgspec.json.Encoder()


class Webhooks:
    """URLs that receive the results of customers: `fetch.webhooks`."""

    def __init__(
        self, postgres: Postgres, jobs: Jobs, sender: WebhookSender, policy: Policy
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._sender = sender
        self._policy = policy

    async def set(self, customer: str, url: str, *, tx: Runner) -> str | None:
        """Send the results of a customer to `url`; return the secret if it is new.

        Setting it again changes the URL, enables the webhook and sends its backlog at once. Runs
        inside the transaction that creates or changes the customer. Raises: UrlRefused.
        """
        judge_url(url, self._policy)
        secret = new_secret()
        # Publishing takes the same lock: a result is either older than the webhook or finds it.
        await tx.run(SQL.lock_result_order)
        turn, is_new = await store.results.set_webhook(tx, customer, url=url, secret=secret)
        await self._jobs.enqueue_many([webhook_job(turn)], tx=tx)
        return secret if is_new else None

    async def get(self, customer: str) -> Webhook:
        """A customer's webhook with its progress. Raises: WebhookUnknown."""
        return (await self._hook(customer)).shown

    async def url_of(self, customer: str) -> str | None:
        """The URL that receives a customer's results, or None."""
        found = await store.results.find_webhooks(
            self._postgres, customer=customer, is_counted=False
        )
        return found[0].shown.url if found else None

    async def list(self, *, after: str = "", webhooks_max: int = 100) -> list[Webhook]:
        """Webhooks behind customer `after`, by customer."""
        rows_max = min(max(1, webhooks_max), PAGE_ROWS_MAX)
        after = after if after.isprintable() else ""
        found = await store.results.find_webhooks(self._postgres, after=after, rows_max=rows_max)
        return [hook.shown for hook in found]

    async def remove(self, customer: str) -> None:
        """Delete the webhook. Results remain available by polling. Raises: WebhookUnknown."""
        await self._hook(customer)
        await self._postgres.run(SQL.remove_webhook, customer=customer)

    async def rotate(self, customer: str) -> NewSecret:
        """Replace a webhook's secret; the previous one also signs for a day.

        Raises: WebhookUnknown.
        """
        await self._hook(customer)
        secret = new_secret()
        old_until = await self._postgres.value(
            SQL.rotate_secret, customer=customer, secret=secret, overlap_s=OVERLAP_S
        )
        return NewSecret(customer=customer, secret=secret, old_until=old_until)

    async def replay(self, customer: str, *, after: int = 0) -> WebhookReplay:
        """Resend every result after number `after`, at once. Raises: WebhookUnknown."""
        await self._hook(customer)
        after = min(max(0, after), BIGINT_MAX)
        async with self._postgres.transaction() as tx:
            turn = await store.results.rewind(tx, customer, after=after)
            if turn is None:
                raise WebhookUnknown(customer)
            # Counted before the commit: afterwards the job may have sent some of them.
            [hook] = await store.results.find_webhooks(tx, customer=customer)
            await self._jobs.enqueue_many([webhook_job(turn)], tx=tx)
        return WebhookReplay(customer=customer, after=after, waiting=hook.shown.waiting)

    async def test(self, customer: str) -> WebhookTrial:
        """Send a signed test message without results; return the response.

        Raises: WebhookUnknown.
        """
        hook = await self._hook(customer)
        body = _JSON.encode({"type": "fetch.test", "customer": customer, "results": []})
        started_s = time.monotonic()
        try:
            posted = await self._sender.post(hook, f"test_{token_hex(8)}", body)
        except PostFailed as error:
            status, text = None, error.text
        else:
            status = posted.status
            is_accepted = 200 <= status < 300
            text = "accepted" if is_accepted else f"the receiver responded {status}"
        return WebhookTrial(
            customer=customer,
            url=hook.shown.url,
            is_accepted=text == "accepted",
            status=status,
            text=text,
            took_s=round(time.monotonic() - started_s, 4),
        )

    async def _hook(self, customer: str) -> Hook:
        is_name = USER_ID.fullmatch(customer) is not None
        found = (
            await store.results.find_webhooks(self._postgres, customer=customer) if is_name else []
        )
        if not found:
            raise WebhookUnknown(customer)
        return found[0]


class Customers:
    """Customers and their limits, which are those of their lanes: `fetch.customers`."""

    def __init__(self, postgres: Postgres, jobs: Jobs, webhooks: Webhooks) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._webhooks = webhooks

    async def set(
        self,
        customer: str,
        *,
        starts_max: int,
        window_s: float,
        connections: int,
        webhook: str | UnsetType | None = UNSET,
        hold_share: float | UnsetType | None = UNSET,
        hold_items: int | UnsetType | None = UNSET,
        refresh_s: float | UnsetType | None = UNSET,
    ) -> CustomerSet:
        """Create a customer or change its limits, for photos not started yet.

        `webhook`: the URL that receives its results, None for none; the result of this call has
        the secret of a new webhook, and no other does. A catalogue that removes more than
        `hold_share` of the items and more than `hold_items` is held. Good photos are requested
        again after `refresh_s`, 0 for never. None selects the deployment's setting. Omitted values
        and a pause of the lane stay as they are. Raises: InvalidId, InvalidRate, InvalidCustomer,
        UrlRefused.
        """
        given = {"hold_share": hold_share, "hold_items": hold_items, "refresh_s": refresh_s}
        secret = None
        async with self._postgres.transaction() as tx:
            values = _checked(customer, starts_max, window_s, connections=connections)
            known = await store.runs.find_customers(tx, customer)
            kept = msgspec.structs.asdict(known[0] if known else values)
            more = {n: kept[n] if value is UNSET else value for n, value in given.items()}
            values = _require_valid(msgspec.structs.replace(values, **more))
            await store.runs.set_customer(tx, values)
            if isinstance(webhook, str):
                secret = await self._webhooks.set(customer, webhook, tx=tx)
            elif webhook is None:
                await tx.run(SQL.remove_webhook, customer=customer)
            await self._jobs.lanes.set(
                LIMITER,
                customer,
                starts_max=starts_max,
                window_s=window_s,
                concurrency=connections,
                paused=None,
                weight=None,
                tx=tx,
            )
        return CustomerSet(
            **msgspec.structs.asdict(values),
            webhook=await self._webhooks.url_of(customer),
            webhook_secret=secret,
        )

    async def get(self, customer: str) -> Customer:
        """A customer's limits. Raises: CustomerUnknown."""
        return await store.runs.get_customer(self._postgres, customer)

    async def all(self) -> list[Customer]:
        """Every customer, by name."""
        return await store.runs.find_customers(self._postgres)


def _require_valid(values: Customer) -> Customer:
    """Check the limits for catalogues. Raises: InvalidCustomer."""
    share, items, refresh_s = values.hold_share, values.hold_items, values.refresh_s
    because = None
    if share is not None and not 0 <= share <= 1:
        because = f"hold_share {share:g}: use a share from 0 to 1 such as 0.3; 1 holds no catalogue"
    elif items is not None and not 0 <= items <= HOLD_ITEMS_MAX:
        because = f"hold_items {items}: use 0 to {HOLD_ITEMS_MAX:,}"
    elif refresh_s is not None and refresh_s != 0 and not refresh_s >= REFRESH_S_MIN:
        because = f"refresh_s {refresh_s:g}: use {REFRESH_S_MIN:g} seconds or more, or 0 for never"
    elif refresh_s is not None and refresh_s > REFRESH_S_MAX:
        because = f"refresh_s {refresh_s:g}: use at most {REFRESH_S_MAX:g} seconds"
    if because is not None:
        raise InvalidCustomer(f"customer {values.customer!r}: {because}")
    return values


def _checked(customer: str, starts_max: int, window_s: float, *, connections: int) -> Customer:
    """A customer with checked rate and connections. Raises: InvalidId, InvalidRate."""
    require_new_id("customer", customer)
    if not 1 <= starts_max <= STARTS_MAX_MAX or not 0.1 <= window_s <= 86_400:
        raise InvalidRate(
            f"customer {customer!r}: {starts_max} requests in {window_s:g} s: use 1 to"
            f" {STARTS_MAX_MAX:,} requests in 0.1 s to 86400 s"
        )
    if not 1 <= connections <= CONNECTIONS_MAX:
        raise InvalidRate(
            f"customer {customer!r}: {connections} connections: use 1 to {CONNECTIONS_MAX}"
        )
    return Customer(
        customer=customer, starts_max=starts_max, window_s=window_s, connections=connections
    )
