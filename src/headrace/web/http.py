"""The routes at the root: index, probes, metrics, errors, OpenAPI, backups and the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter
from prometheus_client import CONTENT_TYPE_LATEST

from headrace.engines.backup.service import Backups, BackupsState
from headrace.engines.commit_wait import find_commit_wait, read_apart
from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.config import moment_of
from headrace.kernel.errors import HeadraceError, error_table, kind_of
from headrace.kernel.metrics import merged_metrics
from headrace.kernel.resilience import RoleDeaths
from headrace.kernel.routes import PAGE_ROWS_MAX, routes_in
from headrace.web.history import History, HistoryAnswer, InvalidSpan
from headrace.web.marks import Mark
from headrace.web.model import ALL_SCOPES, ANY_SCOPE, Application, RouteUnknown
from headrace.web.problems import UnexpectedError, title_of
from headrace.web.sessions import Audit, AuditLine

READY_TIMEOUT_S: Final = 2.0
DEATH_LATELY_S: Final = 60.0
"""Longer than a role that dies at each start waits before the next one."""
SQL: Final = load_queries("headrace.web")
OPEN: Final = {"scope": None}
"""The probes need no token and report only up or down."""
AUTHENTICATED: Final = {"scope": ANY_SCOPE}


@dataclass(frozen=True, slots=True)
class About:
    """The dependency of these routes: Litestar checks classes, and Application is a protocol."""

    app: Application


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The name, version and links of the API."""

    name: str
    version: str
    links: dict[str, str]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the process responds."""

    alive: bool


class Readiness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether each engine in use responds: `up` or `down`; what answers reads that may lag.

    `roles` names those of this machine's `headrace up` that die repeatedly. `warnings` are states
    in which reads are answered and writes may not be.
    """

    ready: bool
    engines: dict[str, str]
    reads: str = ""
    roles: dict[str, str] = {}
    warnings: list[str] = []


class ErrorKind(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the error table."""

    code: str
    title: str
    kind: str
    status: int
    retryable: bool
    meaning: str


@get("/", opt=AUTHENTICATED, sync_to_thread=False, tags=["about"])
def get_index(about: NamedDependency[About]) -> Index:
    """Return the name, version and links of the API."""
    links = {
        "openapi": "/openapi.json",
        "errors": "/problems",
        "health": "/healthz",
        "readiness": "/readyz",
        "metrics": "/metrics",
    }
    return Index(name="headrace", version=about.app.version, links=links)


@get("/healthz", opt=OPEN, sync_to_thread=False, tags=["about"])
def get_health() -> Health:
    """Report that the process is alive, without checking any engine."""
    return Health(alive=True)


@get("/readyz", opt=OPEN, tags=["about"])
async def get_readiness(about: NamedDependency[About]) -> Response[Readiness]:
    """Check every engine for up to 2 s; 503 names one that is down, or a role that keeps dying.

    `reads` names the server of series, top lists and lists: the replica with its lag, or the
    primary and the reason; empty without `postgres.replica_url`. `warnings` with 200: commits wait
    for a synchronous standby, so writes of every API process wait, and reads are answered.
    """
    postgres = about.app.engines.postgres
    warnings, failures = await asyncio.gather(_commit_warnings(postgres), check_engines(about.app))
    engines = {name: "down" if failure else "up" for name, failure in failures.items()}
    roles = {
        role: f"died {death['deaths']} times in a row"
        for role, death in RoleDeaths.read(about.app.data_folder, within_s=DEATH_LATELY_S).items()
        if death["deaths"] > 1
    }
    ready = not any(failures.values()) and not roles
    headers = {} if ready else {"retry-after": "2"}
    replica = postgres and postgres.replica
    reads = (await replica.state()).text if replica else ""
    return Response(
        Readiness(ready=ready, engines=engines, reads=reads, roles=roles, warnings=warnings),
        status_code=200 if ready else 503,
        headers=headers,
    )


@get(
    "/metrics",
    opt={"scope": "metrics:read"},
    sync_to_thread=True,
    tags=["about"],
    media_type=CONTENT_TYPE_LATEST,
)
def get_metrics(about: NamedDependency[About]) -> bytes:
    """Return the Prometheus series of all roles on this machine."""
    return merged_metrics(about.app.metrics_folder, "api")


@get("/problems", opt=AUTHENTICATED, sync_to_thread=False, tags=["about"])
def list_problems() -> list[ErrorKind]:
    """List every error code of this server."""
    return [_row(error) for error in _errors().values()]


@get("/problems/{code:str}", opt=AUTHENTICATED, sync_to_thread=False, tags=["about"])
def get_problem(code: FromPath[str]) -> ErrorKind:
    """Return the meaning of an error code; the `type` of each problem document links here."""
    error = _errors().get(code)
    if error is None:
        raise RouteUnknown("no error has this code: /problems lists all codes")
    return _row(error)


@get("/v1/audit", opt={"scope": ALL_SCOPES}, tags=["about"])
async def list_audit(
    audit: NamedDependency[Audit],
    before: FromQuery[int | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> list[AuditLine]:
    """List actions of the console, newest first; pass the last id as `before` for the next page."""
    return await audit.lines(before=before, lines_max=limit)


@get("/v1/backups", opt={"scope": "metrics:read"}, tags=["about"])
async def get_backups(backups: NamedDependency[Backups]) -> BackupsState:
    """Show base backups, the time up to which each is restorable, and the lag of the archive.

    422 without `backup.url`, or with `postgres.url`, whose backups are made by another tool.
    """
    return await backups.state()


@get("/v1/history", opt={"scope": "metrics:read"}, tags=["about"])
async def get_history(
    *,
    history: NamedDependency[History],
    series: FromQuery[str],
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
    by: FromQuery[str] = "key",
) -> HistoryAnswer:
    """Show series, separated by commas, in the last hour or up to 30 days.

    `by` is `key`, `host` or `center`: a line per label value (percentiles for times), host or data
    center. Steps are 60 s up to 2 hours, 120 s up to 8 hours, 600 s up to 48 hours, then an hour.
    """
    names = [name.strip() for name in series.split(",") if name.strip()]
    return await history.read(names, by=by, **_span(from_at, to_at))


@get("/v1/history/marks", opt={"scope": "metrics:read"}, tags=["about"])
async def list_history_marks(
    history: NamedDependency[History],
    from_at: Annotated[str | None, QueryParameter(name="from")] = None,
    to_at: Annotated[str | None, QueryParameter(name="to")] = None,
    kind: FromQuery[str] = "",
) -> list[Mark]:
    """List starts of roles, changes of their versions, deaths and outages, oldest first.

    Without `from`, those of the last hour before `to` or now; the span has at most 30 days. `kind`
    is start, deploy, restart, deaths or outage; without it, all are listed.
    """
    return await history.marks(**_span(from_at, to_at), kind=kind)


def _span(from_at: str | None, to_at: str | None) -> dict[str, datetime | None]:
    return {
        "from_at": moment_of("from", from_at, InvalidSpan),
        "to_at": moment_of("to", to_at, InvalidSpan),
    }


ROUTES: Final[list[Any]] = routes_in(globals())


async def check_engines(app: Application) -> dict[str, str]:
    """Why each engine in use is down, empty if it is up, for `/readyz` and the console's Health."""
    engines = app.engines
    checks: dict[str, Callable[[], Awaitable[Any]]] = {}
    if engines.postgres is not None:
        checks["postgres"] = lambda: read_apart(engines.postgres, SQL.ping)
    if engines.valkey is not None:
        checks["valkey"] = engines.valkey.open
    if engines.blobs is not None:
        checks["blobs"] = engines.blobs.open
    found = await asyncio.gather(*(_failure_of(check) for check in checks.values()))
    return dict(zip(checks, found, strict=True))


async def _failure_of(check: Callable[[], Awaitable[Any]]) -> str:
    try:
        await asyncio.wait_for(check(), READY_TIMEOUT_S)
    except TimeoutError:
        return f"no answer within {READY_TIMEOUT_S:.0f} s"
    except HeadraceError as error:
        return error.public_text
    return ""


async def _commit_warnings(postgres: Postgres | None) -> list[str]:
    """That commits wait, without the names of standbys and roles: the route is open."""
    if postgres is None:
        return []
    try:
        wait = await asyncio.wait_for(find_commit_wait(postgres), READY_TIMEOUT_S)
    except (HeadraceError, TimeoutError):
        return []
    return [] if wait is None else [wait.summary]


def _errors() -> dict[str, type[HeadraceError]]:
    return {**error_table(), UnexpectedError.code: UnexpectedError}


def _row(error: type[HeadraceError]) -> ErrorKind:
    kind = UnexpectedError if error is UnexpectedError else kind_of(error)
    return ErrorKind(
        code=error.code,
        title=title_of(error.code),
        kind=kind.__name__,
        status=error.status,
        retryable=error.retryable,
        meaning=" ".join((error.__doc__ or "").split()),
    )
