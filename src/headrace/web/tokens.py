"""API tokens: shown once on creation, stored as their SHA-256.

A token is `hrt_`, 43 characters of 256 random bits, and 6 characters of their CRC-32, all base 62.
A double click selects it, secret scanners find its prefix, and the checksum rejects a truncated
paste without a query. The hash is looked up by equality in an index; a timing difference there
reveals hashes, never tokens.

A publishable key has the prefix `hrk_`. Web pages contain it, so it carries only PUBLISHABLE_SCOPES
and is the only kind of token that is accepted in an address (`?k=`), which logs store.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from headrace.engines.postgres import Postgres, from_row
from headrace.engines.postgres_errors import ConstraintViolated
from headrace.engines.sql import load_queries
from headrace.kernel.ids import require_id
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.signing import read_or_create
from headrace.web.model import (
    ALL_SCOPES,
    PUBLISHABLE_SCOPES,
    SCOPES,
    ScopeNotPublishable,
    ScopeUnknown,
    TokenNameTaken,
    TokenRefused,
    TokenUnknown,
)

SQL: Final = load_queries("headrace.web")
PREFIX: Final = "hrt_"
KEY_PREFIX: Final = "hrk_"
ROOT_NAME: Final = "root"
TokenState: TypeAlias = Literal["valid", "revoked", "expired", "unknown", "no token"]
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHAPE: Final = re.compile(r"hr[tk]_([0-9A-Za-z]{43})([0-9A-Za-z]{6})")


class Token(msgspec.Struct, frozen=True):
    """A stored token, without its text."""

    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


@dataclass(frozen=True, slots=True, repr=False)
class NewToken:
    """A new token; `text` cannot be read again."""

    text: str
    token: Token


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller: the token's name and scopes."""

    token_id: int
    name: str
    scopes: frozenset[str]
    is_publishable: bool = False
    """Whether the token is a publishable key, which web pages contain."""

    def may(self, scope: str) -> bool:
        """Whether the token carries `scope`."""
        return scope in self.scopes or ALL_SCOPES in self.scopes


def make_token(prefix: str = PREFIX) -> str:
    """A new random token, or a publishable key."""
    body = _base62(int.from_bytes(secrets.token_bytes(32)), 43)
    return prefix + body + _checksum(body)


def is_token(text: str) -> bool:
    """Whether `text` has the shape and the checksum of a token."""
    match = _SHAPE.fullmatch(text)
    return match is not None and _checksum(match[1]) == match[2]


def hash_of(token: str) -> bytes:
    """The SHA-256 of a token."""
    return hashlib.sha256(token.encode()).digest()


def refused() -> TokenRefused:
    """The same error for every request without a valid token."""
    return TokenRefused(
        "this route needs a valid token: send the header `Authorization: Bearer hrt_...`;"
        " `headrace tokens create` makes one"
    )


class Tokens:
    """Creates, lists, revokes and looks up tokens."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def create(
        self,
        name: str,
        scopes: tuple[str, ...],
        *,
        expires_s: float | None = None,
        publishable: bool = False,
    ) -> NewToken:
        """Create and store a token, or a publishable key.

        Raises: InvalidId, ScopeUnknown, ScopeNotPublishable, TokenNameTaken.
        """
        require_id("token name", name)
        chosen = _require_scopes(scopes)
        if publishable:
            _require_publishable(chosen)
        text = make_token(KEY_PREFIX if publishable else PREFIX)
        try:
            row = await self._postgres.one(
                SQL.insert_token,
                name=name,
                sha256=hash_of(text),
                scopes=chosen,
                expires_s=expires_s,
            )
        except ConstraintViolated as error:
            raise TokenNameTaken(
                f"token {name!r} exists: choose another name, or run"
                f" `headrace tokens revoke {name}` first"
            ) from error
        return NewToken(text, from_row(Token, row))

    async def list(self) -> list[Token]:
        """One page of tokens, newest first, including revoked tokens."""
        rows = await self._postgres.all(SQL.list_tokens, rows_max=PAGE_ROWS_MAX)
        return [from_row(Token, row) for row in rows]

    async def revoke(self, name: str) -> Token:
        """Revoke the valid token of `name`; every API process refuses it within 5 s.

        Raises: TokenUnknown.
        """
        row = await self._postgres.one(SQL.revoke_token, name=name)
        if row is None:
            raise TokenUnknown(
                f"no valid token {name!r}: `headrace tokens ls` shows names and states"
            )
        return from_row(Token, row)

    async def find_caller(self, token: str) -> Caller | None:
        """The caller of a token, or None if it is not valid."""
        if not is_token(token):
            return None
        row = await self._postgres.one(SQL.find_caller, sha256=hash_of(token))
        if row is None:
            return None
        is_publishable = token.startswith(KEY_PREFIX)
        return Caller(row["id"], row["name"], frozenset(row["scopes"]), is_publishable)

    async def state_of(self, token: str) -> TokenState:
        """The state of a token."""
        if not is_token(token):
            return "no token"
        state: TokenState | None
        state = await self._postgres.value(SQL.token_state, sha256=hash_of(token))
        return state or "unknown"

    async def keep_root(self, token: str) -> TokenState:
        """Store `token` with all scopes unless it is stored; a revoked token stays revoked.

        Other tokens stay as they are: several data folders may share one PostgreSQL.
        """
        if is_token(token):
            await self._postgres.run(
                SQL.insert_token_once,
                name=root_name(token),
                sha256=hash_of(token),
                scopes=[ALL_SCOPES],
            )
        return await self.state_of(token)


@dataclass(frozen=True, slots=True)
class RootToken:
    """The file of a data folder's root token, and the state of that token."""

    file: Path
    state: TokenState


def root_name(token: str) -> str:
    """The name of a root token, derived from its hash: `root-1f2e3d4c`."""
    return f"{ROOT_NAME}-{hash_of(token).hex()[:8]}"


def dead_token(token: RootToken) -> str:
    """The description of a root token that is not valid."""
    what = "holds no token" if token.state == "no token" else f"holds a token that is {token.state}"
    return f"{token.file} {what}"


def remedy_for(token: RootToken) -> str:
    """How to replace a root token that is not valid."""
    return (
        f"delete {token.file} and run `headrace up` again to create a new one, or create one with"
        " `headrace tokens create NAME --scope '*'`"
    )


async def ensure_root_token(folder: Path, tokens: Tokens) -> RootToken:
    """Create the data folder's root token on first use, in a file of mode 0600 and in PostgreSQL.

    The file is written first, so the next call repairs a crash in between. A revoked token stays
    revoked. After the file is deleted the next call creates a new token; the old one stays valid
    until it is revoked.
    """
    path = folder / "token"
    text = await asyncio.to_thread(read_or_create, path, make_token)
    return RootToken(path, await tokens.keep_root(text))


def _require_scopes(scopes: tuple[str, ...]) -> list[str]:
    unknown = sorted(set(scopes) - SCOPES.keys())
    if unknown or not scopes:
        raise ScopeUnknown(
            f"scopes {', '.join(unknown) or '(none)'} are unknown: expected one or more of"
            f" {', '.join(SCOPES)}"
        )
    return sorted(set(scopes))


def _require_publishable(scopes: list[str]) -> None:
    secret = sorted(set(scopes) - PUBLISHABLE_SCOPES)
    if secret:
        raise ScopeNotPublishable(
            f"scopes {', '.join(secret)} are not allowed for a publishable key, which anyone can"
            f" read: expected only {', '.join(sorted(PUBLISHABLE_SCOPES))}"
        )


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), 6)
