"""Routes of the fleet, its alerts and crons."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import UNSET, UnsetType

from headrace.jobs.crons import Cron, NewCron
from headrace.jobs.errors import InvalidFilter
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.state import (
    Decision,
    FleetLoad,
    FleetState,
    QueueHour,
    QueueMinute,
    QueueStep,
)
from headrace.jobs.http.jobs import READ, WRITE, JobAdded
from headrace.jobs.service import Jobs
from headrace.kernel.config import moment_of
from headrace.kernel.routes import PAGE_ROWS_MAX, Idempotency


@get("/v1/fleet", opt=READ)
async def get_fleet(jobs: NamedDependency[Jobs]) -> FleetState:
    """Show hosts with their slots, the plan, the newest decisions and open alerts."""
    return await jobs.fleet.state()


@get("/v1/fleet/decisions", opt=READ)
async def list_decisions(
    jobs: NamedDependency[Jobs],
    before: FromQuery[int | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> list[Decision]:
    """List changes of slots with reasons, newest first; the next page is `before` the last id."""
    return await jobs.fleet.decisions(before=before, decisions_max=limit)


@get("/v1/fleet/alerts", opt=READ)
async def list_alerts(
    jobs: NamedDependency[Jobs],
    *,
    is_open: Annotated[bool, QueryParameter(name="open")] = False,
) -> list[Alert]:
    """List the newest 100 alerts; with `open` only open ones."""
    return await jobs.fleet.alerts(is_open=is_open)


@get("/v1/fleet/load", opt=READ)
async def get_fleet_load(jobs: NamedDependency[Jobs]) -> FleetLoad:
    """Show counts of each queue in the last five minutes, and of all per minute of an hour."""
    return await jobs.fleet.load()


@get("/v1/fleet/history", opt=READ)
async def get_fleet_history(
    *,
    jobs: NamedDependency[Jobs],
    from_at: Annotated[str, QueryParameter(name="from")],
    to_at: Annotated[str, QueryParameter(name="to")],
    step_s: Annotated[int, QueryParameter(ge=60, le=86_400)] = 60,
    queues: Annotated[int, QueryParameter(ge=1, le=50)] = 7,
) -> list[QueueStep]:
    """Show counts of the busiest queues in up to 800 steps; all others are the queue ''."""
    span = {name: at for name, at in _span(from_at, to_at).items() if at is not None}
    return await jobs.fleet.history(**span, step_s=step_s, queues_max=queues)


@post("/v1/fleet/hosts/{host:str}/drain", status_code=204, opt=WRITE)
async def drain_host(jobs: NamedDependency[Jobs], host: FromPath[str]) -> None:
    """Start no more jobs on a host; running jobs finish."""
    await jobs.fleet.drain(host)


@post("/v1/fleet/hosts/{host:str}/undrain", status_code=204, opt=WRITE)
async def undrain_host(jobs: NamedDependency[Jobs], host: FromPath[str]) -> None:
    """Start jobs on a drained host again."""
    await jobs.fleet.undrain(host)


@delete("/v1/fleet/hosts/{host:str}", opt=WRITE)
async def forget_host(jobs: NamedDependency[Jobs], host: FromPath[str]) -> None:
    """Remove a lost host that will not return from the fleet; its alert ends."""
    await jobs.fleet.forget(host)


def _span(from_at: str | None, to_at: str | None) -> dict[str, datetime | None]:
    return {
        "from_at": moment_of("from", from_at, InvalidFilter),
        "to_at": moment_of("to", to_at, InvalidFilter),
    }


@get("/v1/queues/{queue:str}/minutes", opt=READ)
async def list_queue_minutes(
    jobs: NamedDependency[Jobs],
    queue: FromPath[str],
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
) -> list[QueueMinute]:
    """Show counts and backlog of a queue per minute, in the last hour or up to two days."""
    return await jobs.queues.minutes(queue, **_span(from_at, to_at))


@get("/v1/queues/{queue:str}/hours", opt=READ)
async def list_queue_hours(
    jobs: NamedDependency[Jobs],
    queue: FromPath[str],
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
) -> list[QueueHour]:
    """Show counts and highest backlog of a queue per hour, in the last 7 days or up to 90."""
    return await jobs.queues.hours(queue, **_span(from_at, to_at))


class CronChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a cron; a cron declared by code accepts `paused` only."""

    spec: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    tz: str | UnsetType = UNSET
    payload: Any = UNSET
    priority: int | UnsetType = UNSET
    paused: bool | UnsetType = UNSET


@get("/v1/crons", opt=READ)
async def list_crons(jobs: NamedDependency[Jobs]) -> list[Cron]:
    """List every cron, by name."""
    return await jobs.crons.all()


@post("/v1/crons", opt={**WRITE, "idempotent": True})
async def add_cron(
    jobs: NamedDependency[Jobs],
    idempotency: NamedDependency[Idempotency],
    data: JSONBody[NewCron],
) -> Cron:
    """Add a cron. Its first job comes at its next scheduled time."""

    async def add(tx: Any) -> Cron:
        return await jobs.crons.add(data, tx=tx)

    return await idempotency.run(add)


@get("/v1/crons/{name:str}", opt=READ)
async def get_cron(jobs: NamedDependency[Jobs], name: FromPath[str]) -> Cron:
    """Show a cron with its next scheduled time and its last job."""
    return await jobs.crons.get(name)


@put("/v1/crons/{name:str}", opt=WRITE)
async def set_cron(
    jobs: NamedDependency[Jobs], name: FromPath[str], data: JSONBody[CronChange]
) -> Cron:
    """Change, pause or resume a cron. Fields left out stay."""
    given = msgspec.structs.asdict(data)
    return await jobs.crons.change(name, **{k: v for k, v in given.items() if v is not UNSET})


@delete("/v1/crons/{name:str}", opt=WRITE)
async def remove_cron(jobs: NamedDependency[Jobs], name: FromPath[str]) -> None:
    """Remove a cron that no running code declares."""
    await jobs.crons.remove(name)


@post("/v1/crons/{name:str}/run", status_code=202, opt={**WRITE, "idempotent": True})
async def run_cron(
    jobs: NamedDependency[Jobs], idempotency: NamedDependency[Idempotency], name: FromPath[str]
) -> JobAdded:
    """Enqueue the cron's job now, in addition to its schedule."""

    async def run(tx: Any) -> JobAdded:
        return JobAdded(id=await jobs.crons.run(name, tx=tx))

    return await idempotency.run(run)
