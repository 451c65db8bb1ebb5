"""Customers: how fast their hosts may be asked, what waits in their lanes, what came of their catalogues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace.console.screens.fetch.runs import RunLine, line_of
from headrace.console.seeing import Ask, Found, attempt
from headrace.fetch.errors import SourceUnknown, WebhookUnknown
from headrace.fetch.model import (
    LIMITER,
    Customer,
    Host,
    Result,
    Run,
    Source,
    StoredItem,
    Webhook,
)
from headrace.jobs.errors import LaneUnknown
from headrace.jobs.model import Lane

LANES_MAX: Final = 1_000
RUNS_LOOKED_AT: Final = 500
RUNS_SHOWN: Final = 10
RESULTS_SHOWN: Final = 12
HOSTS_SHOWN: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerLine:
    """A customer beside its lane and its newest run."""

    customer: Customer
    lane: Lane | None
    run: RunLine | None
    """None: none of the newest runs is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomersView:
    """Every customer."""

    customers: Found[list[CustomerLine]]
    lanes_error: str | None
    match: str
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerView:
    """One customer."""

    customer: Customer
    lane: Found[Lane | None]
    runs: Found[list[RunLine]]
    hosts: Found[list[Host]]
    source: Found[Source | None]
    webhook: Found[Webhook | None]
    results: Found[list[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    """An item as it stands."""

    item: StoredItem
    media_origin: str


async def see_customers(ask: Ask) -> CustomersView:
    """Every customer whose name has a text in it."""
    fetch, jobs = ask.service("fetch"), ask.service("jobs")
    match = ask.query.text("match", most=128)
    everyone, lanes, runs = await asyncio.gather(
        attempt(fetch.customers.all()),
        attempt(jobs.lanes.list(LIMITER, lanes_max=LANES_MAX)),
        attempt(fetch.runs.newest(runs_max=RUNS_LOOKED_AT)),
    )
    lane_of = {lane.lane: lane for lane in lanes.value or ()}
    run_of = newest_of(runs.value or ())
    lines = None
    if everyone.value is not None:
        lines = [
            CustomerLine(
                customer=found,
                lane=lane_of.get(found.customer),
                run=run_of.get(found.customer),
            )
            for found in everyone.value
            if match.lower() in found.customer.lower()
        ]
    return CustomersView(
        customers=Found(lines, everyone.error),
        lanes_error=lanes.error or runs.error,
        match=match,
        total=len(everyone.value or ()),
    )


async def see_customer(ask: Ask) -> CustomerView:
    """One customer. Raises: CustomerUnknown."""
    fetch, name = ask.service("fetch"), ask.params["customer"]
    customer = await fetch.customers.get(name)
    lane, runs, hosts, source, webhook, results = await asyncio.gather(
        attempt(_lane(ask, name)),
        attempt(fetch.runs.newest(name, runs_max=RUNS_SHOWN)),
        attempt(fetch.hosts.page(customer=name, hosts_max=HOSTS_SHOWN)),
        attempt(_source(ask, name)),
        attempt(_webhook(ask, name)),
        attempt(fetch.items.newest_results(results_max=RESULTS_SHOWN, customer=name)),
    )
    lines = None if runs.value is None else [line_of(run) for run in runs.value]
    return CustomerView(
        customer=customer,
        lane=lane,
        runs=Found(lines, runs.error),
        hosts=hosts,
        source=source,
        webhook=webhook,
        results=results,
    )


async def see_item(ask: Ask) -> ItemView:
    """One item. Raises: ItemUnknown."""
    item = await ask.service("fetch").items.get(
        ask.params["customer"], ask.query.text("id", most=400)
    )
    return ItemView(item=item, media_origin=ask.media_origin)


def newest_of(runs: Iterable[Run]) -> dict[str, RunLine]:
    """The newest run of each customer; `runs` come newest first."""
    found: dict[str, RunLine] = {}
    for run in runs:
        if run.customer not in found:
            found[run.customer] = line_of(run)
    return found


async def _lane(ask: Ask, customer: str) -> Lane | None:
    try:
        lane: Lane = await ask.service("jobs").get_lane(LIMITER, customer)
    except LaneUnknown:
        return None
    return lane


async def _source(ask: Ask, customer: str) -> Source | None:
    try:
        source: Source = await ask.service("fetch").sources.get(customer)
    except SourceUnknown:
        return None
    return source


async def _webhook(ask: Ask, customer: str) -> Webhook | None:
    try:
        webhook: Webhook = await ask.service("fetch").webhooks.get(customer)
    except WebhookUnknown:
        return None
    return webhook
