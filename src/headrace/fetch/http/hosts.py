"""Routes of hosts."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.fetch.http.scopes import READ
from headrace.fetch.model import Host
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX


class HostsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A page of hosts; ask on with `after_host` and `after_customer` set to those of the last."""

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
    """Speed, timeout class, requests and outcomes of each host and customer, by host and customer."""
    found = await fetch.hosts(
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
    """One host, for each customer whose links lead to it."""
    return HostsAnswer(hosts=await fetch.host(host))


ROUTES: Final[list[Any]] = [list_hosts, get_host]
