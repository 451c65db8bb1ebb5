"""Routes of the fleet: its state, draining hosts, decisions and alerts, minute statistics of queues."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.facts import Decision, FleetState, QueueMinute
from headrace.jobs.fleet.load import FleetLoad
from headrace.jobs.http.scopes import READ, WRITE
from headrace.jobs.service import Jobs
from headrace.kernel.routes import PAGE_ROWS_MAX


@get("/v1/fleet", operation_id="getFleet", summary="Show the fleet", opt=READ)
async def get_fleet(jobs: NamedDependency[Jobs]) -> FleetState:
    """Show hosts with their slots, who plans, the last decisions, how many alerts are open and the newest 100 of them."""
    return await jobs.fleet.state()


@get(
    "/v1/fleet/decisions",
    operation_id="listDecisions",
    summary="List why slots moved",
    opt=READ,
)
async def list_decisions(
    jobs: NamedDependency[Jobs],
    before: FromQuery[int | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> list[Decision]:
    """List why slots moved, newest first; the next page is `before` the last id."""
    return await jobs.fleet.decisions(before=before, decisions_max=limit)


@get("/v1/fleet/alerts", operation_id="listAlerts", summary="List alerts", opt=READ)
async def list_alerts(
    jobs: NamedDependency[Jobs],
    *,
    is_open: Annotated[bool, QueryParameter(name="open")] = False,
) -> list[Alert]:
    """List the newest 100 alerts; with `open` only those not cleared."""
    return await jobs.fleet.alerts(is_open=is_open)


@get("/v1/fleet/load", operation_id="getFleetLoad", summary="Show how loaded queues are", opt=READ)
async def get_load(jobs: NamedDependency[Jobs]) -> FleetLoad:
    """Show what each queue did in the last five minutes and this one, and all of them in each minute of the last hour."""
    return await jobs.fleet.load()


@post(
    "/v1/fleet/hosts/{host:str}/drain",
    operation_id="drainHost",
    summary="Empty a host",
    status_code=204,
    opt=WRITE,
)
async def drain_host(jobs: NamedDependency[Jobs], host: FromPath[str]) -> None:
    """Let a host finish what it has and take nothing new."""
    await jobs.fleet.drain(host)


@post(
    "/v1/fleet/hosts/{host:str}/undrain",
    operation_id="undrainHost",
    summary="Use a host again",
    status_code=204,
    opt=WRITE,
)
async def undrain_host(jobs: NamedDependency[Jobs], host: FromPath[str]) -> None:
    """Let a host take part again."""
    await jobs.fleet.undrain(host)


@get(
    "/v1/queues/{queue:str}/minutes",
    operation_id="listQueueMinutes",
    summary="Show what a queue did by minute",
    opt=READ,
)
async def list_minutes(
    jobs: NamedDependency[Jobs],
    queue: FromPath[str],
    from_at: Annotated[datetime | None, QueryParameter(name="from")] = None,
    to_at: Annotated[datetime | None, QueryParameter(name="to")] = None,
) -> list[QueueMinute]:
    """Show what a queue did in each minute of a span of up to two days; without `from` and `to` the last hour."""
    return await jobs.minutes(queue, from_at=from_at, to_at=to_at)


ROUTES: Final[list[Any]] = [
    get_fleet,
    list_decisions,
    list_alerts,
    get_load,
    drain_host,
    undrain_host,
    list_minutes,
]
