"""Settings, scopes and errors of the web server, and the protocol of the application it serves.

The limits of heads are defaults of common servers: 8 KiB per field and target, 32 KiB and 100
fields in total.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from headrace.kernel.config import (
    Loaded,
    parse_count,
    parse_count_between,
    parse_duration_s,
    parse_listen,
    parse_size_bytes,
    setting,
)
from headrace.kernel.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    LimitExceeded,
    Malformed,
    NotFound,
    TooLarge,
    Unauthenticated,
    Unavailable,
)

ALL_SCOPES: Final = "*"
SCOPES: Final[dict[str, str]] = {
    "jobs:read": "See jobs, queues and lanes.",
    "jobs:write": "Enqueue and cancel jobs; pause queues; set lanes.",
    "fetch:read": "See customers, catalogues, listings and photos.",
    "fetch:write": "Set customers and feeds; upload catalogues.",
    "media:read": "See objects, nodes, disks and owners.",
    "media:write": "Store, purge, warm and sign; change nodes and disks.",
    "views:hit": "Count views.",
    "views:read": "See totals, series and top lists of views.",
    "views:write": "Delete, move and check counts.",
    "feed:read": "See feeds, posts, followers, markers.",
    "feed:write": "Post, delete, follow, mute, block, read, rebuild.",
    "metrics:read": "Read the Prometheus series.",
    ALL_SCOPES: "Everything, including scopes of later versions.",
}
ANY_SCOPE: Final = "any"
"""The scope of a route that any valid secret token may call."""
PUBLISHABLE_SCOPES: Final = frozenset({"views:hit"})
"""The scopes that a publishable key may carry."""
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HEAD_FIELD_BYTES_MAX: Final = 8 * 1024
HEAD_BYTES_MAX: Final = 32 * 1024
HEAD_FIELDS_MAX: Final = 100
TARGET_BYTES_MAX: Final = 8 * 1024
PROCESSES_MAX: Final = 256

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)


def parse_hosts(text: str) -> tuple[str, ...]:
    """Host names of `api.example.com, admin.example.com`. Raises: ValueError."""
    hosts = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    if not all(re.fullmatch(r"[a-z0-9._-]{1,253}", host) for host in hosts):
        raise ValueError("host names without ports, such as api.example.com, separated by commas")
    return hosts


def parse_rate(text: str) -> int:
    """A whole number from 1. Raises: ValueError."""
    count = parse_count(text)
    if not count:
        raise ValueError("a whole number from 1 such as 1000")
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """Section `web`."""

    listen: tuple[str, int] = setting(
        "127.0.0.1:8080", "Where the HTTP API listens; port 0 selects a free port.", parse_listen
    )
    processes: int = setting(
        "1",
        "Processes of the API that share the port, 1 to 256; the limits below hold for each.",
        parse_count_between(1, PROCESSES_MAX),
    )
    allowed_hosts: tuple[str, ...] = setting(
        "",
        "Accepted Host names, in addition to loopback names, IP addresses and `listen`.",
        parse_hosts,
    )
    body_max_bytes: int = setting(
        "16MiB", "Longest request body, unless a route streams.", parse_size_bytes
    )
    connections_max: int = setting(
        "1024",
        "Open connections of a process; one more closes the longest idle one, or gets 503 if none"
        " is idle.",
        parse_count,
    )
    connections_per_address: int = setting(
        "512",
        "Open connections of a process from one address (IPv6: one /64); behind a proxy raise it"
        " to connections_max.",
        parse_count,
    )
    requests_per_token: int = setting(
        "30000",
        "Requests per second of one secret token to one API process; more get 429.",
        parse_rate,
    )
    requests_per_key: int = setting(
        "2000",
        "Requests per second with one publishable key to one API process, all pages together.",
        parse_rate,
    )
    requests_open_per_token: int = setting(
        "512", "Open requests of one token at one API process.", parse_rate
    )
    idempotency_kept_s: float = setting(
        "24h", "How long an Idempotency-Key and its response are stored.", parse_duration_s
    )
    audit_kept_s: float = setting(
        "400d", "How long lines of the audit log are stored.", parse_duration_s
    )
    keep_alive_s: float = setting(
        "75s", "How long an idle connection stays open.", parse_duration_s
    )
    head_timeout_s: float = setting(
        "10s", "Longest time to send the head of a request.", parse_duration_s
    )
    body_stall_s: float = setting("10s", "Longest time to send 4 KiB of a body.", parse_duration_s)
    graceful_stop_s: float = setting(
        "5s", "Time for open requests to finish when the server stops.", parse_duration_s
    )


class Engines(Protocol):
    """The engines of an application; None for an unused engine."""

    @property
    def postgres(self) -> Any: ...

    @property
    def valkey(self) -> Any: ...

    @property
    def blobs(self) -> Any: ...


class Application(Protocol):
    """The application that the web server serves: its settings, engines, services and routes."""

    @property
    def config(self) -> Loaded: ...

    @property
    def engines(self) -> Engines: ...

    @property
    def data_folder(self) -> Path: ...

    @property
    def metrics_folder(self) -> Path | None: ...

    @property
    def version(self) -> str: ...

    @property
    def secret(self) -> str:
        """The root secret that keys are derived from."""
        ...

    def services(self) -> dict[str, Any]:
        """Services by the parameter name of the handlers."""
        ...

    def routes(self) -> list[Any]:
        """The Litestar handlers of all rooms."""
        ...


class IdempotencyUnsupported(InvalidInput):
    """The route does not support `Idempotency-Key`."""

    code = "web.idempotency_unsupported"


class IdempotencyKeyInvalid(InvalidInput):
    """The `Idempotency-Key` is empty, too long or not printable."""

    code = "web.idempotency_key_invalid"


class IdempotencyMismatch(InvalidInput):
    """The `Idempotency-Key` was used for another request."""

    code = "web.idempotency_mismatch"


class IdempotencyInFlight(Conflict):
    """A request with the same `Idempotency-Key` is in progress."""

    code, retryable = "web.idempotency_in_flight", True


class TokenRefused(Unauthenticated):
    """The token is missing, wrong, expired or revoked; the response is the same."""

    code = "web.unauthenticated"


class ScopeMissing(Forbidden):
    """The token is valid but lacks the scope of this route."""

    code = "web.insufficient_scope"


class OriginRefused(Forbidden):
    """A browser page of another origin requests a change."""

    code = "web.origin_not_allowed"


class HostRefused(Malformed):
    """The Host header is missing, repeated or names an unknown host."""

    code, status = "web.host_not_allowed", 421


class BadRequest(Malformed):
    """The bytes are not an HTTP request, or an ambiguous one."""

    code = "web.bad_request"


class BodyMalformed(Malformed):
    """The body is not a JSON document."""

    code = "web.malformed_json"


class BodyInvalid(InvalidInput):
    """The body or a parameter is not valid; `errors` of the response lists the faults."""

    code = "web.invalid_input"


class ParameterRepeated(Malformed):
    """A query parameter is repeated and the route accepts one value."""

    code = "web.parameter_repeated"


class BodyTooLarge(TooLarge):
    """The request body is over its size limit."""

    code = "web.body_too_large"


class HeadTooLarge(TooLarge):
    """A header field, or all of them together, is over the size limit."""

    code, status = "web.head_too_large", 431


class TargetTooLong(TooLarge):
    """The request target is over the size limit."""

    code, status = "web.target_too_long", 414


class RequestTooSlow(Malformed):
    """The request did not arrive in time."""

    code, status, retryable = "web.request_too_slow", 408, True


class RouteUnknown(NotFound):
    """No route has this path."""

    code = "web.not_found"


class MethodRefused(Malformed):
    """The route does not support this method."""

    code, status = "web.method_not_allowed", 405

    def __init__(self, allow: str, instead: str = "") -> None:
        """`allow`: the methods of this path; `instead`: advice about another route."""
        super().__init__(f"this path does not support the method: it supports {allow}{instead}")
        self.allow = allow


class MediaTypeRefused(Malformed):
    """The media type or encoding of the body is not supported."""

    code, status = "web.unsupported_media_type", 415


class Overloaded(Unavailable):
    """The maximum of connections is in use, in total or from one address."""

    code = "web.overloaded"


class RateLimited(LimitExceeded):
    """The token is over its rate limit at one API process."""

    code = "web.rate_limited"


class TooManyRequestsOpen(LimitExceeded):
    """The token has its maximum of open requests at one API process."""

    code = "web.too_many_requests_open"


class Stopping(Unavailable):
    """The server stops and the request did not finish in time."""

    code = "web.stopping"


class AddressInUse(Conflict):
    """Another program uses an address where a role listens, such as `web.listen`."""

    code = "web.address_in_use"


class AddressRefused(InvalidInput):
    """The machine does not permit listening at the address of `web.listen`."""

    code = "web.address_refused"


class TokenNameTaken(Conflict):
    """A valid token has this name."""

    code = "web.token_name_taken"


class TokenUnknown(NotFound):
    """No valid token has this name."""

    code = "web.token_unknown"


class ScopeUnknown(InvalidInput):
    """The scope does not exist."""

    code = "web.scope_unknown"


class ScopeNotPublishable(InvalidInput):
    """A publishable key would carry a scope that is not public."""

    code = "web.scope_not_publishable"
