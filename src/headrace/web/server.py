"""The app and its server: rooms' routes in one Litestar app, served by uvicorn in this process.

A request passes the guard, the pages for people, the hot routes, and unless one of these answers, Litestar. Reads of hot
routes whose head was seen before take the short way (`shortcut.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import uvicorn
from litestar import Litestar, Response, get
from litestar.di import Provide
from litestar.openapi.config import OpenAPIConfig

from headrace.kernel import cursors
from headrace.kernel.secrets import derive_key
from headrace.web import http
from headrace.web.admission import Admission
from headrace.web.audit import Audit
from headrace.web.auth import Callers, ScopeGuard
from headrace.web.bodies import BodyGuard, JsonBody, require_json
from headrace.web.connection import Connection
from headrace.web.cors import PageRoutes
from headrace.web.guard import Guard, give_slashes_back
from headrace.web.hot import HotRoutes
from headrace.web.idempotency import Keys, Replay, render_replay, require_keys_kept
from headrace.web.model import AddressInUse, AddressRefused, House, WebConfig
from headrace.web.openapi import (
    describe,
    route_templates,
    routes_of_same_shape,
    routes_without_scope,
)
from headrace.web.pages import Beside, Pages
from headrace.web.parameters import Methods, require_plain_parameters
from headrace.web.problems import render_error
from headrace.web.quotas import Quotas
from headrace.web.shortcut import Shortcut
from headrace.web.tokens import Tokens


def create_api(house: House, pages: Pages | None = None) -> Guard:
    """The ASGI app of `house`, and `pages` for people beside it.

    Asserts that each route names its scope and has a shape of its own.
    """
    return _layers(house, pages)[0]


def _layers(house: House, pages: Pages | None) -> tuple[Guard, HotRoutes]:
    callers = Callers(Tokens(house.engines.postgres))
    quotas = Quotas(house.config.section(WebConfig))
    app = create_app(house, callers, quotas)
    hot = HotRoutes(app, callers, quotas, house.services())
    inner: Any = Methods(hot, app)
    templates = route_templates(app)
    if pages is not None:
        inner, templates = Beside(pages, inner), templates | pages.templates
    config = house.config.section(WebConfig)
    return Guard(inner, config, templates, PageRoutes(app, callers)), hot


def create_app(
    house: House, callers: Callers | None = None, quotas: Quotas | None = None
) -> Litestar:
    """The Litestar app inside, without what guard and hot routes add."""
    app = _assemble(house, callers or Callers(Tokens(house.engines.postgres)), quotas, None)
    missing, doubled = routes_without_scope(app), routes_of_same_shape(app)
    assert not missing, f"routes without a known scope, add opt={{'scope': ...}}: {missing}"
    assert not doubled, f"routes of the same shape: {doubled}"
    return app


def describe_api(house: House) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `house`."""
    callers = Callers(Tokens(house.engines.postgres))
    described = _assemble(
        house,
        callers,
        None,
        OpenAPIConfig(
            title="Headrace",
            version=house.version,
            description="Jobs, photo fetching, view counters, feeds and media of a content platform.",
            use_handler_docstrings=True,
        ),
    )
    return describe(_assemble(house, callers, None, None), described)


def _assemble(
    house: House, callers: Callers, quotas: Quotas | None, openapi: OpenAPIConfig | None
) -> Litestar:
    config = house.config.section(WebConfig)
    audit = Audit(house.engines.postgres, kept_s=config.audit_kept_s)
    services = {"audit": audit, **house.services(), "about": http.About(house)}
    keys = Keys(house.engines.postgres, kept_s=config.idempotency_kept_s)
    return Litestar(
        route_handlers=[*http.ROUTES, _openapi_route(house), *house.routes()],
        dependencies={
            name: Provide(_giver(service), sync_to_thread=False)
            for name, service in services.items()
        }
        | {
            "once": Provide(keys.once),
            # Asked for when it is needed: a house without lists needs no secret.
            "cursor_key": Provide(
                lambda: derive_key(house.secret, cursors.USE), sync_to_thread=False
            ),
        },
        guards=[
            give_slashes_back,
            ScopeGuard(callers, quotas or Quotas(config)),
            require_plain_parameters,
            require_keys_kept,
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


def _openapi_route(house: House) -> Any:
    @functools.cache
    def encoded() -> bytes:
        return msgspec.json.encode(describe_api(house))

    @get(
        "/openapi.json",
        operation_id="getOpenApi",
        opt=http.KNOWN,
        sync_to_thread=True,
        tags=["about"],
        media_type="application/json",
    )
    def get_openapi() -> Response[bytes]:
        """This description of the API, OpenAPI 3.1."""
        return Response(encoded(), media_type="application/json")

    return get_openapi


def _giver(service: Any) -> Callable[[], Any]:
    return lambda: service


async def run_api(
    house: House,
    stop: asyncio.Event,
    on_ready: Callable[[str, int], None],
    pages: Pages | None = None,
) -> None:
    """Serve until `stop`; `on_ready(host, port)` is called once connections are taken.

    On stop no new connection is taken, and requests under way have `web.graceful_stop` to end.
    Raises: AddressInUse, AddressRefused.
    """
    config = house.config.section(WebConfig)
    listener = bind(config.listen)
    try:
        host, port = listener.getsockname()[:2]
        guard, hot = _layers(house, pages)
        server = _Server(
            uvicorn.Config(
                guard,
                http=partial(  # type: ignore[arg-type]
                    Connection,
                    limits=config,
                    shortcut=Shortcut(guard, hot),
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
                f"{where} is taken by another program: stop it, or set web.listen"
                " (HEADRACE_WEB_LISTEN) to another address; port 0 takes a free one"
            ) from error
        raise AddressRefused(
            f"cannot listen at {where} ({error.strerror}): set web.listen (HEADRACE_WEB_LISTEN) to an"
            " address of this machine and a port that may be used"
        ) from error
    # Connections inherit it. uvloop sets it itself, asyncio only where a socket names its protocol: a body then
    # waits for the acknowledgement of its head, 46 ms a request on loopback instead of 2.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server that tells when it is ready and leaves signals to whoever runs the role."""

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
