"""Routes of customers."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from penstock.fetch.http.scopes import READ, WRITE
from penstock.fetch.model import Customer, CustomerSet
from penstock.fetch.service import Fetch


class CustomersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every customer, by name."""

    customers: list[Customer]


class WebhookTo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where results are sent."""

    url: str


class CustomerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `starts_max` requests in any `window_s` seconds, `connections` at once."""

    starts_max: int
    window_s: float = 60.0
    connections: int = 8
    webhook: WebhookTo | msgspec.UnsetType | None = msgspec.UNSET
    """Where its results are sent; null: nowhere; left out: as it is."""


@put(
    "/v1/fetch/customers/{customer:str}",
    operation_id="setFetchCustomer",
    summary="Make a customer or change its limits",
    opt=WRITE,
)
async def set_customer(
    fetch: NamedDependency[Fetch], customer: FromPath[str], data: JSONBody[CustomerLimits]
) -> CustomerSet:
    """Make a customer or change its limits; they hold at once, for photos not started yet.

    The secret that a new webhook's messages are signed with is in this answer alone.
    """
    to = data.webhook
    return await fetch.set_customer(
        customer,
        starts_max=data.starts_max,
        window_s=data.window_s,
        connections=data.connections,
        webhook=to.url if isinstance(to, WebhookTo) else to,
    )


@get(
    "/v1/fetch/customers",
    operation_id="listFetchCustomers",
    summary="List customers",
    opt=READ,
)
async def list_customers(fetch: NamedDependency[Fetch]) -> CustomersAnswer:
    """Every customer with its limits."""
    return CustomersAnswer(customers=await fetch.customers())


@get(
    "/v1/fetch/customers/{customer:str}",
    operation_id="getFetchCustomer",
    summary="Show a customer",
    opt=READ,
)
async def get_customer(fetch: NamedDependency[Fetch], customer: FromPath[str]) -> Customer:
    """Show a customer's limits."""
    return await fetch.customer(customer)


ROUTES: Final[list[Any]] = [list_customers, set_customer, get_customer]
