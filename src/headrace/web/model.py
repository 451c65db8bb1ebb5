"""Settings, scopes and errors of the web floor, and what it asks of the house that it serves.

The bounds on heads are those common servers use by default: 8 KiB a field and a target, 32 KiB and 100
fields together.
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
    "media:read": "See objects, nodes, disks and who owns what.",
    "media:write": "Store, purge, warm and sign; change nodes and disks.",
    "views:hit": "Count views.",
    "views:read": "See totals, series and top lists of views.",
    "views:write": "Delete, move and check what was counted.",
    "feed:read": "See feeds, posts, followers, markers.",
    "feed:write": "Post, delete, follow, mute, block, read, rebuild.",
    "metrics:read": "Read the Prometheus series.",
    ALL_SCOPES: "Everything, also what later versions add.",
}
ANY_SCOPE: Final = "any"
"""What a route names that any valid secret token may call."""
PUBLISHABLE_SCOPES: Final = frozenset({"views:hit"})
"""What a key that stands in web pages may carry."""
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HEAD_FIELD_BYTES_MAX: Final = 8 * 1024
HEAD_BYTES_MAX: Final = 32 * 1024
HEAD_FIELDS_MAX: Final = 100
TARGET_BYTES_MAX: Final = 8 * 1024
WHOLE_ANSWER: Final = "headrace.response.whole"
"""An ASGI message with status, headers and body at once; taken where the scope names it as an extension."""

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
        "127.0.0.1:8080", "Where the HTTP API listens; port 0 takes a free one.", parse_listen
    )
    allowed_hosts: tuple[str, ...] = setting(
        "",
        "Host names that requests may name, beside loopback names, IP addresses and `listen`.",
        parse_hosts,
    )
    body_max_bytes: int = setting(
        "16MiB", "Longest request body, unless a route streams.", parse_size_bytes
    )
    connections_max: int = setting(
        "1024",
        "Connections at once; one more closes the longest idle one, or is answered 503 where none is idle.",
        parse_count,
    )
    connections_per_address: int = setting(
        "512",
        "Connections at once from one address (of IPv6 from one /64); raise it to connections_max behind a"
        " proxy.",
        parse_count,
    )
    requests_per_token: int = setting(
        "30000",
        "Requests a second of one secret token to one API process; more are 429.",
        parse_rate,
    )
    requests_per_key: int = setting(
        "2000",
        "Requests a second with one publishable key to one API process, of all its pages together.",
        parse_rate,
    )
    requests_open_per_token: int = setting(
        "512", "Requests of one token that one API process answers at once.", parse_rate
    )
    idempotency_kept_s: float = setting(
        "24h", "How long an Idempotency-Key is known.", parse_duration_s
    )
    audit_kept_s: float = setting("400d", "How long lines of the audit are kept.", parse_duration_s)
    keep_alive_s: float = setting("75s", "How long an idle connection is kept.", parse_duration_s)
    head_timeout_s: float = setting(
        "10s", "Longest time to send the head of a request.", parse_duration_s
    )
    body_stall_s: float = setting(
        "10s", "Longest time in which a body sends less than 4 KiB.", parse_duration_s
    )
    graceful_stop_s: float = setting(
        "5s", "Time for requests under way when the server stops.", parse_duration_s
    )


class Engines(Protocol):
    """The engines of a house; one it has no use for is None."""

    @property
    def postgres(self) -> Any: ...

    @property
    def valkey(self) -> Any: ...

    @property
    def blobs(self) -> Any: ...


class House(Protocol):
    """What the web floor serves: rooms put together by someone above it."""

    @property
    def config(self) -> Loaded: ...

    @property
    def engines(self) -> Engines: ...

    @property
    def metrics_folder(self) -> Path | None: ...

    @property
    def version(self) -> str: ...

    @property
    def secret(self) -> str:
        """The root secret, of which keys are derived."""
        ...

    def services(self) -> dict[str, Any]:
        """Services by the parameter name under which handlers ask for them."""
        ...

    def routes(self) -> list[Any]:
        """The Litestar handlers of all rooms."""
        ...


class IdempotencyUnsupported(InvalidInput):
    """The request carries `Idempotency-Key` and its route keeps none."""

    code = "web.idempotency_unsupported"


class IdempotencyKeyInvalid(InvalidInput):
    """An `Idempotency-Key` that is empty, too long or not printable."""

    code = "web.idempotency_key_invalid"


class IdempotencyMismatch(InvalidInput):
    """An `Idempotency-Key` that was used for another request."""

    code = "web.idempotency_mismatch"


class IdempotencyInFlight(Conflict):
    """A request with the same `Idempotency-Key` is still under way."""

    code, retryable = "web.idempotency_in_flight", True


class TokenRefused(Unauthenticated):
    """No token, or one that is wrong, expired or revoked: always the same answer."""

    code = "web.unauthenticated"


class ScopeMissing(Forbidden):
    """The token is valid and lacks the scope of this route."""

    code = "web.insufficient_scope"


class OriginRefused(Forbidden):
    """A browser page of another origin asks for a change."""

    code = "web.origin_not_allowed"


class HostRefused(Malformed):
    """The Host header is missing, doubled, or names a host that is not ours."""

    code, status = "web.host_not_allowed", 421


class BadRequest(Malformed):
    """The bytes are no HTTP request, or a doubtful one."""

    code = "web.bad_request"


class BodyMalformed(Malformed):
    """The body is no JSON document."""

    code = "web.malformed_json"


class BodyInvalid(InvalidInput):
    """The body or a parameter means nothing valid; `errors` of the answer lists the faults."""

    code = "web.invalid_input"


class ParameterRepeated(Malformed):
    """A query parameter is given several times and the route takes one value."""

    code = "web.parameter_repeated"


class BodyTooLarge(TooLarge):
    """The request body is over its bound."""

    code = "web.body_too_large"


class HeadTooLarge(TooLarge):
    """A header field, or all of them together, is over the bound."""

    code, status = "web.head_too_large", 431


class TargetTooLong(TooLarge):
    """The request target is over the bound."""

    code, status = "web.target_too_long", 414


class RequestTooSlow(Malformed):
    """The request did not arrive in time."""

    code, status, retryable = "web.request_too_slow", 408, True


class RouteUnknown(NotFound):
    """No route has this path."""

    code = "web.not_found"


class MethodRefused(Malformed):
    """The route exists and has no such method."""

    code, status = "web.method_not_allowed", 405

    def __init__(self, allow: str) -> None:
        super().__init__(f"this route has no such method: it takes {allow}")
        self.allow = allow


class MediaTypeRefused(Malformed):
    """The body has a media type or an encoding that is not taken."""

    code, status = "web.unsupported_media_type", 415


class Overloaded(Unavailable):
    """As many connections as allowed are in use, in all or from one address."""

    code = "web.overloaded"


class RateLimited(LimitExceeded):
    """A token sends more requests a second than one API process takes from it."""

    code = "web.rate_limited"


class TooManyRequestsOpen(LimitExceeded):
    """A token has as many requests under way at one API process as it may."""

    code = "web.too_many_requests_open"


class Stopping(Unavailable):
    """The server stops; a request outlived the time it leaves."""

    code = "web.stopping"


class AddressInUse(Conflict):
    """Another program listens where the API should."""

    code = "web.address_in_use"


class AddressRefused(InvalidInput):
    """The machine does not let us listen at the address of `web.listen`."""

    code = "web.address_refused"


class TokenNameTaken(Conflict):
    """A valid token has this name."""

    code = "web.token_name_taken"


class TokenUnknown(NotFound):
    """No valid token has this name."""

    code = "web.token_unknown"


class ScopeUnknown(InvalidInput):
    """A scope that no route asks for."""

    code = "web.scope_unknown"


class ScopeNotPublishable(InvalidInput):
    """A key for web pages is to carry a scope that is not for everybody."""

    code = "web.scope_not_publishable"
