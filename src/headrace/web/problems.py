"""Errors as `application/problem+json` (RFC 9457), from the one table of errors.

A HeadraceError carries its status, code and text. Litestar's errors are translated. Any other
error is logged with its stack, and the caller receives only a request id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.exceptions import (
    ClientException,
    HTTPException,
    InternalServerException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.routes import HTTPRoute
from litestar.status_codes import HTTP_413_REQUEST_ENTITY_TOO_LARGE

from headrace.kernel.errors import FieldProblem, HeadraceError, mismatch
from headrace.kernel.faults import expectation_of
from headrace.kernel.logs import logger
from headrace.web.model import (
    BadRequest,
    BodyInvalid,
    BodyTooLarge,
    MethodRefused,
    RouteUnknown,
    current_request_id,
)

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PATH: Final = "/problems/"
CLOSING: Final = frozenset({408, 413, 414, 421, 431})
"""Statuses after which the connection is closed."""
NEAR_MIN: Final = 0.7
"""How similar each part of a path must be to that of a route which an error proposes."""
_LOG: Final = logger(__name__)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in the input."""

    pointer: str
    code: str
    text: str


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error document of RFC 9457 with our additional members."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str | None
    retryable: bool
    errors: list[Fault] = []


class UnexpectedError(HeadraceError):
    """An internal error; the log has its stack under the request id."""

    code = "internal"


def title_of(code: str) -> str:
    """The title of a code: `Lease lost` for `jobs.lease_lost`."""
    return code.rpartition(".")[2].replace("_", " ").capitalize()


def problem_of(error: HeadraceError) -> Problem:
    """The problem document for `error`."""
    return Problem(
        type=TYPE_PATH + error.code,
        title=title_of(error.code),
        status=error.status,
        detail=error.public_text,
        code=error.code,
        request_id=current_request_id.get(),
        retryable=error.retryable,
        errors=[Fault(pointer=p.pointer, code=p.code, text=p.text) for p in error.problems],
    )


def headers_of(error: HeadraceError) -> dict[str, str]:
    """The headers of the response for `error`, without the content type."""
    headers = {"cache-control": "no-store"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in CLOSING:
        headers["connection"] = "close"
    if isinstance(error, MethodRefused):
        headers["allow"] = error.allow
    return headers


def to_headrace_error(error: Exception) -> HeadraceError:
    """The HeadraceError for `error`; an unexpected error is logged with its stack."""
    if isinstance(error, HeadraceError):
        if error.status == 500:
            _LOG.error("request_failed", code=error.code, exc_info=error)
        return error
    if isinstance(error, InternalServerException) and "disconnected" in error.detail:
        return BadRequest("the connection ended before the request was complete")
    if isinstance(error, HTTPException) and error.status_code < 500:
        return _translate(error)
    _LOG.error("request_failed", code=UnexpectedError.code, exc_info=error)
    return UnexpectedError(
        "the server failed on this request: report the error with the request id"
    )


def render_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The problem response for any exception; Litestar's exception handler."""
    match error:
        case NotFoundException():
            ours: HeadraceError = _route_unknown(request)
        case MethodNotAllowedException():
            ours = _method_refused(request)
        case ValidationException():
            ours = _invalid_parameters(request, error)
        case _:
            ours = to_headrace_error(error)
    return problem_response(ours)


def problem_response(error: HeadraceError) -> Response[bytes]:
    """The response with the problem document for `error`."""
    return Response(
        msgspec.json.encode(problem_of(error)),
        status_code=error.status,
        media_type=MEDIA_TYPE,
        headers=headers_of(error),
    )


def _translate(error: HTTPException) -> HeadraceError:
    match error:
        case NotFoundException():
            return RouteUnknown("no route has this path: /openapi.json lists them all")
        case _ if error.status_code == HTTP_413_REQUEST_ENTITY_TOO_LARGE:
            return BodyTooLarge("the body is over the limit of this route: send less per request")
        case ClientException():
            return BadRequest(f"the request is not valid: {error.detail}")
    return BadRequest(f"the request is refused: {error.detail}")


def _route_unknown(request: Request[Any, Any, Any]) -> RouteUnknown:
    """The error for an unknown path; it names a path parameter that must be a number."""
    given = [part for part in request.scope["path"].split("/") if part]
    for route in request.app.routes:
        wrong = _wrong_number(given, route.path_components)
        if wrong is not None:
            name, text = wrong
            return RouteUnknown(f"{name} in the path must be a whole number, got {text[:40]!r}")
    instead = _did_you_mean(request, given)
    return RouteUnknown(f"no route has this path{instead}: /openapi.json lists them all")


def _did_you_mean(request: Request[Any, Any, Any], given: list[str]) -> str:
    """`, did you mean GET /v1/queues?` with the nearest other route of this method, or nothing."""
    method = "GET" if request.method == "HEAD" else request.method
    found = [
        (_nearness(given, route.path_format), route.path_format)
        for route in request.app.routes
        if isinstance(route, HTTPRoute) and method in route.methods
    ]
    nearness, path = max(found, default=(0.0, ""))
    return f", did you mean {method} {path}?" if nearness > 0 else ""


def _nearness(given: list[str], template: str) -> float:
    """How much a path resembles a template: 0 if not, up to 2 if only parameters are missing."""
    wanted = [part for part in template.split("/") if part]
    if not given or len(given) > len(wanted) or given[0] != wanted[0]:
        return 0.0
    if len(given) < len(wanted):
        rest = iter(wanted)
        has_all = given[-1] == wanted[-1] and all(part in rest for part in given)
        return 1.0 + len(given) / len(wanted) if has_all else 0.0
    ratios = [
        1.0 if part.startswith("{") else SequenceMatcher(None, text[:40], part).ratio()
        for text, part in zip(given, wanted, strict=True)
    ]
    return min(ratios) if min(ratios) >= NEAR_MIN else 0.0


def _wrong_number(given: list[str], wanted: Sequence[Any]) -> tuple[str, str] | None:
    """Name and text of the first non-integer parameter of a path that otherwise matches."""
    if len(given) != len(wanted):
        return None
    wrong = None
    for text, part in zip(given, wanted, strict=True):
        if isinstance(part, str):
            if part != text:
                return None
        elif part.type is int and wrong is None and not text.lstrip("-").isdecimal():
            wrong = (part.name, text)
    return wrong


def _method_refused(request: Request[Any, Any, Any]) -> MethodRefused:
    """The error for a method that the path lacks; it names those that it has, and a near route."""
    given = [part for part in request.scope["path"].split("/") if part]
    # A fixed path takes precedence over one with a parameter, as in Litestar's routing.
    allow_by_parameters: dict[int, set[str]] = {}
    for route in request.app.routes:
        if isinstance(route, HTTPRoute) and _has_shape(given, route.path_components):
            count = sum(not isinstance(part, str) for part in route.path_components)
            allow_by_parameters.setdefault(count, set()).update(map(str, route.methods))
    allow = allow_by_parameters[min(allow_by_parameters)]
    if "GET" in allow:
        allow.add("HEAD")
    return MethodRefused(", ".join(sorted(allow)), _did_you_mean(request, given))


def _has_shape(given: list[str], wanted: Sequence[Any]) -> bool:
    """Whether a path has the fixed parts of a route."""
    return len(given) == len(wanted) and all(
        not isinstance(part, str) or part == text for text, part in zip(given, wanted, strict=True)
    )


def _invalid_parameters(
    request: Request[Any, Any, Any], error: ValidationException
) -> HeadraceError:
    extra: Any = error.extra if isinstance(error.extra, list) else []
    problems = tuple(_parameter_problem(request, fault) for fault in extra)
    texts = "; ".join(f"{p.pointer}: {p.text}" for p in problems[:3]) or error.detail
    return BodyInvalid(f"the request has parameters that are not valid: {texts}", problems=problems)


def _parameter_problem(request: Request[Any, Any, Any], fault: Any) -> FieldProblem:
    """Litestar's fault with the name that the caller wrote, its value and what is accepted."""
    name, source = str(fault.get("key", "")), fault.get("source", "parameter")
    text = str(fault.get("message", "not valid"))
    field = request.route_handler.parsed_fn_signature.parameters.get(name)
    if field is not None:
        name = parameter_name(name, field)
        expected = expected_of(field)
        given = request.query_params.get(name, request.path_params.get(name))
        if expected is not None and given is not None:
            text = mismatch(expected, given)
    return FieldProblem(f"{getattr(source, 'value', source)}: {name}", "invalid", text)


def parameter_name(name: str, field: Any) -> str:
    """The name of a handler's parameter in requests."""
    return getattr(field.kwarg_definition, "name", None) or name


def expected_of(field: Any) -> str | None:
    """What a parameter of a handler accepts, in words; None: no simple description."""
    bounds = field.kwarg_definition
    return expectation_of(
        field.annotation,
        least=getattr(bounds, "ge", None),
        most=getattr(bounds, "le", None),
        characters_max=getattr(bounds, "max_length", None),
    )
