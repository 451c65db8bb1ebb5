"""What holds for every request, before any route is looked at, as one plain ASGI layer.

It names the request, carries the trace (W3C), asks whether the Host is ours (a browser page can make its
own name point at a loopback address; only the Host header tells) and whether a change comes from a page
of another origin, adds the security headers, and counts. Successful requests are counted, not logged.

Pages of any origin may call with a publishable key in the address (`?k=psk_...`): there is nothing ambient, such as a
cookie, that a foreign page could abuse. Only routes for pages take such a key; they are told so by CORS headers.

A name in a path may hold `/`, written `%2F`: it travels through the routing as a character that no path can hold.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from penstock.kernel import metrics
from penstock.kernel.errors import PenstockError
from penstock.kernel.ids import new_request_id
from penstock.kernel.logs import logger
from penstock.kernel.trace import current_traceparent, next_hop
from penstock.web.model import (
    LOOPBACK_NAMES,
    WHOLE_ANSWER,
    BadRequest,
    HostRefused,
    OriginRefused,
    Stopping,
    WebConfig,
    current_request_id,
)
from penstock.web.problems import MEDIA_TYPE, as_ours, headers_of, problem_of

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS: Final = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
UNMATCHED: Final = "unmatched"
ONCE: Final = frozenset({b"authorization", b"content-type", b"idempotency-key"})
"""Headers of which two could be read in two ways."""
HOSTS_KEPT_MAX: Final = 100
FAILURE_LINE_EVERY_S: Final = 1.0
"""A route's failures of one status have a line so often; `web_requests_total` counts them all."""
SLASH_IN_NAME: Final = "\udc2f"
KEY_MARK: Final = b"k=psk_"
ANSWER_STARTS: Final = frozenset({"http.response.start", WHOLE_ANSWER})
CORS_HEADERS: Final = (
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"content-type"),
    (b"access-control-max-age", b"86400"),
)
REFUSALS: Final = frozenset({401, 403})
"""A page that gave a key, or what it took for one, may read why that was refused."""
SECURITY_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_LOG: Final = logger(__name__)
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

    def __init__(self, app: Any, config: WebConfig, routes: set[str]) -> None:
        self._app = app
        self._hosts = LOOPBACK_NAMES | {config.listen[0].lower(), *config.allowed_hosts}
        self._origins = frozenset(config.allowed_hosts)
        self._seen_hosts: set[bytes] = set()
        self._failures = FailureLog()
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
        answer = _Answer(send, new_request_id())
        headers: dict[bytes, bytes] = dict(scope["headers"])
        answer.is_to_page = b"origin" in headers and b"k=" in scope["query_string"]
        current_request_id.set(answer.request_id)
        current_traceparent.set(next_hop(_text(headers.get(b"traceparent"))))
        try:
            if self._check(scope, headers, doubled=len(headers) != len(scope["headers"])):
                answer.more = CORS_HEADERS
            await self._app(inner, receive, answer.send)
        except PenstockError as refusal:
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
            route = inner.get("path_template") or UNMATCHED
            self._record(scope["method"], route, answer, time.perf_counter() - started_s)

    def _check(self, scope: Any, headers: dict[bytes, bytes], *, doubled: bool) -> bool:
        """Refuse what is doubtful; returns whether a page calls with a publishable key."""
        if doubled or b"host" not in headers:
            _require_single(scope["headers"])
        raw_host = headers[b"host"]
        if raw_host not in self._seen_hosts:
            self._check_host(raw_host)
        origin = headers.get(b"origin")
        if origin is None:
            return False
        if KEY_MARK in scope["query_string"] and b"authorization" not in headers:
            return True
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(origin.decode("latin-1"), raw_host.decode("latin-1").lower())
        return False

    def _check_host(self, raw_host: bytes) -> None:
        name = host_name(raw_host.decode("latin-1").lower())
        if name not in self._hosts and not _is_address(name):
            raise HostRefused(
                f"host {name[:80]!r} is not served here: use one that is, or add it to"
                " web.allowed_hosts (PENSTOCK_WEB_ALLOWED_HOSTS)"
            )
        if len(self._seen_hosts) < HOSTS_KEPT_MAX:
            self._seen_hosts.add(raw_host)

    def _check_origin(self, origin: str, host: str) -> None:
        _, _, place = origin.lower().partition("://")
        if place != host and host_name(place) not in self._origins:
            raise OriginRefused(
                f"origin {origin[:80]!r} may not change anything here: call from a server, or add its"
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
        alike = self._failures.next_line(route, answer.status)
        if alike is not None:
            _LOG.warning(
                "request_answered_5xx",
                request_id=answer.request_id,
                method=method,
                route=route,
                status=answer.status,
                seconds=round(seconds, 4),
                alike_before=alike,
            )


class FailureLog:
    """Which failures get a line: with an engine away every request is one, and thousands come in a second."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def next_line(self, route: str, status: int) -> int | None:
        """None: no line now. Else how many failures of this route and status had none since the last."""
        now_s = time.monotonic()
        logged_s, left_out = self._seen.get((route, status), (float("-inf"), 0))
        if now_s - logged_s < FAILURE_LINE_EVERY_S:
            self._seen[route, status] = (logged_s, left_out + 1)
            return None
        self._seen[route, status] = (now_s, 0)
        return left_out


class _Answer:
    """What is sent back, with the headers that every answer carries."""

    def __init__(self, send: Any, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.is_to_page = False
        self.more: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, message: Any) -> None:
        if message["type"] in ANSWER_STARTS:
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            headers += [pair for pair in SECURITY_HEADERS if pair[0] not in present]
            headers += self.more
            if self.is_to_page and self.status in REFUSALS and not self.more:
                headers += CORS_HEADERS
            headers.append((b"x-request-id", self.request_id.encode()))
            headers.append((b"traceparent", (current_traceparent.get() or "").encode()))
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, error: PenstockError) -> None:
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


def host_name(host: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    """Whether `name` is an IP address, which no one can make point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
