"""The description of the API: OpenAPI 3.1 from the handlers' types, with our errors and scopes.

Litestar describes parameters, bodies and answers. Its own error answers are replaced by ours, each
operation says which scope it needs, and what would make a bad description stops the start: two
operations of one id, two routes of one shape, a route without a scope.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from headrace.web.auth import FOR_PAGES, scope_of
from headrace.web.model import ANY_SCOPE, SCOPES
from headrace.web.parameters import shape_of
from headrace.web.problems import MEDIA_TYPE, Problem

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
    """The path templates, as metrics name them."""
    return {route.path_format for route in app.routes}


def routes_without_scope(app: Litestar) -> list[str]:
    """Operations that do not say what scope they need, or name one that does not exist."""
    return [
        f"{method} {path}"
        for method, path, handler in handlers_of(app)
        if "scope" not in handler.opt or handler.opt["scope"] not in (None, ANY_SCOPE, *SCOPES)
    ]


def routes_of_same_shape(app: Litestar) -> list[str]:
    """Operations that differ in nothing but the names of their parameters."""
    shapes = Counter(f"{method} {shape_of(path)}" for method, path, _ in handlers_of(app))
    return [shape for shape, count in shapes.items() if count > 1]


def describe(app: Litestar, described: Litestar) -> dict[str, Any]:
    """The OpenAPI document of `app`; `described` is its twin with Litestar's description on."""
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
            "description": "What went wrong; the table of codes is at /problems.",
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    }
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "publishable": {"type": "apiKey", "in": "query", "name": "k"},
    }
    for method, path, handler in handlers_of(app):
        operation = document["paths"][path][method.lower()]
        _amend(operation, scope_of(handler), for_pages=bool(handler.opt.get(FOR_PAGES)))
    own = document["paths"]["/openapi.json"]["get"]["responses"]["200"]["content"]
    own["application/json"]["schema"] = {
        "type": "object",
        "required": ["openapi", "info", "paths"],
        "description": "An OpenAPI 3.1 document.",
    }
    return document


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
