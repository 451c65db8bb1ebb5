"""Logins of the console: a random cookie that stands for a token, kept as its SHA-256 in PostgreSQL.

So any API process knows it, and it ends with its token. A one-time link begins a session without showing the token. A session that was found is remembered for CACHED_S; while PostgreSQL
is away for KEPT_WHILE_AWAY_S, so that those who look at what is wrong keep seeing it: nobody can be revoked then either.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.clock import Clock, SystemClock
from headrace.kernel.errors import Unavailable
from headrace.web.auth import refused
from headrace.web.tokens import KEY_PREFIX, Caller, hash_of, is_token

SQL: Final = load_queries("headrace.web")
LINK_LASTS_S: Final = 600.0
CACHED_S: Final = 2.0
CACHED_MAX: Final = 10_000
KEPT_WHILE_AWAY_S: Final = 3_600.0


class Sessions:
    """The verbs on sessions."""

    def __init__(self, postgres: Postgres, clock: Clock | None = None) -> None:
        self._postgres = postgres
        self._clock = clock or SystemClock()
        self._cached: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()

    async def begin(self, token: str, *, lasts_s: float) -> str:
        """The cookie of a new session for whoever holds `token`. Raises: TokenRefused."""
        token = token.strip()
        if not is_token(token) or token.startswith(KEY_PREFIX):
            raise refused()
        cookie = secrets.token_urlsafe(32)
        row = await self._postgres.one(
            SQL.begin_session,
            sha256=_hash(cookie),
            token_sha256=hash_of(token),
            lasts_s=lasts_s,
        )
        if row is None:
            raise refused()
        return cookie

    async def make_link(self, token: str) -> str:
        """The code of a link that begins one session for `token` within LINK_LASTS_S. Raises: TokenRefused."""
        code = secrets.token_urlsafe(32)
        row = await self._postgres.one(
            SQL.make_link, sha256=_hash(code), token_sha256=hash_of(token), lasts_s=LINK_LASTS_S
        )
        if row is None:
            raise refused()
        return code

    async def begin_by_link(self, code: str, *, lasts_s: float) -> str:
        """The cookie of a new session by the code of a link, which ends with it. Raises: TokenRefused."""
        cookie = secrets.token_urlsafe(32)
        row = await self._postgres.one(
            SQL.begin_session_by_link,
            sha256=_hash(cookie),
            link_sha256=_hash(code),
            lasts_s=lasts_s,
        )
        if row is None:
            raise refused()
        return cookie

    async def find(self, cookie: str) -> Caller | None:
        """Whose session this is, None if it has ended. Raises: PostgresDown."""
        key, now_s = _hash(cookie), self._clock.monotonic_s()
        found_s, caller = self._cached.get(key, (float("-inf"), None))
        if caller is not None and now_s - found_s < CACHED_S:
            return caller
        try:
            row = await self._postgres.one(SQL.find_session, sha256=key)
        except Unavailable:
            if caller is None or now_s - found_s > KEPT_WHILE_AWAY_S:
                raise
            return caller
        if row is None:
            self._cached.pop(key, None)
            return None
        caller = Caller(row["id"], row["name"], frozenset(row["scopes"]))
        self._cached[key] = (now_s, caller)
        self._cached.move_to_end(key)
        if len(self._cached) > CACHED_MAX:
            self._cached.popitem(last=False)
        return caller

    async def end(self, cookie: str) -> None:
        """Forget a session; other API processes know it for CACHED_S more at most."""
        self._cached.pop(_hash(cookie), None)
        await self._postgres.run(SQL.end_session, sha256=_hash(cookie))


def _hash(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
