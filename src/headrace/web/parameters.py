"""Query and path parameters that mean one thing only, and the methods of each path.

Litestar takes the last of two equal parameters and reads `1e3` and `5.0` as integers. Here a parameter is given once
unless its type is a list, and an integer is written with digits alone.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final, get_args, get_origin
from urllib.parse import parse_qsl

from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import QueryParameter
from litestar.routes import HTTPRoute

from headrace.kernel.errors import FieldProblem
from headrace.web.model import BodyInvalid, ParameterRepeated, RouteUnknown

INTEGER: Final = re.compile(r"-?[0-9]{1,19}")


async def require_plain_parameters(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """A Litestar guard against repeated parameters and integers in other notations.

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
    kinds = {
        field.kwarg_definition.name or name: field
        for name, field in handler.parsed_fn_signature.parameters.items()
        if isinstance(field.kwarg_definition, QueryParameter)
    }
    for name, count in Counter(name for name, _ in given).items():
        if count > 1 and (name not in kinds or not _is_list(kinds[name])):
            raise ParameterRepeated(
                f"query parameter {name[:80]!r} is given {count} times: send it once"
            )
    problems = tuple(
        FieldProblem(f"query: {name}", "invalid", f"expected a whole number, got {text[:40]!r}")
        for name, text in given
        if name in kinds and _is_integer(kinds[name]) and not INTEGER.fullmatch(text)
    )
    if problems:
        texts = "; ".join(f"{p.pointer}: {p.text}" for p in problems[:3])
        raise BodyInvalid(
            f"the request has parameters that are not valid: {texts}", problems=problems
        )


def _is_list(field: Any) -> bool:
    return any(get_origin(kind) is list for kind in (field.annotation, *get_args(field.annotation)))


def _is_integer(field: Any) -> bool:
    return field.annotation is int or int in [one.annotation for one in field.inner_types]


def _is_plain_in(path: str, value: int) -> bool:
    """Whether an integer that Litestar found in a path is written there with digits."""
    return any(INTEGER.fullmatch(part) and int(part) == value for part in path.split("/"))


def shape_of(template: str) -> str:
    """A path template without the names of its parameters."""
    return re.sub(r"{[^}]*}", "{}", template)


class Methods:
    """The ASGI layer that answers OPTIONS: Litestar's own answer misses methods of handlers that were added later."""

    def __init__(self, inner: Any, app: Litestar) -> None:
        self._inner = inner
        found: dict[str, set[str]] = {}
        for route in app.routes:
            if isinstance(route, HTTPRoute):
                methods = found.setdefault(shape_of(route.path_format), set())
                methods.update(route.methods, {"HEAD"} if "GET" in route.methods else ())
        # As Litestar's routing, a fixed path goes before one with a parameter.
        self._paths = [
            (path_pattern(shape), ", ".join(sorted(found[shape])).encode())
            for shape in sorted(found, key=lambda shape: shape.count("{}"))
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        allow = self._allow_of(scope["path"]) if scope["method"] == "OPTIONS" else None
        if allow is None:
            await self._inner(scope, receive, send)
            return
        headers = [(b"allow", allow), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _allow_of(self, path: str) -> bytes | None:
        return next((allow for pattern, allow in self._paths if pattern.fullmatch(path)), None)


def path_pattern(template: str) -> re.Pattern[str]:
    """The paths of a template, or of several joined by `|`."""
    shapes = [
        "[^/]+".join(map(re.escape, re.split(r"{[^}]*}", one))) for one in template.split("|")
    ]
    return re.compile(f"(?:{'|'.join(shapes)})/?")
