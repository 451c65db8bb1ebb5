"""Console sessions, one-time sign-in links, and the audit log of the console."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from datetime import datetime
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.clock import Clock, SystemClock
from headrace.kernel.errors import Unavailable
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.web.tokens import KEY_PREFIX, Caller, hash_of, is_token, refused

SQL: Final = load_queries("headrace.web")
LINK_LASTS_S: Final = 600.0
CACHED_S: Final = 2.0
CACHED_MAX: Final = 10_000
KEPT_WHILE_AWAY_S: Final = 3_600.0


class Sessions:
    """Console sessions. A cookie belongs to a token and is stored as its SHA-256.

    Every API process accepts the cookie, and a session ends with its token. A session is cached for
    CACHED_S. While PostgreSQL is down a cached session stays valid for KEPT_WHILE_AWAY_S, so that
    an operator can still read the console.
    """

    def __init__(self, postgres: Postgres, clock: Clock | None = None) -> None:
        self._postgres = postgres
        self._clock = clock or SystemClock()
        self._cached: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()

    async def begin(self, token: str, *, lasts_s: float) -> str:
        """Start a session for `token` and return its cookie. Raises: TokenRefused."""
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
        """Create a one-time sign-in link for `token`, valid for LINK_LASTS_S; return its code.

        Raises: TokenRefused.
        """
        code = secrets.token_urlsafe(32)
        row = await self._postgres.one(
            SQL.make_link, sha256=_hash(code), token_sha256=hash_of(token), lasts_s=LINK_LASTS_S
        )
        if row is None:
            raise refused()
        return code

    async def begin_by_link(self, code: str, *, lasts_s: float) -> str:
        """Use up a link, start a session and return its cookie. Raises: TokenRefused."""
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
        """The caller of a session, or None if it has ended. Raises: PostgresDown."""
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
        """End a session; other API processes accept it for up to CACHED_S."""
        self._cached.pop(_hash(cookie), None)
        await self._postgres.run(SQL.end_session, sha256=_hash(cookie))


def _hash(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()


COMMAND_CHARACTERS_MAX: Final = 4_000
DETAIL_CHARACTERS_MAX: Final = 2_000


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of an action; `begun` means it is running or its process died."""

    id: int
    at: datetime
    actor: str
    """The name of a token, or `local`."""
    address: str
    """The address of the client."""
    action: str
    command: str
    outcome: str
    detail: str | None


class Audit:
    """The audit log of the console.

    A line is inserted before its action, so that no action lacks one, and gets the outcome
    afterwards. It stores the action as the equivalent command line; secrets are never fields of an
    action. Each insert deletes a few lines older than `kept_s`.
    """

    def __init__(self, postgres: Postgres, *, kept_s: float) -> None:
        self._postgres = postgres
        self._kept_s = kept_s

    async def begin(self, *, actor: str, address: str, action: str, command: str) -> int:
        """Insert the line of an action that is about to run; return its id."""
        line_id: int = await self._postgres.value(
            SQL.begin_audit,
            actor=actor,
            address=address,
            action=action,
            kept_s=self._kept_s,
            command=_storable(command, COMMAND_CHARACTERS_MAX),
        )
        return line_id

    async def end(self, line_id: int, outcome: str, detail: str) -> None:
        """Store the outcome of an action: `done`, `refused` or `failed`."""
        await self._postgres.run(
            SQL.end_audit,
            id=line_id,
            outcome=outcome,
            detail=_storable(detail, DETAIL_CHARACTERS_MAX),
        )

    async def lines(self, *, before: int | None = None, lines_max: int = 100) -> list[AuditLine]:
        """One page of lines, newest first, with ids below `before`."""
        if before is not None:
            before = max(0, min(before, 2**63 - 1))
        rows = await self._postgres.all(
            SQL.list_audit, before=before, rows_max=min(lines_max, PAGE_ROWS_MAX)
        )
        return [AuditLine(**row) for row in rows]


def _storable(text: str, most: int) -> str:
    return text.replace("\0", "")[:most]
