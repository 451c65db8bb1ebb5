"""`Idempotency-Key`: a request that is sent again is done once and answered alike.

The key, the request's digest and the answer are one row, written in the transaction of the effect itself, so a kill at
any moment leaves both or neither. Two requests with one key at a time meet at the row's primary key: the second
waits for the first, at most LOCK_WAIT_S. A refused request keeps no row: correct it and send it again.

Routes take part by asking for `once` and saying so in `opt`; a POST with a key to any other is refused,
rather than done twice. PUT and DELETE may be repeated as they are.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from litestar import Request, Response
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from headrace.engines.postgres import Postgres, PostgresBusy, Tx
from headrace.engines.sql import load_queries
from headrace.kernel.crash import crash_point
from headrace.kernel.once import Make, Once
from headrace.web.model import (
    IdempotencyInFlight,
    IdempotencyKeyInvalid,
    IdempotencyMismatch,
    IdempotencyUnsupported,
)

KEY_CHARACTERS_MAX: Final = 128
LOCK_WAIT_S: Final = 3.0
HEADER: Final = "idempotency-key"
REPLAYED: Final = "idempotency-replayed"
KEEPS_KEYS: Final = "keeps_keys"
"""The mark in a handler's `opt`: it does its work through `once`."""
STREAMS_BODY: Final = "streams_body"
"""A further mark: it reads its body as a stream, too large for the memory, and gives `once` its digest."""
SQL: Final = load_queries("headrace.web")


class Replay(Exception):
    """The request was done before; this is how it was answered."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"answered before with {status}")
        self.status = status
        self.body = body


class Keys:
    """Keys of requests and their answers, kept in PostgreSQL for `kept_s`."""

    def __init__(self, postgres: Postgres, *, kept_s: float) -> None:
        self._postgres = postgres
        self._kept_s = kept_s

    async def once(self, request: Request[Any, Any, Any]) -> Once:
        """How the handler of `request` does its work. A Litestar dependency."""
        key = request.headers.get(HEADER)
        if key is None:
            return Once(_make_alone)
        require_key(key)
        caller = request.scope.get("auth")
        is_streamed = bool(request.route_handler.opt.get(STREAMS_BODY))
        body = b"" if is_streamed else await request.body()
        place = f"{request.method} {request.scope['path']}?".encode()
        asked = place + request.scope["query_string"] + b"\0" + body
        status = request.route_handler.status_code

        async def run(make: Make[Any], body_digest: bytes) -> Any:
            assert bool(body_digest) == is_streamed, (
                "the digest of a streamed body, and of no other"
            )
            digest = hashlib.sha256(asked + body_digest).digest()
            token_id = getattr(caller, "token_id", 0)
            return await self._run(make, token_id, key, digest=digest, status=status)

        return Once(run)

    async def _run(
        self, make: Make[Any], caller: int, key: str, *, digest: bytes, status: int
    ) -> Any:
        async with self._postgres.transaction() as tx:
            await self._take(tx, caller, key, digest)
            answer = await make(tx)
            body = msgspec.json.encode(answer)
            await tx.run(SQL.keep_answer, caller=caller, key=key, status=status, body=body)
            crash_point("web.before_commit")
        crash_point("web.after_effect")
        return answer

    async def _take(self, tx: Tx, caller: int, key: str, digest: bytes) -> None:
        """Write the key's row. Raises: Replay, IdempotencyMismatch, IdempotencyInFlight."""
        await tx.run(SQL.bound_key_wait, wait_ms=str(int(LOCK_WAIT_S * 1000)))
        await tx.run(SQL.drop_old_keys, kept_s=self._kept_s)
        try:
            if await tx.run(SQL.take_key, caller=caller, key=key, sha256=digest):
                return
        except PostgresBusy as error:
            raise _in_flight() from error
        kept = await tx.one(SQL.find_key, caller=caller, key=key)
        if kept is None:  # It was old, and another request forgot it just now.
            raise _in_flight()
        if kept["sha256"] != digest:
            raise IdempotencyMismatch(
                f"Idempotency-Key {key[:80]!r} belongs to another request: make a new key for each"
                " request, and repeat a request unchanged"
            )
        raise Replay(kept["status"], kept["body"])


def _in_flight() -> IdempotencyInFlight:
    return IdempotencyInFlight(
        "a request with this Idempotency-Key is still under way: send it again in a moment",
        retry_after_s=1,
    )


async def _make_alone(make: Make[Any], _body_digest: bytes) -> Any:
    return await make(None)


def require_key(key: str) -> None:
    """Refuse a key that is empty, long or not printable ASCII. Raises: IdempotencyKeyInvalid."""
    is_good = 1 <= len(key) <= KEY_CHARACTERS_MAX and key.isascii() and key.isprintable()
    if not is_good:
        raise IdempotencyKeyInvalid(
            f"Idempotency-Key: expected 1 to {KEY_CHARACTERS_MAX} printable ASCII characters, got"
            f" {key[:80]!r}: a UUID does well"
        )


async def require_keys_kept(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """A Litestar guard: a key is kept or refused, never ignored. Raises: IdempotencyUnsupported."""
    if HEADER not in connection.headers or "POST" not in getattr(handler, "http_methods", ()):
        return
    if not handler.opt.get(KEEPS_KEYS):
        raise IdempotencyUnsupported(
            "this route keeps no Idempotency-Key, so a repeated request would be done twice: leave the"
            " header out"
        )


def render_replay(_: Request[Any, Any, Any], replay: Replay) -> Response[bytes]:
    """The answer of the first time, marked as such."""
    return Response(
        replay.body,
        status_code=replay.status,
        media_type="application/json",
        headers={REPLAYED: "true"},
    )
