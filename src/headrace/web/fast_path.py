"""Fast paths: answers for hot routes before Litestar routes the request.

A room sets a function under FAST_PATH in a handler's `opt`. Only plain requests take it: the exact
method and path, no body, nothing escaped, no repeated parameter. All others go to Litestar.
Authentication, scopes, errors, metrics and trace use the same functions as every other route.
`HeadCache` additionally skips the HTTP parser for a head whose bytes were seen before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headrace.kernel.ids import new_request_id
from headrace.kernel.logs import current_traceparent, new_traceparent
from headrace.kernel.routes import FAST_PATH, FastPath, FastRequest, FastResponse
from headrace.web.auth import FOR_PAGES, Callers, require_scope, scope_of
from headrace.web.guard import SECURITY_HEADERS, Guard
from headrace.web.limits import Quotas, end_charge, headers_of_charge
from headrace.web.model import TARGET_BYTES_MAX, WHOLE_RESPONSE, current_request_id
from headrace.web.problems import MEDIA_TYPE, headers_of, problem_of, to_headrace_error
from headrace.web.routes import handlers_of

_JSON: Final = (b"content-type", b"application/json")
_REFUSED: Final = frozenset({b"transfer-encoding", b"idempotency-key", b"content-encoding"})
"""Headers that only Litestar's guards handle."""


@dataclass(frozen=True, slots=True)
class FastRoute:
    """A fast route: `prefix`, one name without a slash, `suffix`; or only the prefix."""

    template: str
    prefix: str
    suffix: str | None
    scope: str
    for_pages: bool
    run: FastPath
    service: Any


class FastRoutes:
    """An ASGI layer that answers from fast paths and passes all other requests to `app`."""

    def __init__(
        self, app: Litestar, callers: Callers, quotas: Quotas, services: dict[str, Any]
    ) -> None:
        self._app, self._callers, self._quotas = app, callers, quotas
        self._exact: dict[tuple[str, str], FastRoute] = {}
        self._named: dict[str, list[FastRoute]] = {}
        for method, template, handler in handlers_of(app):
            if FAST_PATH in handler.opt:
                self._add(method, template, handler, services)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer or pass on one request."""
        found = self.find(scope["method"], scope["path"])
        if found is None:
            await self._app(scope, receive, send)
            return
        route, name = found
        scope["path_template"] = route.template
        try:
            answer = await self._answer(route, name, scope)
        except Exception as error:  # noqa: BLE001 - every failure becomes a problem document
            await _send_problem(send, error)
            return
        if answer is None:
            await self._app(scope, receive, send)
            return
        length = (b"content-length", b"%d" % len(answer.body))
        headers = [_JSON, length, *answer.headers]
        if WHOLE_RESPONSE in scope.get("extensions", ()):
            status, body = answer.status, answer.body
            await send({"type": WHOLE_RESPONSE, "status": status, "headers": headers, "body": body})
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def answer(
        self,
        route: FastRoute,
        name: str,
        query_string: bytes,
        scope: Any,
        *,
        authorization: str | None,
        user_agent: str | None,
        if_none_match: str | None = None,
    ) -> FastResponse | None:
        """The response of `route` to a request without a body, or None if Litestar must answer.

        Stores the request's quota charge in `scope`. Raises: the errors of the route.
        """
        query = _plain_query(query_string)
        if query is None:
            return None
        if route.for_pages:
            caller = await self._callers.require_page_caller(authorization, query_string)
        else:
            caller = await self._callers.require_caller(authorization)
        require_scope(caller, route.scope)
        self._quotas.charge(caller, scope)
        request = FastRequest(name, query, user_agent, if_none_match, caller.is_publishable)
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
            handler.opt[FAST_PATH],
            services[service],
        )
        if brace:
            self._named.setdefault(method, []).append(route)
        else:
            self._exact[method, template] = route

    def find(self, method: str, path: str) -> tuple[FastRoute, str] | None:
        """The route for a request, and the name in its path."""
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact, ""
        for route in self._named.get(method, ()):
            if path.startswith(route.prefix):
                name = path[len(route.prefix) :]
                if route.suffix:
                    if not name.endswith(route.suffix):
                        continue
                    name = name[: -len(route.suffix)]
                if name and "/" not in name:
                    return route, name
        return None

    async def _answer(self, route: FastRoute, name: str, scope: Any) -> FastResponse | None:
        if b"%" in scope["raw_path"]:
            return None
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not _REFUSED.isdisjoint(headers) or headers.get(b"content-length", b"0") != b"0":
            return None
        return await self.answer(
            route,
            name,
            scope["query_string"],
            scope,
            authorization=_text(headers.get(b"authorization")),
            user_agent=_text(headers.get(b"user-agent")),
            if_none_match=_text(headers.get(b"if-none-match")),
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _plain_query(query_string: bytes) -> dict[str, str] | None:
    """The parameters, or None if any is escaped, repeated or without a value."""
    if not query_string:
        return {}
    if b"%" in query_string or b"+" in query_string:
        return None
    found: dict[str, str] = {}
    parts = query_string.decode("latin-1").split("&")
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not value:
            return None
        found[name] = value
    return found if len(found) == len(parts) else None


async def _send_problem(send: Any, error: Exception) -> None:
    ours = to_headrace_error(error)
    body = msgspec.json.encode(problem_of(ours))
    headers = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), **headers_of(ours)}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": ours.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


HEAD_BYTES_MAX: Final = 2 * 1024
HEADS_MAX: Final = 1_000
"""The cache is cleared when it holds this many heads."""
END: Final = b"\r\n\r\n"
VERSION: Final = b" HTTP/1.1"
NAMES: Final = frozenset(
    b"accept accept-encoding accept-language authorization connection host user-agent".split()
)
"""Header fields of a cached head; only `authorization` changes the response."""
PLAIN: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/?&=._:~,@-"
"""Bytes of a target without escapes or fragments."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """The header fields of a cached head that matter."""

    authorization: str | None
    user_agent: str | None


class KnownRequest(msgspec.Struct, frozen=True):
    """A request with a cached head and a fast path."""

    head: Head
    route: FastRoute
    name: str
    query_string: bytes


class HeadCache:
    """Parsed heads by their bytes, shared by all connections of a server.

    Clients send the same header fields with each request, and only the target differs. A head is
    cached when a fast path answered its GET with 200. A request with cached bytes and a plain
    target needs no HTTP parser, no uvicorn cycle and no ASGI messages. Authentication, scopes,
    quotas, metrics, trace and response headers stay the same. Any other request, and any failure,
    takes the full path: a fast GET has no side effects, so it can run twice.
    """

    def __init__(self, guard: Guard, fast: FastRoutes) -> None:
        self._guard, self._fast = guard, fast
        self._heads: dict[bytes, Head] = {}
        self._fixed: dict[tuple[bytes, ...], bytes] = {}

    def find(self, data: bytes) -> KnownRequest | None:
        """The request in `data`, if it is one complete request with a cached head."""
        if not data.startswith(b"GET "):
            return None
        line_end = data.find(b"\r\n")
        head = self._heads.get(data[line_end:])
        if head is None or data[line_end - 9 : line_end] != VERSION:
            return None
        target = data[4 : line_end - 9]
        if target.translate(None, PLAIN) or len(target) > TARGET_BYTES_MAX:
            return None
        path, _, query_string = target.partition(b"?")
        found = self._fast.find("GET", path.decode())
        return None if found is None else KnownRequest(head, *found, query_string)

    def head_of(self, data: bytes) -> bytes:
        """The head bytes to cache if `data` is one complete GET; otherwise empty."""
        if not data.startswith(b"GET ") or data.find(END) != len(data) - len(END):
            return b""
        head = data[data.find(b"\r\n") :]
        return head if len(head) <= HEAD_BYTES_MAX else b""

    def learn(self, head: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Cache the head of a request that was answered with 200."""
        fields = dict(headers)
        if len(fields) != len(headers) or not fields.keys() <= NAMES:
            return
        if fields.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        self._heads[head] = Head(
            *(
                None if name not in fields else fields[name].decode("latin-1")
                for name in (b"authorization", b"user-agent")
            )
        )

    async def answer(
        self, request: KnownRequest, write: Callable[[int, list[bytes]], bool]
    ) -> bool:
        """Answer through `write(status, fields and body)`; return False for the full path."""
        started_s = time.perf_counter()
        request_id, traceparent = new_request_id(), new_traceparent()
        current_request_id.set(request_id)
        current_traceparent.set(traceparent)
        scope: dict[str, Any] = {}
        try:
            answer = await self._fast.answer(
                request.route,
                request.name,
                request.query_string,
                scope,
                authorization=request.head.authorization,
                user_agent=request.head.user_agent,
            )
        except Exception:  # noqa: BLE001 - the full path reports it
            return False
        finally:
            end_charge(scope)
        if answer is None:
            return False
        ids = f"x-request-id: {request_id}\r\ntraceparent: {traceparent}\r\n"
        charged = [b"%b: %b\r\n" % pair for pair in headers_of_charge(scope)]
        parts = [b"content-length: %d\r\n" % len(answer.body), *self._fields(answer), *charged]
        if write(answer.status, [*parts, ids.encode(), answer.body]):
            seconds = time.perf_counter() - started_s
            self._guard.record("GET", request.route.template, answer.status, seconds)
        return True

    def _fields(self, answer: FastResponse) -> list[bytes]:
        """Header lines: its own, and those of every response."""
        own = [b"%b: %b\r\n" % pair for pair in answer.headers]
        names = tuple([pair[0] for pair in answer.headers])
        fixed = self._fixed.get(names)
        if fixed is None:
            rest = [pair for pair in SECURITY_HEADERS if pair[0] not in names]
            fixed = b"".join(b"%b: %b\r\n" % pair for pair in rest)
            self._fixed[names] = fixed = b"content-type: application/json\r\n" + fixed
        own.append(fixed)
        return own


def response_bytes(
    status: int, defaults: list[tuple[bytes, bytes]], parts: list[bytes], *, last: bool
) -> bytes:
    """The bytes of a response; `last` closes the connection after it."""
    head = [STATUS_LINE[status], *[b"%b: %b\r\n" % pair for pair in defaults]]
    body = parts.pop()
    end = b"connection: close\r\n\r\n" if last else b"\r\n"
    return b"".join([*head, *parts, end, body])
