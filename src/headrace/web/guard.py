"""What holds for every request, before any route is looked at, as one plain ASGI layer.

It names the request, carries the trace (W3C), checks that the Host is ours (a browser page can make its
own name point at a loopback address; only the Host header shows it), refuses changes from pages of another
origin, adds the security headers, and counts. Successful requests are counted, not logged.

A page of another origin may call the routes for pages with a valid publishable key: `cors.py` decides that per route.

A name in a path may hold `/`, written `%2F`: it travels through the routing as a character that no path can hold.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from headrace.kernel import metrics
from headrace.kernel.errors import HeadraceError
from headrace.kernel.ids import new_request_id
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.trace import current_traceparent, next_hop
from headrace.web.cors import PageRoutes, host_name, is_address, origin_host
from headrace.web.model import (
    LOOPBACK_NAMES,
    WHOLE_ANSWER,
    BadRequest,
    HostRefused,
    OriginRefused,
    Stopping,
    WebConfig,
    current_request_id,
)
from headrace.web.problems import MEDIA_TYPE, as_ours, headers_of, problem_of
from headrace.web.quotas import end_charge, headers_of_charge

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS: Final = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
UNMATCHED: Final = "unmatched"
ONCE: Final = frozenset({b"authorization", b"content-type", b"idempotency-key"})
"""Headers of which two could be read in two ways."""
HOSTS_KEPT_MAX: Final = 100
"""A route's failures of one status have a line so often; `web_requests_total` counts them all."""
SLASH_IN_NAME: Final = "\udc2f"
ANSWER_STARTS: Final = frozenset({"http.response.start", WHOLE_ANSWER})
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
    "web_request_seconds", "From the head of a request to its last byte.", route=(UNMATCHED,)
)


class Guard:
    """The outermost ASGI layer around `app`; `routes` are the templates that metrics may name."""

    def __init__(self, app: Any, config: WebConfig, routes: set[str], pages: PageRoutes) -> None:
        self._app = app
        self._pages = pages
        self._hosts = LOOPBACK_NAMES | {config.listen[0].lower(), *config.allowed_hosts}
        self._origins = frozenset(config.allowed_hosts)
        self._seen_hosts: set[bytes] = set()
        self._bound: dict[tuple[str, str, str], Any] = {}
        metrics.allow_values("web_requests_total", route=routes)
        metrics.allow_values("web_request_seconds", route=routes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request; other kinds of connection are passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        # HEAD is GET without the body, which uvicorn leaves out by the scope that it keeps.
        inner = scope
        if scope["method"] == "HEAD":
            inner = {**scope, "method": "GET", "is_head": True}
        if b"%2f" in scope["raw_path"].lower():
            inner = {**inner, "path": _path_with_names_whole(scope["raw_path"])}
        answer = _Answer(send, inner, new_request_id())
        headers: dict[bytes, bytes] = dict(scope["headers"])
        current_request_id.set(answer.request_id)
        current_traceparent.set(next_hop(_text(headers.get(b"traceparent"))))
        try:
            self._check_host(scope, headers)
            origin = headers.get(b"origin")
            if origin is not None:
                await self._check_origin(inner, headers, origin, answer)
            await self._app(inner, receive, answer.send)
        except HeadraceError as refusal:
            await answer.refuse(refusal)
        except asyncio.CancelledError:
            if answer.status:
                raise
            # Only a stop cancels a request, and this is its last act: it ends either way.
            await answer.refuse(
                Stopping("the server stops and the request took too long", retry_after_s=1)
            )
        except Exception as error:
            if answer.status:
                raise
            await answer.refuse(as_ours(error))
        finally:
            end_charge(inner)
            route = inner.get("path_template") or UNMATCHED
            self._record(scope["method"], route, answer, time.perf_counter() - started_s)

    def _check_host(self, scope: Any, headers: dict[bytes, bytes]) -> None:
        """Refuse doubled headers and foreign hosts. Raises: BadRequest, HostRefused."""
        if len(headers) != len(scope["headers"]) or b"host" not in headers:
            _require_single(scope["headers"])
        raw_host = headers[b"host"]
        if raw_host in self._seen_hosts:
            return
        host = raw_host.decode("latin-1")
        name = host_name(host)
        if name not in self._hosts and not is_address(name):
            raise HostRefused(
                f"host {host[:80]!r} is not served here: use one that is, or add it to"
                " web.allowed_hosts (HEADRACE_WEB_ALLOWED_HOSTS)"
            )
        if len(self._seen_hosts) < HOSTS_KEPT_MAX:
            self._seen_hosts.add(raw_host)

    async def _check_origin(
        self, scope: Any, headers: dict[bytes, bytes], origin: bytes, answer: _Answer
    ) -> None:
        """Grant CORS where a route for pages and a valid key allow it; refuse other foreign changes.

        Raises: OriginRefused, PostgresDown.
        """
        text = origin.decode("latin-1")
        place = origin_host(text)
        if place and place == headers[b"host"].decode("latin-1").lower():
            return
        answer.cors = await self._pages.cors_headers(scope, headers)
        if answer.cors or scope["method"] in SAFE_METHODS or place in self._origins:
            return
        raise OriginRefused(
            f"origin {text[:80]!r} may not change anything here: call from a server, or add its"
            " host to web.allowed_hosts"
        )

    def record(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        key = (route, method, f"{status // 100}xx")
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = (
                metrics.bound(
                    _REQUESTS, "web_requests_total", route=route, method=method, status=key[2]
                ),
                metrics.bound(_SECONDS, "web_request_seconds", route=route),
            )
        bound[0].inc()
        bound[1].observe(seconds)

    def _record(self, method: str, route: str, answer: _Answer, seconds: float) -> None:
        self.record(method, route, answer.status, seconds)
        if answer.status < 500:
            return
        _OFTEN.warning(
            "request_answered_5xx",
            kind=(route, answer.status),
            request_id=answer.request_id,
            method=method,
            route=route,
            status=answer.status,
            seconds=round(seconds, 4),
        )


class _Answer:
    """What is sent back, with the headers that every answer carries."""

    def __init__(self, send: Any, scope: Any, request_id: str) -> None:
        self._send = send
        self._scope = scope
        self.request_id = request_id
        self.status = 0
        self.cors: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, message: Any) -> None:
        if message["type"] in ANSWER_STARTS:
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [pair for pair in SECURITY_HEADERS if pair[0] not in present]
            headers += self.cors
            headers += headers_of_charge(self._scope)
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


def give_slashes_back(connection: Any, _: Any) -> None:
    """Let handlers see the names in the path as they were meant; a guard of Litestar, run before they are read."""
    scope = connection.scope
    if SLASH_IN_NAME in scope["path"]:
        scope["path"] = scope["path"].replace(SLASH_IN_NAME, "/")
        # Litestar keeps the one in the scope for the next request of this path.
        scope["path_params"] = {
            name: value.replace(SLASH_IN_NAME, "/") if isinstance(value, str) else value
            for name, value in scope["path_params"].items()
        }


def _path_with_names_whole(raw_path: bytes) -> str:
    parts = raw_path.decode("latin-1").split("/")
    return "/".join(unquote(part).replace("/", SLASH_IN_NAME) for part in parts)


def _require_single(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse a request without one Host, or with one of ONCE twice. Raises: BadRequest."""
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts != 1:
        raise BadRequest(f"expected one Host header, got {hosts}")
    for name in names:
        if name in ONCE and names.count(name) > 1:
            doubled = name.decode().title()
            raise BadRequest(f"expected one {doubled} header, got several: send it once")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
