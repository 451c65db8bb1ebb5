"""Routes of customers."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.fetch.errors import InvalidRate
from headrace.fetch.http.scopes import READ, WRITE
from headrace.fetch.model import Customer, CustomerSet, parse_rate
from headrace.fetch.service import Fetch

WINDOW_S: Final = 60.0


class CustomersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every customer, by name."""

    customers: list[Customer]


class WebhookTo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where results are sent."""

    url: str


class CustomerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `starts_max` requests in any `window_s` (60) seconds, or as `rate` says it, `connections` at once."""

    starts_max: int | None = None
    window_s: float | None = None
    rate: str | None = None
    """`600/m`, `10/s`, `20/5s`, `5000/h`."""
    connections: int = 8
    webhook: WebhookTo | msgspec.UnsetType | None = msgspec.UNSET
    """Where its results are sent; null: nowhere; left out: as it is."""
    hold_share: float | msgspec.UnsetType | None = msgspec.UNSET
    """A catalogue that removes more than this share of the items, 0 to 1, and more than `hold_items` is
    held; 1: none is; null: as `fetch.hold_share` says; left out: as it is."""
    hold_items: int | msgspec.UnsetType | None = msgspec.UNSET
    """Null: as `fetch.hold_items` says; left out: as it is."""
    refresh_s: float | msgspec.UnsetType | None = msgspec.UNSET
    """Good photos are asked for again after so many seconds; 0: never; null: as `fetch.refresh` says; left
    out: as it is."""


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
    starts_max, window_s = _limit_of(data)
    return await fetch.set_customer(
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
    """Requests and their window, said in one of the two ways. Raises: InvalidRate."""
    if data.rate is not None and data.starts_max is None and data.window_s is None:
        return parse_rate(data.rate)
    if data.rate is None and data.starts_max is not None:
        return data.starts_max, WINDOW_S if data.window_s is None else data.window_s
    raise InvalidRate("expected either rate, such as 600/m, or starts_max, with window_s if not 60")


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
