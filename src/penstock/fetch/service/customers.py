"""The verbs of customers: their limits, which are those of their lanes."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from penstock.engines.postgres import Postgres
from penstock.fetch import store
from penstock.fetch.errors import CustomerUnknown, InvalidRate
from penstock.fetch.model import LIMITER, Customer, CustomerSet
from penstock.fetch.service.webhooks import Webhooks
from penstock.fetch.store.sql import SQL
from penstock.jobs import Jobs
from penstock.kernel.ids import USER_ID, require_new_id

STARTS_MAX_MAX: Final = 1_000_000
CONNECTIONS_MAX: Final = 1000


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
    ) -> CustomerSet:
        """Make a customer or change its limits; they hold for photos not started yet.

        A pause of its lane goes on.

        `webhook`: the URL that its results are sent to, None for none, left out: as it is.
        Raises: InvalidId, InvalidRate, UrlRefused.
        """
        values = _judged(customer, starts_max, window_s, connections=connections)
        secret = None
        async with self._postgres.transaction() as tx:
            await store.customers.set_customer(tx, values)
            if isinstance(webhook, str):
                secret = await self._webhooks.set(customer, webhook, tx=tx)
            elif webhook is None:
                await tx.run(SQL.remove_webhook, customer=customer)
            await self._jobs.set_lane(
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
