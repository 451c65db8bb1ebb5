"""Authentication by bearer token, and the scope that each route requires.

A valid token is cached for CACHED_S, which bounds how long a revoked token still works. Unknown
tokens are not cached: the checksum rejects typing errors, and the rest costs one indexed lookup. A
missing, wrong, expired or revoked token gets the same response, which reveals nothing (RFC 6750).

While PostgreSQL is down no token can be looked up or revoked. A cached caller then stays valid for
KEPT_WHILE_AWAY_S, with a lookup in the background, so that views are still counted.

Routes marked FOR_PAGES also accept the publishable key of a web page in the address: `?k=hrk_...`.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from headrace.kernel.clock import Clock, SystemClock
from headrace.kernel.errors import Unavailable
from headrace.web.limits import Quotas
from headrace.web.model import ANY_SCOPE, ScopeMissing, TokenRefused
from headrace.web.tokens import KEY_PREFIX, Caller, Tokens, hash_of, refused

CACHED_S: Final = 5.0
CACHED_MAX: Final = 10_000
KEPT_WHILE_AWAY_S: Final = 86_400.0
ANSWER_S: Final = 1.0
"""Longest wait for PostgreSQL before a cached caller is used."""
FOR_PAGES: Final = "for_pages"
"""Key in a handler's `opt`: web pages of any origin may call it with a publishable key."""
KEY_IN_QUERY: Final = re.compile(rb"(?:^|&)k=(hrk_[0-9A-Za-z]{49})(?=&|$)")


class Callers:
    """Looks up the callers of tokens, with a cache of CACHED_S seconds."""

    def __init__(self, tokens: Tokens, clock: Clock | None = None) -> None:
        self._tokens = tokens
        self._clock = clock or SystemClock()
        self._cached: OrderedDict[bytes, _Known] = OrderedDict()
        self._keys: dict[str, bytes] = {}
        """Keys of `_cached` by Authorization header, for `known_caller`.

        A lookup takes no time that depends on how much of a guess is right: texts are compared only
        if their 64-bit hashes are equal, and the hash has a secret of this process (SipHash).
        """
        self._is_away = False
        self._refresh: asyncio.Task[None] | None = None

    def known_caller(self, authorization: str | None) -> Caller | None:
        """The caller of a header that was looked up within CACHED_S; it is not hashed again."""
        known = self._cached.get(self._keys.get(authorization or "", b""))
        if known is None or self._clock.monotonic_s() - known.checked_s >= CACHED_S:
            return None
        return known.caller

    async def require_caller(self, authorization: str | None) -> Caller:
        """The caller of an Authorization header. Raises: TokenRefused, PostgresDown."""
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token.isascii():
            raise refused()
        if token.startswith(KEY_PREFIX):
            raise TokenRefused(
                "a publishable key is valid only in the address (`?k=hrk_...`) of routes for pages:"
                " a server sends a secret token, `Authorization: Bearer hrt_...`"
            )
        caller = await self._find(token)
        if authorization == f"Bearer {token}":
            # Other spellings of a valid token are not kept, because their number is not limited.
            if len(self._keys) >= CACHED_MAX:
                self._keys.clear()
            self._keys[authorization] = hash_of(token)
        return caller

    async def require_page_caller(self, authorization: str | None, query_string: bytes) -> Caller:
        """The caller of a route for pages, by the header or by the key in the address.

        Raises: TokenRefused, PostgresDown.
        """
        keys = KEY_IN_QUERY.findall(query_string) if authorization is None else []
        if len(keys) != 1:
            return await self.require_caller(authorization)
        return await self.require_key(keys[0].decode())

    async def require_key(self, key: str) -> Caller:
        """The caller of a publishable key. Raises: TokenRefused, PostgresDown."""
        return await self._find(key)

    async def _find(self, token: str) -> Caller:
        key, now_s = hash_of(token), self._clock.monotonic_s()
        known = self._cached.get(key)
        if known is None:
            return await self._look_up(token, key)
        if now_s - known.checked_s < CACHED_S:
            return known.caller
        if now_s - known.checked_s > KEPT_WHILE_AWAY_S:
            return await self._look_up(token, key)
        if self._is_away:
            if self._refresh is None or self._refresh.done():
                self._refresh = asyncio.create_task(self._refresh_caller(token, key))
            return known.caller
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._look_up(token, key)
        except (Unavailable, TimeoutError):
            self._is_away = True
            return known.caller

    async def _look_up(self, token: str, key: bytes) -> Caller:
        # The cache time starts before the lookup, so that a slow lookup does not extend it.
        now_s = self._clock.monotonic_s()
        caller = await self._tokens.find_caller(token)
        self._is_away = False
        if caller is None:
            self._cached.pop(key, None)
            raise refused()
        self._cached[key] = _Known(now_s, caller)
        self._cached.move_to_end(key)
        if len(self._cached) > CACHED_MAX:
            self._cached.popitem(last=False)
        return caller

    async def _refresh_caller(self, token: str, key: bytes) -> None:
        with suppress(Unavailable, TokenRefused):
            await self._look_up(token, key)


@dataclass(frozen=True, slots=True)
class _Known:
    """A caller that was valid at `checked_s`."""

    checked_s: float
    caller: Caller


class ScopeGuard:
    """A Litestar guard: requires the scope in a handler's `opt` and charges the caller's quota.

    A handler without a scope is refused to everyone.
    """

    def __init__(self, callers: Callers, quotas: Quotas) -> None:
        self._callers, self._quotas = callers, quotas

    async def __call__(
        self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
    ) -> None:
        scope = scope_of(handler)
        if scope is None:
            return
        authorization = connection.headers.get("authorization")
        if handler.opt.get(FOR_PAGES):
            query_string = connection.scope["query_string"]
            caller = await self._callers.require_page_caller(authorization, query_string)
        else:
            caller = await self._callers.require_caller(authorization)
        connection.scope["auth"] = caller
        require_scope(caller, scope)
        self._quotas.charge(caller, connection.scope)


def require_scope(caller: Caller, scope: str) -> None:
    """Refuse a caller without `scope`. Raises: ScopeMissing."""
    if scope != ANY_SCOPE and not caller.may(scope):
        raise ScopeMissing(
            f"token {caller.name!r} lacks the scope {scope}: use a token that has it, or create one"
            f" with `headrace tokens create NAME --scope {scope}`"
        )


def scope_of(handler: BaseRouteHandler) -> str | None:
    """The scope that a handler requires, or None for an open route.

    Raises: AssertionError for a handler without a scope; `create_api` checks all of them.
    """
    if "OPTIONS" in getattr(handler, "http_methods", ()):
        return None  # Litestar's own handler
    assert "scope" in handler.opt, f"{handler} names no scope: add opt={{'scope': 'room:read'}}"
    scope: str | None = handler.opt["scope"]
    return scope
