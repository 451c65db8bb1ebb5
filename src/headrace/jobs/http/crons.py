"""Routes of crons."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, UnsetType

from headrace.jobs.crons import Cron, NewCron
from headrace.jobs.http.scopes import READ, WRITE
from headrace.jobs.service import Jobs
from headrace.kernel.routes import Idempotency


class CronToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cron to add: `spec` is minute, hour, day of month, month and day of week."""

    name: str
    spec: str
    queue: str
    tz: str = "UTC"
    payload: Any = None
    priority: int = 5


class CronChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to change of a cron; of one that code declares `paused` only."""

    spec: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    tz: str | UnsetType = UNSET
    payload: Any = UNSET
    priority: int | UnsetType = UNSET
    paused: bool | UnsetType = UNSET


class CronJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a cron was asked for."""

    id: int


@get("/v1/crons", operation_id="listCrons", summary="List the crons", opt=READ)
async def list_crons(jobs: NamedDependency[Jobs]) -> list[Cron]:
    """List every cron, by name."""
    return await jobs.crons.all()


@post(
    "/v1/crons",
    operation_id="addCron",
    summary="Add a cron",
    opt={**WRITE, "idempotent": True},
)
async def add_cron(
    jobs: NamedDependency[Jobs],
    idempotency: NamedDependency[Idempotency],
    data: JSONBody[CronToAdd],
) -> Cron:
    """Add a cron; it comes first at its next moment."""
    cron = NewCron(**msgspec.structs.asdict(data))

    async def add(tx: Any) -> Cron:
        return await jobs.crons.add(cron, tx=tx)

    return await idempotency.run(add)


@get("/v1/crons/{name:str}", operation_id="getCron", summary="Show a cron", opt=READ)
async def get_cron(jobs: NamedDependency[Jobs], name: FromPath[str]) -> Cron:
    """Show a cron with its next moment and its last job."""
    return await jobs.crons.get(name)


@put("/v1/crons/{name:str}", operation_id="setCron", summary="Change a cron", opt=WRITE)
async def put_cron(
    jobs: NamedDependency[Jobs], name: FromPath[str], data: JSONBody[CronChange]
) -> Cron:
    """Change, pause or resume a cron; what is left out stays."""
    asked = msgspec.structs.asdict(data)
    return await jobs.crons.change(name, **{k: v for k, v in asked.items() if v is not UNSET})


@delete("/v1/crons/{name:str}", operation_id="removeCron", summary="Remove a cron", opt=WRITE)
async def remove_cron(jobs: NamedDependency[Jobs], name: FromPath[str]) -> None:
    """Remove a cron that no running code declares."""
    await jobs.crons.remove(name)


@post(
    "/v1/crons/{name:str}/run",
    operation_id="runCron",
    summary="Run a cron now",
    status_code=202,
    opt={**WRITE, "idempotent": True},
)
async def run_cron(
    jobs: NamedDependency[Jobs], idempotency: NamedDependency[Idempotency], name: FromPath[str]
) -> CronJob:
    """Enqueue the cron's job now, besides its moments."""

    async def run(tx: Any) -> CronJob:
        return CronJob(id=await jobs.crons.run(name, tx=tx))

    return await idempotency.run(run)


ROUTES: Final[list[Any]] = [list_crons, add_cron, get_cron, put_cron, remove_cron, run_cron]
