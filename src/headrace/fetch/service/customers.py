"""The verbs of customers: their limits, which are those of their lanes."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.errors import CustomerUnknown, InvalidCustomer, InvalidRate
from headrace.fetch.model import LIMITER, Customer, CustomerSet
from headrace.fetch.service.webhooks import Webhooks
from headrace.fetch.store.sql import SQL
from headrace.jobs import Jobs
from headrace.kernel.ids import USER_ID, require_new_id

STARTS_MAX_MAX: Final = 1_000_000
CONNECTIONS_MAX: Final = 1000
HOLD_ITEMS_MAX: Final = 1_000_000_000
REFRESH_S_MIN: Final = 3600.0
REFRESH_S_MAX: Final = 10 * 365 * 86_400.0


class Customers:
    """Whose catalogues and photos, and how fast their hosts may be asked."""

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
        """Make a customer or change its limits; they hold for photos not started yet.

        A pause of its lane continues. `webhook`: the URL that its results are sent to, None for none.
        `hold_share`, `hold_items`, `refresh_s`: None for the deployment's setting. What is left out stays
        as it is. Raises: InvalidId, InvalidRate, InvalidCustomer, UrlRefused.
        """
        given = {"hold_share": hold_share, "hold_items": hold_items, "refresh_s": refresh_s}
        secret = None
        async with self._postgres.transaction() as tx:
            values = _judged(customer, starts_max, window_s, connections=connections)
            known = await store.customers.find_customers(tx, customer)
            kept = msgspec.structs.asdict(known[0] if known else values)
            more = {n: kept[n] if value is UNSET else value for n, value in given.items()}
            values = _require_fit(msgspec.structs.replace(values, **more))
            await store.customers.set_customer(tx, values)
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
        is_name = USER_ID.fullmatch(customer) is not None
        found = await store.customers.find_customers(self._postgres, customer) if is_name else []
        if not found:
            raise CustomerUnknown(customer)
        return found[0]

    async def all(self) -> list[Customer]:
        """Every customer, by name."""
        return await store.customers.find_customers(self._postgres)


def _require_fit(values: Customer) -> Customer:
    """`values`, if what they say about catalogues makes sense. Raises: InvalidCustomer."""
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


def _judged(customer: str, starts_max: int, window_s: float, *, connections: int) -> Customer:
    """The values of a customer. Raises: InvalidId, InvalidRate."""
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
