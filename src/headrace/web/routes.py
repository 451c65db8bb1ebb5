"""Known route parameters that mean one thing only, methods, and the OpenAPI 3.1 description.

Litestar ignores unknown parameters, uses the last of two equal ones and reads `1e3` and `5.0` as
integers. Here an unknown query parameter is refused, a parameter occurs once unless its type is a
list, and an integer is written with digits.

Litestar describes parameters, bodies and responses. This module replaces its error responses by
problem documents and adds the scope of each operation. Two operations of one shape, or a route
without a scope, prevent the start.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.params import QueryParameter
from litestar.routes import HTTPRoute

from headrace.kernel.errors import FieldProblem, did_you_mean, mismatch
from headrace.kernel.routes import ANY_QUERY, OPTIONS_FIELDS, OTHER_TYPES
from headrace.web.auth import FOR_PAGES, scope_of
from headrace.web.model import ANY_SCOPE, SCOPES, BodyInvalid, ParameterRepeated, RouteUnknown
from headrace.web.problems import MEDIA_TYPE, Problem, expected_of, parameter_name

INTEGER: Final = re.compile(r"-?[0-9]{1,19}")


async def require_plain_parameters(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Refuse unknown and repeated parameters and integers such as `1e3`; a Litestar guard.

    Raises: ParameterRepeated, BodyInvalid, RouteUnknown.
    """
    scope: Any = connection.scope
    for name, value in scope["path_params"].items():
        if type(value) is int and not _is_plain_in(scope["path"], value):
            raise RouteUnknown(f"{name} in the path must be a whole number, written with digits")
    if scope["query_string"]:
        _require_plain_query(scope["query_string"], handler)


def _require_plain_query(query_string: bytes, handler: BaseRouteHandler) -> None:
    given = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    kinds = _query_parameters(handler)
    for name, count in Counter(name for name, _ in given).items():
        if count > 1 and (name not in kinds or not _is_list(kinds[name])):
            raise ParameterRepeated(
                f"query parameter {name[:80]!r} is given {count} times: send it once"
            )
    problems = []
    if not handler.opt.get(ANY_QUERY):
        accepted = query_names(handler)
        unknown = dict.fromkeys(name for name, _ in given if name not in accepted)
        problems = [_unknown_parameter(name, accepted) for name in unknown]
    problems += [
        FieldProblem(f"query: {name}", "invalid", mismatch(expected_of(kinds[name]) or "", text))
        for name, text in given
        if name in kinds and _is_integer(kinds[name]) and not INTEGER.fullmatch(text)
    ]
    BodyInvalid.require_none(problems, "the request has parameters that are not valid", shown_max=3)


def _query_parameters(handler: BaseRouteHandler) -> dict[str, Any]:
    return {
        parameter_name(name, field): field
        for name, field in handler.parsed_fn_signature.parameters.items()
        if isinstance(field.kwarg_definition, QueryParameter)
    }


def query_names(handler: BaseRouteHandler) -> frozenset[str]:
    """The query parameters that a handler accepts, with the key `k` on a route for pages."""
    key = {"k"} if handler.opt.get(FOR_PAGES) else set()
    return frozenset(_query_parameters(handler)) | key


def _unknown_parameter(name: str, accepted: frozenset[str]) -> FieldProblem:
    names = f"one of {', '.join(sorted(accepted))}" if accepted else "no query parameters"
    text = f"unknown, expected {names}{did_you_mean(name, accepted)}"
    return FieldProblem(f"query: {name[:80]}", "unknown", text)


def _is_list(field: Any) -> bool:
    return any(get_origin(kind) is list for kind in (field.annotation, *get_args(field.annotation)))


def _is_integer(field: Any) -> bool:
    return field.annotation is int or int in [one.annotation for one in field.inner_types]


def _is_plain_in(path: str, value: int) -> bool:
    """Whether the integer that Litestar parsed from a path is written with digits."""
    return any(INTEGER.fullmatch(part) and int(part) == value for part in path.split("/"))


def shape_of(template: str) -> str:
    """A path template without parameter names."""
    return re.sub(r"{[^}]*}", "{}", template)


class Methods:
    """An ASGI layer that answers OPTIONS for all handlers of a path.

    Litestar's own answer lacks the methods of handlers that were registered later.
    """

    def __init__(self, inner: Any, app: Litestar, services: Mapping[str, Any]) -> None:
        self._inner = inner
        found: dict[str, set[str]] = {}
        fields: dict[str, dict[bytes, bytes]] = {}
        for route in app.routes:
            if isinstance(route, HTTPRoute):
                shape = shape_of(route.path_format)
                methods = found.setdefault(shape, set())
                methods.update(route.methods, {"HEAD"} if "GET" in route.methods else ())
                for handler, _ in route.route_handler_map.values():
                    own = handler.opt.get(OPTIONS_FIELDS)
                    fields.setdefault(shape, {}).update(own(services) if own else ())
        # A fixed path takes precedence over one with a parameter, as in Litestar's routing.
        self._paths = [
            (
                path_pattern(shape),
                [
                    (b"allow", ", ".join(sorted(found[shape])).encode()),
                    (b"content-length", b"0"),
                    *fields[shape].items(),
                ],
            )
            for shape in sorted(found, key=lambda shape: shape.count("{}"))
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer an OPTIONS request, or pass the request on."""
        headers = self._headers_of(scope["path"]) if scope["method"] == "OPTIONS" else None
        if headers is None:
            await self._inner(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _headers_of(self, path: str) -> list[tuple[bytes, bytes]] | None:
        return next((headers for pattern, headers in self._paths if pattern.fullmatch(path)), None)


def path_pattern(template: str) -> re.Pattern[str]:
    """A pattern for the paths of one template, or of several joined by `|`."""
    shapes = [
        "[^/]+".join(map(re.escape, re.split(r"{[^}]*}", one))) for one in template.split("|")
    ]
    return re.compile(f"(?:{'|'.join(shapes)})/?")


_METHODS: Final = ("get", "put", "post", "delete", "patch", "head")
_PROBLEM: Final = {"$ref": "#/components/responses/Problem"}


def handlers_of(app: Litestar) -> Iterator[tuple[str, str, HTTPRouteHandler]]:
    """Method, path template and handler of every operation."""
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for method, (handler, _) in route.route_handler_map.items():
                if method != "OPTIONS":
                    yield str(method), route.path_format, handler


def route_templates(app: Litestar) -> set[str]:
    """The path templates, which metrics use as labels."""
    return {route.path_format for route in app.routes}


def routes_without_scope(app: Litestar) -> list[str]:
    """Operations without a scope, or with an unknown scope."""
    return [
        f"{method} {path}"
        for method, path, handler in handlers_of(app)
        if "scope" not in handler.opt or handler.opt["scope"] not in (None, ANY_SCOPE, *SCOPES)
    ]


def routes_of_same_shape(app: Litestar) -> list[str]:
    """Operations that differ only in parameter names."""
    shapes = Counter(f"{method} {shape_of(path)}" for method, path, _ in handlers_of(app))
    return [shape for shape, count in shapes.items() if count > 1]


def describe(app: Litestar, described: Litestar) -> dict[str, Any]:
    """The OpenAPI document of `app`; `described` is the same app with Litestar's OpenAPI on."""
    document: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(described.openapi_schema.to_schema())
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    (_,), own = msgspec.json.schema_components(
        [Problem], ref_template="#/components/schemas/{name}"
    )
    schemas.update(own)
    components["responses"] = {
        "Problem": {
            "description": "The error; /problems lists all codes.",
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    }
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "publishable": {"type": "apiKey", "in": "query", "name": "k"},
    }
    for method, path, handler in handlers_of(app):
        operation = document["paths"][path][method.lower()]
        operation["summary"] = handler.summary or summary_of(operation["description"])
        _amend(operation, scope_of(handler), for_pages=bool(handler.opt.get(FOR_PAGES)))
        for media_type in handler.opt.get(OTHER_TYPES, ()):
            operation["responses"]["200"]["content"][media_type] = {}
    own = document["paths"]["/openapi.json"]["get"]["responses"]["200"]["content"]
    own["application/json"]["schema"] = {
        "type": "object",
        "required": ["openapi", "info", "paths"],
        "description": "An OpenAPI 3.1 document.",
    }
    return document


def operation_id_of(handler: HTTPRouteHandler, *_: Any) -> str:
    """The handler's name in camel case: `get_job` is `getJob`."""
    first, *rest = handler.handler_name.split("_")
    return first + "".join(word.title() for word in rest)


def summary_of(description: str) -> str:
    """The first clause of a handler's docstring."""
    return re.split(r"[;:.](?:\s|$)", " ".join(description.split()), maxsplit=1)[0]


def operations_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every operation of an OpenAPI document."""
    for item in document["paths"].values():
        yield from (item[method] for method in _METHODS if method in item)


def _amend(operation: dict[str, Any], scope: str | None, *, for_pages: bool) -> None:
    operation["responses"].pop("400", None)
    operation["responses"]["default"] = _PROBLEM
    scopes = [] if scope == ANY_SCOPE else [scope]
    operation["security"] = [] if scope is None else [{"bearer": scopes}]
    if for_pages:
        operation["security"].append({"publishable": [scope]})
