"""Fast paths: hot routes that are answered without ASGI and Litestar.

A room sets a function under FAST_PATH in a handler's `opt`. Only plain requests take it: the exact
method and path, no body, nothing escaped, no unknown or repeated parameter, no repeated field. All
others go to Litestar. Host, origin, authentication, scopes, quotas, errors, metrics and trace use
the same functions as every other route.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from litestar import Litestar

from headrace.kernel.ids import new_request_id
from headrace.kernel.logs import current_traceparent
from headrace.kernel.routes import FAST_PATH, FastPath, FastRequest, FastResponse
from headrace.web.auth import FOR_PAGES, Callers, require_scope, scope_of
from headrace.web.exchange import stopped
from headrace.web.guard import SECURITY_HEADERS, Guard, begin_request, field_text
from headrace.web.limits import Quotas, end_charge, headers_of_charge
from headrace.web.model import current_request_id
from headrace.web.parsing import RequestHead
from headrace.web.problems import MEDIA_TYPE, headers_of, problem_of, to_headrace_error
from headrace.web.routes import handlers_of, query_names

_REFUSED: Final = frozenset(
    {b"transfer-encoding", b"idempotency-key", b"content-encoding", b"expect"}
)
"""Fields that only the full path handles."""
PLAIN: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/?&=._:~,@-"
"""Bytes of a target without escapes or fragments."""
_JSON: Final = b"content-type: application/json\r\n"
_PROBLEM: Final = f"content-type: {MEDIA_TYPE}\r\n".encode()
_Pairs = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class FastRoute:
    """A fast route: `prefix`, one name without a slash, `suffix`; or only the prefix."""

    template: str
    prefix: str
    suffix: str | None
    scope: str
    for_pages: bool
    query_names: frozenset[str]
    run: FastPath
    service: Any


class FastCall:
    """A request for a fast route. `scope` holds its quota charge, and what CORS checks need."""

    __slots__ = ("fields", "head", "name", "route", "scope")

    def __init__(
        self, head: RequestHead, fields: dict[bytes, bytes], route: FastRoute, name: str
    ) -> None:
        self.head = head
        self.fields = fields
        self.route = route
        self.name = name
        self.scope: dict[str, Any] = {}


class FastReply(msgspec.Struct, frozen=True, gc=False):
    """A response without its first line, date and end of the head."""

    status: int
    lines: list[bytes]
    body: bytes
    is_last: bool
    """Whether the connection is closed after it; then `lines` contain that field."""


class FastRoutes:
    """Finds the requests for fast routes, and answers them."""

    def __init__(
        self,
        app: Litestar,
        guard: Guard,
        *,
        callers: Callers,
        quotas: Quotas,
        services: dict[str, Any],
    ) -> None:
        self._guard, self._callers, self._quotas = guard, callers, quotas
        self._exact: dict[tuple[str, bytes], FastRoute] = {}
        self._named: dict[str, list[FastRoute]] = {}
        self._fixed: dict[tuple[bytes, ...], bytes] = {}
        for method, template, handler in handlers_of(app):
            if FAST_PATH in handler.opt:
                self._add(method, template, handler, services)

    def find(self, head: RequestHead) -> FastCall | None:
        """The call for a plain request for a fast route."""
        path, _, query_string = head.target.partition(b"?")
        found = self._route_of(head.method, path)
        if found is None or head.target.translate(None, PLAIN):
            return None
        fields = dict(head.fields)
        if (
            len(fields) != len(head.fields)
            or not _REFUSED.isdisjoint(fields)
            or fields.get(b"content-length", b"0") != b"0"
            or b"host" not in fields
        ):
            return None
        call = FastCall(head, fields, *found)
        call.scope["query_string"] = query_string
        return call

    async def answer(self, call: FastCall) -> FastReply | None:
        """The reply to a call, or None if Litestar must answer; then the charge stays open."""
        started_s = time.perf_counter()
        request_id, fields, route = new_request_id(), call.fields, call.route
        current_request_id.set(request_id)
        head = call.head
        span = begin_request(head.method, head.target, fields.get(b"traceparent"))
        traceparent = current_traceparent.get()
        cors: _Pairs = ()
        try:
            self._guard.check_host(fields[b"host"])
            if b"origin" in fields:
                cors = await self._cors(call)
            response = await self._respond(call)
        except asyncio.CancelledError:
            # Only a stop of the server cancels a request.
            reply = _refusal(stopped())
        except Exception as error:  # noqa: BLE001 - every failure becomes a problem document
            reply = _refusal(error)
        else:
            if response is None:
                if span is not None:
                    span.leave()
                return None
            lines = [self._fixed_lines(response.headers)]
            lines += [b"%b: %b\r\n" % pair for pair in response.headers]
            reply = FastReply(response.status, lines, response.body, is_last=False)
        end_charge(call.scope)
        reply.lines.extend([b"%b: %b\r\n" % pair for pair in headers_of_charge(call.scope)])
        reply.lines.extend([b"%b: %b\r\n" % pair for pair in cors])
        ids = f"x-request-id: {request_id}\r\ntraceparent: {traceparent}\r\n"
        reply.lines.append(b"%bcontent-length: %d\r\n" % (ids.encode(), len(reply.body)))
        seconds = time.perf_counter() - started_s
        self._guard.record(
            head.method,
            route.template,
            reply.status,
            seconds=seconds,
            request_id=request_id,
            span=span,
        )
        return reply

    async def _cors(self, call: FastCall) -> _Pairs:
        """The CORS headers of a call. Raises: OriginRefused, PostgresDown."""
        head = call.head
        path = head.target.partition(b"?")[0].decode()
        scope = {**call.scope, "method": head.method, "path": path}
        return await self._guard.check_origin(scope, call.fields, call.fields[b"origin"])

    async def _respond(self, call: FastCall) -> FastResponse | None:
        """The response of the route, or None. Raises: the errors of the route."""
        route, fields, query_string = call.route, call.fields, call.scope["query_string"]
        query = _plain_query(query_string)
        if query is None or not route.query_names.issuperset(query):
            return None
        authorization = field_text(fields.get(b"authorization"))
        caller = self._callers.known_caller(authorization)
        if caller is None and route.for_pages:
            caller = await self._callers.require_page_caller(authorization, query_string)
        elif caller is None:
            caller = await self._callers.require_caller(authorization)
        require_scope(caller, route.scope)
        self._quotas.charge(caller, call.scope)
        request = FastRequest(
            call.name,
            query,
            field_text(fields.get(b"user-agent")),
            field_text(fields.get(b"if-none-match")),
            caller.is_publishable,
        )
        return await route.run(route.service, request)

    def _add(self, method: str, template: str, handler: Any, services: dict[str, Any]) -> None:
        prefix, brace, rest = template.partition("{")
        scope = scope_of(handler)
        assert scope is not None, f"{template}: a route with a fast path needs a scope"
        [service] = [name for name in services if name in handler.parsed_fn_signature.parameters]
        route = FastRoute(
            template,
            prefix,
            rest.partition("}")[2] if brace else None,
            scope,
            bool(handler.opt.get(FOR_PAGES)),
            query_names(handler),
            handler.opt[FAST_PATH],
            services[service],
        )
        if brace:
            self._named.setdefault(method, []).append(route)
        else:
            self._exact[method, template.encode()] = route

    def _route_of(self, method: str, raw_path: bytes) -> tuple[FastRoute, str] | None:
        """The route for a request, and the name in its path."""
        exact = self._exact.get((method, raw_path))
        if exact is not None:
            return exact, ""
        routes = self._named.get(method)
        if routes is None:
            return None
        path = raw_path.decode("latin-1")
        for route in routes:
            if path.startswith(route.prefix):
                name = path[len(route.prefix) :]
                if route.suffix:
                    if not name.endswith(route.suffix):
                        continue
                    name = name[: -len(route.suffix)]
                if name and "/" not in name:
                    return route, name
        return None

    def _fixed_lines(self, own: _Pairs) -> bytes:
        """The lines of every response, without those that it sets itself."""
        names = tuple([pair[0] for pair in own])
        fixed = self._fixed.get(names)
        if fixed is None:
            rest = [b"%b: %b\r\n" % pair for pair in SECURITY_HEADERS if pair[0] not in names]
            self._fixed[names] = fixed = _JSON + b"".join(rest)
        return fixed


def _refusal(error: Exception) -> FastReply:
    ours = to_headrace_error(error)
    headers = headers_of(ours)
    lines = [_PROBLEM]
    lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
    own = {name.encode() for name in headers}
    lines += [b"%b: %b\r\n" % pair for pair in SECURITY_HEADERS if pair[0] not in own]
    body = msgspec.json.encode(problem_of(ours))
    return FastReply(ours.status, lines, body, is_last="connection" in headers)


def _plain_query(query_string: bytes) -> dict[str, str] | None:
    """The parameters, or None if any is repeated or without a value."""
    if not query_string:
        return {}
    found: dict[str, str] = {}
    parts = query_string.decode("latin-1").split("&")
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not value:
            return None
        found[name] = value
    return found if len(found) == len(parts) else None
