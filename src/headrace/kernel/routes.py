"""What the rooms' HTTP routes and the web server agree on: limits, idempotency and fast paths.

A room's `http` module uses these types, and the web server implements them. Neither imports the
other. Some of them are keys in the `opt` of a Litestar handler:

    @post("/v1/things", opt={"items_max": ItemsMax(100, too_many)})
    @get("/v1/things/{name:str}", opt={FAST_PATH: read_fast})
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from headrace.kernel.errors import HeadraceError

PAYLOAD_BYTES_MAX: Final = 64 * 1024
"""Largest payload of a job; store larger data as an object and enqueue its key."""
PAGE_ROWS_MAX: Final = 1000
"""Most rows in one page of any listing."""
ENDLESS: Final = "headrace.endless"
"""Key in an ASGI scope: the response has no end.

A stopping server closes these connections at once instead of waiting for their requests.
"""
RESPONSE_FIELDS: Final = "headrace.response_fields"
"""Key in an ASGI scope: header fields, as pairs of bytes, of the response and of any error."""
OPTIONS_FIELDS: Final = "options_fields"
"""Key in a handler's `opt`: a function of the services by name that returns header fields, as pairs
of bytes, of the answer to OPTIONS."""
ANY_QUERY: Final = "any_query"
"""Key in a handler's `opt`: unknown query parameters are ignored, as on a page for people, whose
links gain parameters of programs that pass them on."""
OTHER_TYPES: Final = "other_types"
"""Key in a handler's `opt`: media types besides the declared one that its response may have."""
FAST_PATH: Final = "fast_path"
"""Key in a handler's `opt`, with a `FastPath` as its value."""
Response = TypeVar("Response")
Effect: TypeAlias = Callable[[Any], Awaitable[Response]]
"""Performs a request's effect in the given transaction, or its own for None; returns the body."""


def routes_in(*namespaces: Mapping[str, Any]) -> list[Any]:
    """The Litestar handlers that modules define, in order; pass `globals()` or `vars(module)`."""
    return [
        value
        for namespace in namespaces
        for value in namespace.values()
        if hasattr(value, "http_methods") and not isinstance(value, type)
    ]


class ItemsMax(NamedTuple):
    """The most items that a route accepts in one JSON array; `items_max` in a handler's `opt`."""

    most: int
    refuse: Callable[[int], HeadraceError]
    """Return the room's error for a list of at least this many items."""


class Idempotency:
    """Runs the effect of a request at most once per Idempotency-Key.

    The web server reads the request's key and stores responses. The room's service accepts a
    transaction. This value joins both.
    """

    def __init__(self, run: Callable[[Effect[Any], bytes], Awaitable[Any]]) -> None:
        self._run = run

    async def run(self, effect: Effect[Response], *, body_digest: bytes = b"") -> Response:
        """Run `effect` and store its response in the same transaction.

        `body_digest` is the digest of a body that the handler read as a stream.
        """
        response: Response = await self._run(effect, body_digest)
        return response


class FastRequest(msgspec.Struct, frozen=True, gc=False):
    """A request without a body, escaped characters or repeated parameters."""

    name: str
    """The value of the path's only parameter, or the empty string for a path without one."""
    query: Mapping[str, str]
    user_agent: str | None
    if_none_match: str | None
    is_from_page: bool
    """Whether the caller used a publishable key."""


class FastResponse(msgspec.Struct, frozen=True, gc=False):
    """A JSON response."""

    body: bytes
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


FastPath: TypeAlias = Callable[[Any, FastRequest], Awaitable[FastResponse | None]]
"""Answers a request from the room's service before Litestar routes it.

None leaves the request to the handler and must have had no effect. Handler and fast path return
the same response. The fast path of a GET has no side effects, because a failure is retried
through the handler.
"""
