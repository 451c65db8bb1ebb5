"""The routes at the root: is it alive, is it ready, its metrics, its errors, its description."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter
from prometheus_client import CONTENT_TYPE_LATEST

from headrace.engines.sql import load_queries
from headrace.kernel.errors import HeadraceError, error_table, kind_of
from headrace.kernel.limits import PAGE_ROWS_MAX
from headrace.kernel.metrics import merged_metrics
from headrace.web.audit import Audit, AuditLine
from headrace.web.model import ALL_SCOPES, ANY_SCOPE, House, RouteUnknown
from headrace.web.problems import UnexpectedError, title_of

READY_TIMEOUT_S: Final = 2.0
SQL: Final = load_queries("headrace.web")
OPEN: Final = {"scope": None}
"""Of the probes, which tell nothing but up or down."""
KNOWN: Final = {"scope": ANY_SCOPE}
LATE_ERRORS: Final = {"headrace.media.errors": "xxhash"}
"""Errors of modules that are imported by the first call that needs them, and the library that these need."""


@dataclass(frozen=True, slots=True)
class About:
    """What these routes ask for: Litestar checks dependencies by class, and House is a protocol."""

    house: House


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go from here."""

    name: str
    version: str
    links: dict[str, str]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The process answers."""

    alive: bool


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether each engine in use answers: `up` or `down`."""

    ready: bool
    engines: dict[str, str]


class ErrorKind(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table of errors."""

    code: str
    title: str
    kind: str
    status: int
    retryable: bool
    meaning: str


@get("/", operation_id="getIndex", opt=KNOWN, sync_to_thread=False, tags=["about"])
def get_index(about: NamedDependency[About]) -> Index:
    """Name, version and links."""
    links = {
        "openapi": "/openapi.json",
        "errors": "/problems",
        "health": "/healthz",
        "readiness": "/readyz",
        "metrics": "/metrics",
    }
    return Index(name="headrace", version=about.house.version, links=links)


@get("/healthz", operation_id="getHealth", opt=OPEN, sync_to_thread=False, tags=["about"])
def get_health() -> Health:
    """The process lives; no engine is asked, so that one that is down restarts nothing."""
    return Health(alive=True)


@get("/readyz", operation_id="getReadiness", opt=OPEN, tags=["about"])
async def get_readiness(about: NamedDependency[About]) -> Response[Readiness]:
    """Ask every engine, 2 s at most; 503 when one is down, naming which."""
    checks = checks_of(about.house)
    answers = await asyncio.gather(*(_is_up(check) for check in checks.values()))
    engines = {name: "up" if up else "down" for name, up in zip(checks, answers, strict=True)}
    ready = all(answers)
    headers = {} if ready else {"retry-after": "2"}
    return Response(
        Readiness(ready=ready, engines=engines), status_code=200 if ready else 503, headers=headers
    )


@get(
    "/metrics",
    operation_id="getMetrics",
    opt={"scope": "metrics:read"},
    sync_to_thread=True,
    tags=["about"],
    media_type=CONTENT_TYPE_LATEST,
)
def get_metrics(about: NamedDependency[About]) -> bytes:
    """Prometheus series of this process and of the other roles on this machine."""
    return merged_metrics(about.house.metrics_folder, "api")


@get("/problems", operation_id="listProblems", opt=KNOWN, sync_to_thread=False, tags=["about"])
def list_problems() -> list[ErrorKind]:
    """Every error code this server may answer with."""
    return [_row(error) for error in _errors().values()]


@get(
    "/problems/{code:str}",
    operation_id="getProblem",
    opt=KNOWN,
    sync_to_thread=False,
    tags=["about"],
)
def get_problem(code: FromPath[str]) -> ErrorKind:
    """What an error code means; the `type` of every problem document leads here."""
    error = _errors().get(code)
    if error is None:
        raise RouteUnknown("no error has this code: /problems lists them all")
    return _row(error)


@get(
    "/v1/audit",
    operation_id="listAudit",
    summary="List what was done in the console",
    opt={"scope": ALL_SCOPES},
    tags=["about"],
)
async def list_audit(
    audit: NamedDependency[Audit],
    before: FromQuery[int | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_ROWS_MAX)] = 100,
) -> list[AuditLine]:
    """List what was done in the console, newest first: who, what, when, from where; the next page is `before` the last id."""
    return await audit.lines(before=before, lines_max=limit)


ROUTES: Final[list[Any]] = [
    get_index,
    get_health,
    get_readiness,
    get_metrics,
    list_problems,
    get_problem,
    list_audit,
]


def checks_of(house: House) -> dict[str, Callable[[], Awaitable[Any]]]:
    """How each engine in use is asked whether it answers."""
    engines = house.engines
    checks: dict[str, Callable[[], Awaitable[Any]]] = {}
    if engines.postgres is not None:
        checks["postgres"] = lambda: engines.postgres.value(SQL.ping)
    if engines.valkey is not None:
        checks["valkey"] = engines.valkey.open
    if engines.blobs is not None:
        checks["blobs"] = engines.blobs.open
    return checks


async def _is_up(check: Callable[[], Awaitable[Any]]) -> bool:
    try:
        await asyncio.wait_for(check(), READY_TIMEOUT_S)
    except (HeadraceError, TimeoutError):
        return False
    return True


def _errors() -> dict[str, type[HeadraceError]]:
    for module, library in LATE_ERRORS.items():
        if find_spec(library):
            import_module(module)
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
