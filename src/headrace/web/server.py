"""The app and its server: the rooms' routes in one Litestar app, served by uvicorn in this process.

A request passes the guard, the console's pages, the fast paths and, unless one of these answers,
Litestar. A read whose head bytes were seen before skips the parser as well (`fast_path`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import msgspec
import uvicorn
from litestar import Litestar, Response, get
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig

from headrace.kernel.signing import CURSOR_USE, derive_key
from headrace.web import http
from headrace.web.auth import Callers, ScopeGuard
from headrace.web.bodies import BodyGuard, JsonBody, require_json
from headrace.web.connection import Connection
from headrace.web.fast_path import FastRoutes, HeadCache
from headrace.web.guard import Guard, PageRoutes, restore_slashes
from headrace.web.idempotency import (
    IdempotencyKeys,
    Replay,
    render_replay,
    require_keys_supported,
)
from headrace.web.limits import Admission, Quotas
from headrace.web.model import AddressInUse, AddressRefused, Application, WebConfig
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
    """The ASGI app for the routes of `app` and for `pages`.

    Raises: AssertionError for a route without a scope, or two routes of one shape.
    """
    return _layers(app, pages)[0]


def _layers(app: Application, pages: Pages | None) -> tuple[Guard, FastRoutes]:
    callers = Callers(Tokens(app.engines.postgres))
    config = app.config.section(WebConfig)
    quotas = Quotas(config)
    api = create_app(app, callers, quotas)
    fast = FastRoutes(api, callers, quotas, app.services())
    inner: Any = Methods(fast, api)
    templates = route_templates(api)
    if pages is not None:
        inner, templates = PageRouter(pages, inner), templates | pages.templates
    return Guard(inner, config, templates, PageRoutes(api, callers)), fast


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
    services = {"audit": audit, **app.services(), "about": http.About(app)}
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


async def run_api(
    app: Application,
    stop: asyncio.Event,
    on_ready: Callable[[str, int], None],
    pages: Pages | None = None,
) -> None:
    """Serve until `stop`; call `on_ready(host, port)` once the socket accepts connections.

    After `stop` no connection is accepted, and open requests have `web.graceful_stop` to finish.
    Raises: AddressInUse, AddressRefused.
    """
    config = app.config.section(WebConfig)
    listener = bind(config.listen)
    try:
        host, port = listener.getsockname()[:2]
        guard, fast = _layers(app, pages)
        server = _Server(
            uvicorn.Config(
                guard,
                http=partial(  # type: ignore[arg-type]
                    Connection,
                    limits=config,
                    heads=HeadCache(guard, fast),
                    admission=Admission(config),
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=max(1, int(config.keep_alive_s)),
                timeout_graceful_shutdown=max(1, int(config.graceful_stop_s)),
            ),
            partial(on_ready, host, port),
        )
        stopping = asyncio.create_task(_stop_when(stop, server))
        try:
            await server.serve(sockets=[listener])
        finally:
            stopping.cancel()
    finally:
        listener.close()


def bind(listen: tuple[str, int]) -> socket.socket:
    """A listening socket. Raises: AddressInUse, AddressRefused."""
    host, port = listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{where} is in use by another program: stop it, or set web.listen"
                " (HEADRACE_WEB_LISTEN) to another address; port 0 selects a free port"
            ) from error
        raise AddressRefused(
            f"cannot listen at {where} ({error.strerror}): set web.listen (HEADRACE_WEB_LISTEN)"
            " to an address of this machine and a permitted port"
        ) from error
    # Connections inherit the option. asyncio sets it only if a socket names its protocol. Without
    # it a body waits for the acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server with a ready callback, without signal handlers."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _stop_when(stop: asyncio.Event, server: _Server) -> None:
    await stop.wait()
    server.should_exit = True
