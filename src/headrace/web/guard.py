"""Checks and headers of every request, as one ASGI layer before routing; and CORS for web pages.

The guard assigns the request id, carries the trace (W3C), checks the Host header, refuses changes
from pages of other origins, adds security headers, and counts requests. The Host check stops DNS
rebinding: a page can point its own name at a loopback address, and only the Host header shows it.

A page on another origin may call a route marked FOR_PAGES with a valid publishable key in the
address (`?k=hrk_...`). Only such a request, its preflight and its response carry CORS headers. No
cookie authorizes a cross-origin request.

A path parameter may contain `/`, escaped as `%2F`. It passes the routing as SLASH_IN_NAME, a
character that no path contains.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
from litestar import Litestar

from headrace.kernel import metrics, spans
from headrace.kernel.errors import HeadraceError
from headrace.kernel.ids import new_request_id
from headrace.kernel.logs import (
    SparseLogger,
    child_traceparent,
    current_traceparent,
    is_sampled,
    logger,
)
from headrace.kernel.routes import RESPONSE_FIELDS
from headrace.web.auth import FOR_PAGES, KEY_IN_QUERY, Callers
from headrace.web.exchange import stopped
from headrace.web.limits import end_charge, headers_of_charge
from headrace.web.model import (
    LOOPBACK_NAMES,
    BadRequest,
    HostRefused,
    OriginRefused,
    TokenRefused,
    WebConfig,
    current_request_id,
)
from headrace.web.problems import MEDIA_TYPE, headers_of, problem_of, to_headrace_error
from headrace.web.routes import handlers_of, path_pattern

if TYPE_CHECKING:
    from headrace.kernel.otel import Span

PREFLIGHT_KEPT_S: Final = 86_400
_NAME: Final = r"(?:\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})"
_PORT: Final = r"(?::[0-9]{1,5})?"
_HOST: Final = re.compile(f"({_NAME}){_PORT}")
_ORIGIN: Final = re.compile(f"https?://({_NAME}{_PORT})")
_Headers = dict[bytes, bytes]
_Pairs = tuple[tuple[bytes, bytes], ...]


def host_name(host: str) -> str:
    """The host without its port (`[::1]:80` -> `::1`); empty for a malformed header."""
    found = _HOST.fullmatch(host.lower())
    return found[1].strip("[]") if found else ""


def origin_host(origin: str) -> str:
    """Host and port of an Origin header; empty for `null` or a malformed header."""
    found = _ORIGIN.fullmatch(origin.lower())
    return found[1] if found else ""


def is_address(name: str) -> bool:
    """Whether `name` is an IP address, which DNS cannot point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class PageRoutes:
    """The routes that web pages of other origins may call."""

    def __init__(self, app: Litestar, callers: Callers) -> None:
        self._callers = callers
        templates: dict[str, list[str]] = {}
        for method, template, handler in handlers_of(app):
            if handler.opt.get(FOR_PAGES):
                templates.setdefault(method, []).append(template)
        self._paths = {method: path_pattern("|".join(found)) for method, found in templates.items()}

    async def cors_headers(self, scope: Any, headers: _Headers) -> _Pairs:
        """The CORS headers of the response; none unless the route and the key allow the request.

        Raises: PostgresDown.
        """
        keys = KEY_IN_QUERY.findall(scope["query_string"])
        if len(keys) != 1 or b"authorization" in headers:
            return ()
        methods = [name for name, paths in self._paths.items() if paths.fullmatch(scope["path"])]
        if not methods or _method_of(scope, headers) not in methods:
            return ()
        try:
            await self._callers.require_key(keys[0].decode())
        except TokenRefused:
            return ()
        return (
            (b"access-control-allow-origin", b"*"),
            (b"access-control-allow-methods", ", ".join(sorted(methods)).encode()),
            (b"access-control-allow-headers", b"content-type"),
            (b"access-control-max-age", b"%d" % PREFLIGHT_KEPT_S),
        )


def _method_of(scope: Any, headers: _Headers) -> str:
    """The method of the request itself, or of the request that a preflight announces."""
    method: str = scope["method"]
    if method == "OPTIONS":
        method = headers.get(b"access-control-request-method", b"").decode("latin-1")
    return "GET" if method == "HEAD" else method


SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS: Final = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
UNMATCHED: Final = "unmatched"
SINGLE_HEADERS: Final = frozenset({b"authorization", b"content-type", b"idempotency-key"})
"""Headers that are refused when they occur twice, because servers read that differently."""
HOSTS_KEPT_MAX: Final = 100
"""Most Host headers whose check is cached."""
SLASH_IN_NAME: Final = "\udc2f"
SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_LOG: Final = logger(__name__)
_OFTEN: Final = SparseLogger(_LOG, every_s=1.0)
_REQUESTS: Final = metrics.counter(
    "web_requests_total",
    "Requests answered, by route template and status class.",
    route=(UNMATCHED,),
    method=METHODS,
    status=("2xx", "3xx", "4xx", "5xx"),
)
_SECONDS: Final = metrics.histogram(
    "web_request_seconds",
    "From the head of a request to its last byte; of a stream of events, to its first.",
    route=(UNMATCHED,),
)
_EVENTS: Final = b"text/event-stream"


PROBES: Final = {"/healthz", "/readyz"}
"""Balancers such as HAProxy check them by HTTP/1.0 without a Host. No browser omits it."""


class Guard:
    """The outermost ASGI layer around `app`; metrics use the templates `routes` as labels."""

    def __init__(self, app: Any, config: WebConfig, routes: set[str], pages: PageRoutes) -> None:
        self._app = app
        self._pages = pages
        self._hosts = LOOPBACK_NAMES | {config.listen[0].lower(), *config.allowed_hosts}
        self._origins = frozenset(config.allowed_hosts)
        self._seen_hosts: set[bytes] = set()
        self._bound: dict[tuple[str, str, int], Any] = {}
        metrics.allow_values("web_requests_total", route=routes)
        metrics.allow_values("web_request_seconds", route=routes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request; pass other kinds of connection to `app`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        # HEAD is GET without the body, which the exchange omits.
        inner = scope
        if scope["method"] == "HEAD":
            inner = {**scope, "method": "GET", "is_head": True}
        if b"%2f" in scope["raw_path"].lower():
            inner = {**inner, "path": _path_with_escaped_slashes(scope["raw_path"])}
        answer = _Response(send, inner, new_request_id())
        headers = _headers_of(scope)
        current_request_id.set(answer.request_id)
        span = begin_request(scope["method"], scope["raw_path"], headers.get(b"traceparent"))
        try:
            _require_single(scope["headers"], headers)
            self.check_host(headers[b"host"])
            origin = headers.get(b"origin")
            if origin is not None:
                answer.cors = await self.check_origin(inner, headers, origin)
            await self._app(inner, receive, answer.send)
        except HeadraceError as refusal:
            await answer.refuse(refusal)
        except asyncio.CancelledError:
            if answer.status:
                raise
            # Only a stop of the server cancels a request.
            await answer.refuse(stopped())
        except Exception as error:
            if answer.status:
                raise
            await answer.refuse(to_headrace_error(error))
        finally:
            end_charge(inner)
            route = inner.get("path_template") or UNMATCHED
            self.record(
                scope["method"],
                route,
                answer.status,
                seconds=(answer.stream_began_s or time.perf_counter()) - started_s,
                request_id=answer.request_id,
                span=span,
            )

    def check_host(self, raw_host: bytes) -> None:
        """Refuse an unknown host. Raises: HostRefused."""
        if raw_host in self._seen_hosts:
            return
        host = raw_host.decode("latin-1")
        name = host_name(host)
        if name not in self._hosts and not is_address(name):
            raise HostRefused(
                f"host {host[:80]!r} is not served here: use a configured host, or add it"
                " to web.allowed_hosts (HEADRACE_WEB_ALLOWED_HOSTS)"
            )
        if len(self._seen_hosts) < HOSTS_KEPT_MAX:
            self._seen_hosts.add(raw_host)

    async def check_origin(
        self, scope: Any, headers: dict[bytes, bytes], origin: bytes
    ) -> tuple[tuple[bytes, bytes], ...]:
        """The CORS headers for a page route with a valid key; refuse other cross-origin changes.

        Raises: OriginRefused, PostgresDown.
        """
        text = origin.decode("latin-1")
        host = origin_host(text)
        if host and host == headers[b"host"].decode("latin-1").lower():
            return ()
        cors = await self._pages.cors_headers(scope, headers)
        if cors or scope["method"] in SAFE_METHODS or host in self._origins:
            return cors
        raise OriginRefused(
            f"origin {text[:80]!r} may not send changes: call from a server, or add its"
            " host to web.allowed_hosts"
        )

    def record(
        self,
        method: str,
        route: str,
        status: int,
        *,
        seconds: float,
        request_id: str,
        span: Span | None,
    ) -> None:
        """Count one answered request, log a failure of the server, and end the span."""
        key = (route, method, status // 100)
        bound = self._bound.get(key)
        if bound is None:
            of_class = f"{status // 100}xx"
            bound = self._bound[key] = (
                metrics.bound(
                    _REQUESTS, "web_requests_total", route=route, method=method, status=of_class
                ),
                metrics.bound(_SECONDS, "web_request_seconds", route=route),
            )
        bound[0].inc()
        bound[1].observe(seconds)
        if status >= 500:
            _OFTEN.warning(
                "request_answered_5xx",
                kind=(route, status),
                request_id=request_id,
                method=method,
                route=route,
                status=status,
                seconds=round(seconds, 4),
            )
        if span is not None:
            end_request(span, method, route, status, request_id=request_id)


def begin_request(method: str, raw_path: bytes, traceparent: bytes | None) -> Span | None:
    """Continue the trace of a request, or begin one; its span if it is sampled."""
    parent = field_text(traceparent)
    own = child_traceparent(parent)
    if spans.active is None or not is_sampled(own):
        current_traceparent.set(own)
        return None
    attributes = {
        "http.request.method": method,
        "url.path": raw_path.decode("latin-1"),
        "url.scheme": "http",
    }
    return spans.active.begin(method, "SERVER", parent, attributes)


def end_request(span: Span, method: str, route: str, status: int, *, request_id: str) -> None:
    """End the span of a request."""
    if route != UNMATCHED:
        span.rename(f"{method} {route}")
        span.note({"http.route": route})
    span.note({"http.response.status_code": status, "headrace.request.id": request_id})
    if status >= 500:
        span.fail(str(status))
    span.end()


class _Response:
    """A response with the headers that every response carries."""

    def __init__(self, send: Any, scope: Any, request_id: str) -> None:
        self._send = send
        self._scope = scope
        self.request_id = request_id
        self.status = 0
        self.stream_began_s = 0.0
        """When a stream of events began; 0 for other answers, whose time lasts to their end."""
        self.cors: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            present = {name.lower(): value for name, value in headers}
            if present.get(b"content-type", b"").startswith(_EVENTS):
                self.stream_began_s = time.perf_counter()
            headers += [pair for pair in SECURITY_HEADERS if pair[0] not in present]
            headers += self.cors
            headers += headers_of_charge(self._scope)
            headers += self._scope.get(RESPONSE_FIELDS, ())
            headers.append((b"x-request-id", self.request_id.encode()))
            headers.append((b"traceparent", (current_traceparent.get() or "").encode()))
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, error: HeadraceError) -> None:
        body = msgspec.json.encode(problem_of(error))
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(len(body)),
            "connection": "close",
            **headers_of(error),
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": body})


def restore_slashes(connection: Any, _: Any) -> None:
    """Restore `/` in path parameters; a Litestar guard that runs before the handler."""
    scope = connection.scope
    if SLASH_IN_NAME in scope["path"]:
        scope["path"] = scope["path"].replace(SLASH_IN_NAME, "/")
        # A new dict: Litestar caches the one in the scope for later requests of this path.
        scope["path_params"] = {
            name: value.replace(SLASH_IN_NAME, "/") if isinstance(value, str) else value
            for name, value in scope["path_params"].items()
        }


def _path_with_escaped_slashes(raw_path: bytes) -> str:
    parts = raw_path.decode("latin-1").split("/")
    return "/".join(unquote(part).replace("/", SLASH_IN_NAME) for part in parts)


def _headers_of(scope: Any) -> dict[bytes, bytes]:
    """The fields by name; a balancer's check may lack a Host."""
    found: dict[bytes, bytes] = dict(scope["headers"])
    if scope["http_version"] == "1.0" and scope["path"] in PROBES:
        found.setdefault(b"host", b"localhost")
    return found


def _require_single(headers: list[tuple[bytes, bytes]], found: dict[bytes, bytes]) -> None:
    """Require one Host and at most one of each of SINGLE_HEADERS. Raises: BadRequest."""
    if len(found) == len(headers) and b"host" in found:
        return
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or b"host" not in found:
        raise BadRequest(f"expected one Host header, got {hosts}")
    for name in names:
        if name in SINGLE_HEADERS and names.count(name) > 1:
            doubled = name.decode().title()
            raise BadRequest(f"expected one {doubled} header, got several: send it once")


def field_text(value: bytes | None) -> str | None:
    """The text of a header field, if it is there."""
    return None if value is None else value.decode("latin-1")
