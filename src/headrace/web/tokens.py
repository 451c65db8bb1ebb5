"""Tokens: made once, shown once, kept as their SHA-256.

A token is `hrt_`, 43 characters of 256 random bits, and 6 characters of CRC-32 over them, all base 62:
one word to a double click, found by secret scanners through its prefix, and a truncated paste is told
without asking PostgreSQL. The hash is looked up by equality in an index; a timing difference there tells
of hashes, never of tokens (the scheme of the large code hosts).

A publishable key is the same with `hrk_` in front. It stands in web pages for all to read, so it carries none but
PUBLISHABLE_SCOPES, and is the only kind that is taken out of an address (`?k=`), where logs keep it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from headrace.engines.postgres import ConstraintViolated, Postgres
from headrace.engines.sql import load_queries
from headrace.kernel.ids import require_id
from headrace.kernel.limits import PAGE_ROWS_MAX
from headrace.web.model import (
    ALL_SCOPES,
    PUBLISHABLE_SCOPES,
    SCOPES,
    ScopeNotPublishable,
    ScopeUnknown,
    TokenNameTaken,
    TokenUnknown,
)

SQL: Final = load_queries("headrace.web")
PREFIX: Final = "hrt_"
KEY_PREFIX: Final = "hrk_"
ROOT_NAME: Final = "root"
TokenState: TypeAlias = Literal["valid", "revoked", "expired", "unknown", "no token"]
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHAPE: Final = re.compile(r"hr[tk]_([0-9A-Za-z]{43})([0-9A-Za-z]{6})")


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token; the token itself is not."""

    id: int
    name: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


@dataclass(frozen=True, slots=True, repr=False)
class NewToken:
    """A token just made; `text` is never to be had again."""

    text: str
    token: Token


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: a token by name, and what it may do."""

    token_id: int
    name: str
    scopes: frozenset[str]
    is_publishable: bool = False
    """Whether anybody may hold the token: it stands in web pages."""

    def may(self, scope: str) -> bool:
        """Whether the token carries `scope`."""
        return scope in self.scopes or ALL_SCOPES in self.scopes


def make_token(prefix: str = PREFIX) -> str:
    """A fresh token, or a publishable key."""
    body = _base62(int.from_bytes(secrets.token_bytes(32)), 43)
    return prefix + body + _checksum(body)


def is_token(text: str) -> bool:
    """Whether `text` has the shape and the checksum of a token."""
    match = _SHAPE.fullmatch(text)
    return match is not None and _checksum(match[1]) == match[2]


def hash_of(token: str) -> bytes:
    """What is stored of a token."""
    return hashlib.sha256(token.encode()).digest()


class Tokens:
    """The verbs on tokens."""

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
        """Make and store a token, or a key for web pages.

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
                f"token {name!r} exists: choose another name, or `headrace tokens revoke {name}` first"
            ) from error
        return NewToken(text, _token_from(row))

    async def list(self) -> list[Token]:
        """The newest tokens, also those revoked; one page at most."""
        rows = await self._postgres.all(SQL.list_tokens, rows_max=PAGE_ROWS_MAX)
        return [_token_from(row) for row in rows]

    async def revoke(self, name: str) -> Token:
        """End the valid token of `name`; every API process refuses it within 5 s.

        Raises: TokenUnknown.
        """
        row = await self._postgres.one(SQL.revoke_token, name=name)
        if row is None:
            raise TokenUnknown(
                f"no valid token {name!r}: `headrace tokens ls` shows the names and what was revoked"
            )
        return _token_from(row)

    async def find_caller(self, token: str) -> Caller | None:
        """Whose token this is, or None if it is not valid. One statement."""
        if not is_token(token):
            return None
        row = await self._postgres.one(SQL.find_caller, sha256=hash_of(token))
        if row is None:
            return None
        is_publishable = token.startswith(KEY_PREFIX)
        return Caller(row["id"], row["name"], frozenset(row["scopes"]), is_publishable)

    async def state_of(self, token: str) -> TokenState:
        """What PostgreSQL knows of `token`, whose text is all that is given."""
        if not is_token(token):
            return "no token"
        state: TokenState | None
        state = await self._postgres.value(SQL.token_state, sha256=hash_of(token))
        return state or "unknown"

    async def keep_root(self, token: str) -> TokenState:
        """Make `token` known with all scopes, unless it is known already; a revoked one stays revoked.

        It touches no other token: several data folders may share one PostgreSQL. Idempotent.
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
    """The file of a data folder's root token, and whether that token still opens anything."""

    file: Path
    state: TokenState


def root_name(token: str) -> str:
    """The name of a data folder's root token, told by the token itself: `root-1f2e3d4c`."""
    return f"{ROOT_NAME}-{hash_of(token).hex()[:8]}"


def dead_token(token: RootToken) -> str:
    """What to say of a root token that opens nothing."""
    what = "holds no token" if token.state == "no token" else f"holds a token that is {token.state}"
    return f"{token.file} {what}"


def mend_of(token: RootToken) -> str:
    """How a person gets a token that works again, where the file's does not."""
    return (
        f"delete {token.file} and run `headrace up` again, which makes a new one, or make one with"
        " `headrace tokens create NAME --scope '*'`"
    )


async def ensure_root_token(folder: Path, tokens: Tokens) -> RootToken:
    """The file with a token of all scopes, made on first use with mode 0600, and known to PostgreSQL.

    The file is written first: a crash in between is mended by the next call, and a token that was
    revoked stays revoked. Deleting the file and calling again makes a new one; the old one is valid
    until it is revoked, since nothing tells whose it was.
    """
    path = folder / "token"
    text = await asyncio.to_thread(_load_or_make_file, path)
    return RootToken(path, await tokens.keep_root(text))


def _load_or_make_file(path: Path) -> str:
    """The token in `path`, made there if there is none; safe with several processes."""
    if not path.exists():
        draft = path.with_name(f".token.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, make_token().encode() + b"\n")
            os.fsync(descriptor)
            # A link, unlike a rename, does not replace the token of a process that was faster.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
        finally:
            os.close(descriptor)
            draft.unlink()
    return path.read_text().strip()


def _require_scopes(scopes: tuple[str, ...]) -> list[str]:
    unknown = sorted(set(scopes) - SCOPES.keys())
    if unknown or not scopes:
        raise ScopeUnknown(
            f"scopes {', '.join(unknown) or '(none)'} are not known: expected one or more of"
            f" {', '.join(SCOPES)}"
        )
    return sorted(set(scopes))


def _require_publishable(scopes: list[str]) -> None:
    secret = sorted(set(scopes) - PUBLISHABLE_SCOPES)
    if secret:
        raise ScopeNotPublishable(
            f"scopes {', '.join(secret)} are not for a key that all can read: expected"
            f" {', '.join(sorted(PUBLISHABLE_SCOPES))} alone"
        )


def _token_from(row: Any) -> Token:
    return Token(
        row["id"],
        row["name"],
        tuple(row["scopes"]),
        row["created_at"],
        row["expires_at"],
        row["revoked_at"],
        row["last_used_at"],
    )


def _base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), 6)
