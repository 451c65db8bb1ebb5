"""Routes of items, results, hosts and single links."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.fetch.http.requests import READ, WRITE
from headrace.fetch.item_upload import wrong_count
from headrace.fetch.model import ITEMS_SENT_MAX, Host, Result, Run, SentItem, StoredItem, UrlReport
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX, Idempotency, ItemsMax


class SentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The runs, one per customer in the call."""

    runs: list[Run]


@get(
    "/v1/fetch/customers/{customer:str}/item",
    operation_id="getFetchItem",
    summary="Show an item with its photos",
    opt=READ,
)
async def get_item(
    fetch: NamedDependency[Fetch],
    customer: FromPath[str],
    item: Annotated[str, QueryParameter(name="id", max_length=400)],
) -> StoredItem:
    """Current state of an item with the outcome of each photo.

    The id is a percent-encoded query parameter: ids may contain `/`, which proxies change in paths.
    """
    return await fetch.items.get(customer, item)


@post(
    "/v1/fetch/items",
    operation_id="sendFetchItems",
    summary="Upload items without a catalogue",
    opt={**WRITE, "idempotent": True, "items_max": ItemsMax(ITEMS_SENT_MAX, wrong_count)},
    status_code=202,
)
async def send_items(
    fetch: NamedDependency[Fetch],
    idempotency: NamedDependency[Idempotency],
    data: JSONBody[list[SentItem]],
) -> SentAnswer:
    """Upload up to 1,000 items, all or none; other items stay as they are.

    New and changed lists of photos are requested; without a request the result is published at
    once. A faulty item is listed in its run's errors and stays as it was. Without `fields` the
    stored ones stay; `gone` unpublishes the item.
    """

    async def send(tx: Any) -> SentAnswer:
        return SentAnswer(runs=await fetch.send_items(data, tx=tx))

    return await idempotency.run(send)


class ResultsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of results; store `next_after` and pass it in the next call."""

    results: list[Result]
    next_after: int


@get(
    "/v1/fetch/results",
    operation_id="listFetchResults",
    summary="List results in the order of their commits",
    opt=READ,
)
async def list_results(
    fetch: NamedDependency[Fetch],
    after: Annotated[int, QueryParameter(ge=0)] = 0,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    customer: FromQuery[str | None] = None,
) -> ResultsAnswer:
    """Items to publish, edit and unpublish; continue with `next_after` to miss none."""
    found = await fetch.items.results(after=after, results_max=limit, customer=customer)
    return ResultsAnswer(results=found, next_after=found[-1].seq if found else after)


class NewestResultsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of results, newest first; continue with `before` = `next_before`, null at the end."""

    results: list[Result]
    next_before: int | None


@get(
    "/v1/fetch/results/newest",
    operation_id="listNewestFetchResults",
    summary="List the newest results",
    opt=READ,
)
async def list_newest_results(
    fetch: NamedDependency[Fetch],
    before: Annotated[int | None, QueryParameter(ge=1)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
    customer: FromQuery[str | None] = None,
) -> NewestResultsAnswer:
    """The newest results, for people; pollers need the order of commits of `/v1/fetch/results`."""
    found = await fetch.items.newest_results(before=before, results_max=limit, customer=customer)
    following = found[-1].seq if len(found) == limit else None
    return NewestResultsAnswer(results=found, next_before=following)


class HostsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of hosts; continue with `after_host` and `after_customer` of the last one."""

    hosts: list[Host]


@get("/v1/fetch/hosts", operation_id="listFetchHosts", summary="List hosts of photos", opt=READ)
async def list_hosts(
    fetch: NamedDependency[Fetch],
    customer: FromQuery[str | None] = None,
    *,
    after_host: FromQuery[str] = "",
    after_customer: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> HostsAnswer:
    """Speed, timeout class, requests and outcomes per host and customer."""
    found = await fetch.hosts.page(
        customer=customer, after=(after_host, after_customer), hosts_max=limit
    )
    return HostsAnswer(hosts=found)


@get(
    "/v1/fetch/hosts/{host:str}",
    operation_id="getFetchHost",
    summary="Show a host of photos",
    opt=READ,
)
async def get_host(fetch: NamedDependency[Fetch], host: FromPath[str]) -> HostsAnswer:
    """One host, per customer."""
    return HostsAnswer(hosts=await fetch.hosts.get(host))


@get(
    "/v1/fetch/why",
    operation_id="getFetchWhy",
    summary="Explain why a photo exists or not",
    opt=READ,
)
async def get_why(
    fetch: NamedDependency[Fetch], url: Annotated[str, QueryParameter(max_length=8192)]
) -> UrlReport:
    """Whether the URL is allowed, its last outcome per customer, and its next request."""
    return await fetch.links.why(url)


ROUTES: Final[list[Any]] = [
    get_item,
    send_items,
    list_results,
    list_newest_results,
    list_hosts,
    get_host,
    get_why,
]
