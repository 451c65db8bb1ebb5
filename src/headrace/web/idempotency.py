"""Idempotency keys: run a request once per key, and return the stored response to its repeats.

A handler that takes part has `"idempotent": True` in its `opt` and runs its effect through
`idempotency.run(...)`. The key, the effect and the response commit in one transaction, so a crash
keeps all of them or none. Without a key the effect runs as usual. A POST with a key to any other
route is refused: an ignored key would hide that a repeat runs twice.

A key belongs to the caller's token. The same key with another method, path, query or body is
refused. A concurrent request with the key waits LOCK_WAIT_S and then gets a conflict.
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
from headrace.kernel.resilience import crash_point
from headrace.kernel.routes import Effect, Idempotency
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
IDEMPOTENT: Final = "idempotent"
"""Key in a handler's `opt`: the handler runs its effect through `Idempotency`."""
STREAMS_BODY: Final = "streams_body"
"""Key in a handler's `opt`: the handler reads its body as a stream and passes its digest."""
SQL: Final = load_queries("headrace.web")


class Replay(Exception):
    """A response that is stored under the request's key."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"answered before with {status}")
        self.status = status
        self.body = body


class IdempotencyKeys:
    """Keys of requests and their responses, stored in PostgreSQL for `kept_s`."""

    def __init__(self, postgres: Postgres, *, kept_s: float) -> None:
        self._postgres = postgres
        self._kept_s = kept_s

    async def for_request(self, request: Request[Any, Any, Any]) -> Idempotency:
        """How the handler of `request` runs its effect; a Litestar dependency."""
        key = request.headers.get(HEADER)
        if key is None:
            return Idempotency(_run_without_key)
        require_key(key)
        caller = request.scope.get("auth")
        is_streamed = bool(request.route_handler.opt.get(STREAMS_BODY))
        body = b"" if is_streamed else await request.body()
        target = f"{request.method} {request.scope['path']}?".encode()
        identity = target + request.scope["query_string"] + b"\0" + body
        status = request.route_handler.status_code

        async def run(effect: Effect[Any], body_digest: bytes) -> Any:
            assert bool(body_digest) == is_streamed, (
                "pass the digest of a streamed body, and of no other body"
            )
            digest = hashlib.sha256(identity + body_digest).digest()
            token_id = getattr(caller, "token_id", 0)
            return await self._run(effect, token_id, key, digest=digest, status=status)

        return Idempotency(run)

    async def _run(
        self, effect: Effect[Any], caller: int, key: str, *, digest: bytes, status: int
    ) -> Any:
        async with self._postgres.transaction() as tx:
            await self._reserve(tx, caller, key, digest)
            response = await effect(tx)
            body = msgspec.json.encode(response)
            await tx.run(SQL.store_response, caller=caller, key=key, status=status, body=body)
            crash_point("web.before_commit")
        crash_point("web.after_effect")
        return response

    async def _reserve(self, tx: Tx, caller: int, key: str, digest: bytes) -> None:
        """Insert the key. Raises: Replay, IdempotencyMismatch, IdempotencyInFlight."""
        await tx.run(SQL.limit_key_wait, wait_ms=str(int(LOCK_WAIT_S * 1000)))
        await tx.run(SQL.delete_old_keys, kept_s=self._kept_s)
        try:
            if await tx.run(SQL.insert_key, caller=caller, key=key, sha256=digest):
                return
        except PostgresBusy as error:
            raise _in_flight() from error
        kept = await tx.one(SQL.find_key, caller=caller, key=key)
        if kept is None:  # Another request deleted the expired key after our insert.
            raise _in_flight()
        if kept["sha256"] != digest:
            raise IdempotencyMismatch(
                f"Idempotency-Key {key[:80]!r} belongs to another request: use a new key for each"
                " request, and repeat a request unchanged"
            )
        raise Replay(kept["status"], kept["body"])


def _in_flight() -> IdempotencyInFlight:
    return IdempotencyInFlight(
        "a request with this Idempotency-Key is in progress: send it again in a moment",
        retry_after_s=1,
    )


async def _run_without_key(effect: Effect[Any], _body_digest: bytes) -> Any:
    return await effect(None)


def require_key(key: str) -> None:
    """Require 1 to 128 printable ASCII characters. Raises: IdempotencyKeyInvalid."""
    is_good = 1 <= len(key) <= KEY_CHARACTERS_MAX and key.isascii() and key.isprintable()
    if not is_good:
        raise IdempotencyKeyInvalid(
            f"Idempotency-Key: expected 1 to {KEY_CHARACTERS_MAX} printable ASCII characters, got"
            f" {key[:80]!r}: use a UUID, for example"
        )


async def require_keys_supported(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Refuse a key on a POST route that does not support keys; a Litestar guard.

    Raises: IdempotencyUnsupported.
    """
    if HEADER not in connection.headers or "POST" not in getattr(handler, "http_methods", ()):
        return
    if not handler.opt.get(IDEMPOTENT):
        raise IdempotencyUnsupported(
            "this route does not support Idempotency-Key, so a repeated request runs twice:"
            " remove the header"
        )


def render_replay(_: Request[Any, Any, Any], replay: Replay) -> Response[bytes]:
    """The stored response with the header that marks it as a replay."""
    return Response(
        replay.body,
        status_code=replay.status,
        media_type="application/json",
        headers={REPLAYED: "true"},
    )
