"""Who calls, and may they: bearer tokens, looked up once in 5 s, and the scope each route asks for.

A valid token is remembered for CACHED_S, which is how long a revoked one may still work. Unknown tokens
are not remembered: the checksum sorts out typing errors, the rest costs one indexed lookup. Missing,
wrong, expired and revoked are one answer, so that nothing is learned from it (RFC 6750).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from penstock.kernel.clock import Clock, SystemClock
from penstock.web.model import ScopeMissing, TokenRefused
from penstock.web.tokens import Caller, Tokens, hash_of

CACHED_S: Final = 5.0
CACHED_MAX: Final = 10_000


class Callers:
    """Tokens to callers, with a memory of CACHED_S seconds."""

    def __init__(self, tokens: Tokens, clock: Clock | None = None) -> None:
        self._tokens = tokens
        self._clock = clock or SystemClock()
        self._cached: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()

    async def require_caller(self, authorization: str | None) -> Caller:
        """The caller of an Authorization header. Raises: TokenRefused, PostgresDown."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token.isascii():
            raise refused()
        key, now_s = hash_of(token), self._clock.monotonic_s()
        until_s, caller = self._cached.get(key, (0.0, None))
        if caller is not None and now_s < until_s:
            return caller
        caller = await self._tokens.find_caller(token)
        if caller is None:
            self._cached.pop(key, None)
            raise refused()
        # The memory counts from before the lookup, so that a slow lookup does not lengthen it.
        self._cached[key] = (now_s + CACHED_S, caller)
        self._cached.move_to_end(key)
        if len(self._cached) > CACHED_MAX:
            self._cached.popitem(last=False)
        return caller


def refused() -> TokenRefused:
    """The one answer to every request without a valid token."""
    return TokenRefused(
        "this route needs a valid token: send the header `Authorization: Bearer pst_...`;"
        " `penstock tokens create` makes one"
    )


class ScopeGuard:
    """A Litestar guard that asks for the scope in a handler's `opt`; no scope named is no entry."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def __call__(
        self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
    ) -> None:
        scope = scope_of(handler)
        if scope is None:
            return
        caller = await self._callers.require_caller(connection.headers.get("authorization"))
        connection.scope["auth"] = caller
        if not caller.may(scope):
            raise ScopeMissing(
                f"token {caller.name!r} lacks the scope {scope}: use a token that has it, or make one"
                f" with `penstock tokens create NAME --scope {scope}`"
            )


def scope_of(handler: BaseRouteHandler) -> str | None:
    """The scope a handler asks for, None for an open route.

    Raises: AssertionError where it says neither, which is our mistake; `create_api` checks it first.
    """
    if "OPTIONS" in getattr(handler, "http_methods", ()):
        return None  # Litestar's own answer: the methods of the path
    assert "scope" in handler.opt, f"{handler} names no scope: add opt={{'scope': 'room:read'}}"
    scope: str | None = handler.opt["scope"]
    return scope
