"""The app: the rooms' routes in one Litestar app, and the layers before it.

A request passes the guard, the console's pages and, unless one of these answers, Litestar. Calls
of fast routes skip all of them (`fast_path`).

**Idempotency keys.** A request runs once per key; its repeats get the stored response. A handler
that takes part has `"idempotent": True` in its `opt` and runs its effect through
`idempotency.run(...)`. The key, the effect and the response commit in one transaction, so a crash
keeps all of them or none. Without a key the effect runs as usual. A POST with a key to any other
route is refused: an ignored key would hide that a repeat runs twice.

A key belongs to the caller's token. The same key with another method, path, query or body is
refused. A concurrent request with the key waits LOCK_WAIT_S and then gets a conflict.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec
from litestar import Litestar, Request, Response, get
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.openapi.config import OpenAPIConfig

from headrace.engines.postgres import Postgres, Tx
from headrace.engines.postgres_errors import PostgresBusy
from headrace.engines.sql import load_queries
from headrace.kernel.resilience import crash_point
from headrace.kernel.routes import Effect, Idempotency
from headrace.kernel.signing import CURSOR_USE, derive_key
from headrace.web import http
from headrace.web.auth import Callers, ScopeGuard
from headrace.web.bodies import BodyGuard, JsonBody, require_json
from headrace.web.fast_path import FastRoutes
from headrace.web.guard import Guard, PageRoutes, restore_slashes
from headrace.web.history import History
from headrace.web.limits import Quotas
from headrace.web.model import (
    Application,
    IdempotencyInFlight,
    IdempotencyKeyInvalid,
    IdempotencyMismatch,
    IdempotencyUnsupported,
    WebConfig,
)
from headrace.web.problems import render_error
from headrace.web.routes import (
    Methods,
    describe,
    operation_id_of,
    require_plain_parameters,
    route_templates,
    routes_of_same_shape,
    routes_without_scope,
)
from headrace.web.sessions import Audit
from headrace.web.tokens import Tokens

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


class Pages(Protocol):
    """An ASGI app for people, whose paths begin with `prefix`."""

    @property
    def prefix(self) -> str: ...

    @property
    def templates(self) -> set[str]:
        """Path templates that metrics may use as label values."""
        ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class PageRouter:
    """An ASGI layer: requests below the prefix of `pages` go there, all others to `api`.

    A browser that requests `/` is redirected to the pages.
    """

    def __init__(self, pages: Pages, api: Any) -> None:
        self._pages, self._api = pages, api

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Route one request."""
        path, prefix = scope["path"], self._pages.prefix
        if path == prefix or path.startswith(f"{prefix}/"):
            await self._pages(scope, receive, send)
        elif path == "/" and scope["method"] == "GET" and _wants_html(scope):
            scope["path_template"] = "/"
            location = (b"location", prefix.encode())
            headers = [location, (b"vary", b"Accept"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 303, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._api(scope, receive, send)


def _wants_html(scope: Any) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def create_api(app: Application, pages: Pages | None = None) -> Guard:
    """The ASGI app for the routes of `app` and for `pages`; see `create_layers`."""
    return create_layers(app, pages)[0]


def create_layers(app: Application, pages: Pages | None = None) -> tuple[Guard, FastRoutes]:
    """The ASGI app for the routes of `app` and for `pages`, and the routes answered without it.

    Raises: AssertionError for a route without a scope, or two routes of one shape.
    """
    callers = Callers(Tokens(app.engines.postgres))
    config = app.config.section(WebConfig)
    quotas = Quotas(config)
    api = create_app(app, callers, quotas)
    inner: Any = Methods(api, api, app.services())
    templates = route_templates(api)
    if pages is not None:
        inner, templates = PageRouter(pages, inner), templates | pages.templates
    guard = Guard(inner, config, templates, PageRoutes(api, callers))
    return guard, FastRoutes(api, guard, callers=callers, quotas=quotas, services=app.services())


def create_app(
    app: Application, callers: Callers | None = None, quotas: Quotas | None = None
) -> Litestar:
    """The inner Litestar app, without the guard and the fast paths."""
    api = _assemble(app, callers or Callers(Tokens(app.engines.postgres)), quotas, None)
    missing, doubled = routes_without_scope(api), routes_of_same_shape(api)
    assert not missing, f"routes without a known scope, add opt={{'scope': ...}}: {missing}"
    assert not doubled, f"routes of the same shape: {doubled}"
    return api


def describe_api(app: Application) -> dict[str, Any]:
    """The OpenAPI 3.1 document for the routes of `app`."""
    callers = Callers(Tokens(app.engines.postgres))
    described = _assemble(
        app,
        callers,
        None,
        OpenAPIConfig(
            title="Headrace",
            version=app.version,
            description="Jobs, photo fetching, view counters, feeds and media for content sites.",
            use_handler_docstrings=True,
            operation_id_creator=operation_id_of,
        ),
    )
    return describe(_assemble(app, callers, None, None), described)


def _assemble(
    app: Application, callers: Callers, quotas: Quotas | None, openapi: OpenAPIConfig | None
) -> Litestar:
    config = app.config.section(WebConfig)
    audit = Audit(app.engines.postgres, kept_s=config.audit_kept_s)
    history = History(app.engines.postgres)
    services = {"audit": audit, "history": history, **app.services(), "about": http.About(app)}
    keys = IdempotencyKeys(app.engines.postgres, kept_s=config.idempotency_kept_s)
    return Litestar(
        route_handlers=[*http.ROUTES, _openapi_route(app), *app.routes()],
        dependencies={
            name: Provide(_provider(service), sync_to_thread=False)
            for name, service in services.items()
        }
        | {
            "idempotency": Provide(keys.for_request),
            # Derived on use: an app without listings needs no secret.
            "cursor_key": Provide(lambda: derive_key(app.secret, CURSOR_USE), sync_to_thread=False),
        },
        guards=[
            restore_slashes,
            ScopeGuard(callers, quotas or Quotas(config)),
            require_plain_parameters,
            require_keys_supported,
            require_json,
            BodyGuard(config.body_max_bytes),
        ],
        dto=JsonBody,
        return_dto=None,
        exception_handlers={Exception: render_error, Replay: render_replay},
        request_max_body_size=config.body_max_bytes,
        openapi_config=openapi,
        logging_config=None,
        debug=False,
    )


def _openapi_route(app: Application) -> Any:
    @functools.cache
    def encoded() -> bytes:
        return msgspec.json.encode(describe_api(app))

    @get(
        "/openapi.json",
        opt=http.AUTHENTICATED,
        sync_to_thread=True,
        tags=["about"],
        media_type="application/json",
    )
    def get_open_api() -> Response[bytes]:
        """Return the OpenAPI 3.1 description of this API."""
        return Response(encoded(), media_type="application/json")

    return get_open_api


def _provider(service: Any) -> Callable[[], Any]:
    return lambda: service
