"""The console as one ASGI app under `/console`, which the web floor puts beside the API.

It has a Litestar app of its own: its callers come by a session instead of a header, its errors are pages, its bodies are forms,
and none of its routes belongs to the API's description.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.response import Redirect, ServerSentEvent
from litestar.response.sse import ServerSentEventMessage

from headrace.console.doing import Doing
from headrace.console.live import Seen, Told, Watched
from headrace.console.model import BODY_BYTES_MAX, PREFIX, LoginNeeded, PageUnknown, csp_reports
from headrace.console.pages import Pages, require_scope, takes_gzip, url_of
from headrace.console.screens import ROOMS
from headrace.console.security import WAY_BACK, Door, place_of, safe_back, theme_cookie, visitor_of
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.routes import ENDLESS
from headrace.web.model import Application, TokenRefused
from headrace.web.problems import MEDIA_TYPE, headers_of, problem_of, to_headrace_error
from headrace.web.sessions import Sessions

RETRY_MS: Final = 2_000
SEEN: Final = ("page", "frame", "tab")
KEPT_FOR_EVER: Final = "public, max-age=31536000, immutable"
REPORT_CHARACTERS_MAX: Final = 2_000
_log: Final = logger(__name__)
Asked = Request[Any, Any, Any]

GO_ON: Final = f'<!doctype html><meta http-equiv="refresh" content="0; url={PREFIX}">'
"""The page that leads from a link of another site to the console."""


class Console:
    """The ASGI app; implements `headrace.web.server.Pages`."""

    prefix = PREFIX

    def __init__(self, house: Application) -> None:
        self._door = Door(house, Sessions(house.engines.postgres))
        self._pages = Pages(house, self._door, ROOMS)
        doing = Doing(self._pages)
        self._app = Litestar(
            route_handlers=[
                self._asset_route(),
                *self._login_routes(),
                *self._live_routes(),
                *doing.routes(),
                *self._screen_routes(),
            ],
            exception_handlers={Exception: self._render_error},
            request_max_body_size=BODY_BYTES_MAX,
            openapi_config=None,
            logging_config=None,
            debug=False,
        )

    @property
    def templates(self) -> set[str]:
        """The path templates, as metrics name them."""
        screens = {PREFIX + screen.path.rstrip("/") for room in ROOMS for screen in room.screens}
        return screens | {route.path_format for route in self._app.routes}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        await self._app(scope, receive, send)

    def _screen_routes(self) -> list[Any]:
        @get([PREFIX, f"{PREFIX}/{{rest:path}}"])
        async def get_screen(request: Asked) -> Response[bytes]:
            return await self._pages.screen(request)

        return [get_screen]

    def _asset_route(self) -> Any:
        @get(f"{PREFIX}/assets/{{name:path}}", sync_to_thread=False)
        def get_asset(request: Asked) -> Response[bytes]:
            name = request.scope["path"].removeprefix(f"{PREFIX}/assets/")
            found = self._pages.assets.find(name)
            if found is None:
                raise PageUnknown("the console has no such file")
            headers = {"etag": f'"{found.tag}"', "vary": "Accept-Encoding"}
            is_tagged = request.query_params.get("v") == found.tag
            headers["cache-control"] = KEPT_FOR_EVER if is_tagged else "no-cache"
            if request.headers.get("if-none-match") == headers["etag"]:
                return Response(b"", status_code=304, headers=headers)
            body = found.body
            if found.packed and takes_gzip(request):
                body, headers["content-encoding"] = found.packed, "gzip"
            return Response(body, media_type=found.media_type, headers=headers)

        return get_asset

    def _login_form(
        self, request: Asked, back: str, refusal: HeadraceError | None = None
    ) -> Response[Any]:
        status, text = (refusal.status, refusal.public_text) if refusal else (200, "")
        page = {"title": "Log in", "back": back, "text": text}
        return self._pages.form(request, None, "login.html", status=status, **page)

    def _login_routes(self) -> list[Any]:
        door = self._door

        @get(f"{PREFIX}/login")
        async def get_login(request: Asked) -> Response[Any]:
            return self._login_form(request, safe_back(request.query_params.get("back", "")))

        @get(f"{PREFIX}/enter")
        async def get_enter(request: Asked) -> Response[Any]:
            # What only looks ahead, as previews of links and browsers do, must not use the link up.
            mode = request.headers.get("sec-fetch-mode", "navigate")
            is_opened = mode == "navigate" and "origin" not in request.headers
            if request.scope.get("is_head") or "sec-purpose" in request.headers or not is_opened:
                return Response(b"", status_code=204, headers={"cache-control": "no-store"})
            try:
                cookie = await door.enter(request.query_params.get("code", ""), place_of(request))
            except TokenRefused as refusal:
                return self._login_form(request, PREFIX, refusal)
            answer: Response[Any] = Redirect(PREFIX, status_code=303)
            if request.headers.get("sec-fetch-site") == "cross-site":
                # A redirect would be the other site's navigation still, which takes no strict cookie along.
                answer = Response(GO_ON, media_type="text/html; charset=utf-8")
            answer.cookies.append(door.session_cookie(request, cookie))
            return answer

        @post(f"{PREFIX}/login", status_code=200)
        async def post_login(request: Asked) -> Response[Any]:
            given = dict(await request.form())
            back = safe_back(str(given.get("back", "")))
            try:
                cookie = await door.login(str(given.get("token", "")), place_of(request))
            except HeadraceError as refusal:
                return self._login_form(request, back, refusal)
            answer: Response[Any] = Redirect(back, status_code=303)
            answer.cookies.append(door.session_cookie(request, cookie))
            return answer

        @post(f"{PREFIX}/logout", status_code=200)
        async def post_logout(request: Asked) -> Response[Any]:
            visitor = await door.visitor(request)
            door.require_own_form(request, visitor, dict(await request.form()))
            await door.logout(visitor)
            answer: Response[Any] = Redirect(f"{PREFIX}/login", status_code=303)
            answer.cookies.append(door.session_cookie(request, ""))
            return answer

        @post(f"{PREFIX}/theme", status_code=200)
        async def post_theme(request: Asked) -> Response[Any]:
            given = dict(await request.form())
            answer: Response[Any] = Redirect(safe_back(str(given.get("back", ""))), status_code=303)
            answer.cookies.append(theme_cookie(str(given.get("theme", ""))))
            return answer

        return [get_login, get_enter, post_login, post_logout, post_theme]

    def _live_routes(self) -> list[Any]:
        pages = self._pages

        @get(f"{PREFIX}/live")
        async def get_live(request: Asked) -> Response[Any]:
            visitor = await self._door.visitor(request)
            url = safe_back(request.query_params.get("url", ""))
            route, *_ = pages.find(url)
            require_scope(visitor.caller, route.screen.scope)
            pages.sampler.require_room()
            given = {name: request.query_params.get(name, "")[:64] for name in SEEN}
            events = pages.sampler.watch(
                Watched(url, visitor.caller.scopes),
                Seen(**given),
                lambda: self._door.is_still_in(visitor),
            )
            request.scope[ENDLESS] = True  # type: ignore[typeddict-unknown-key]
            answer: Response[Any] = ServerSentEvent(_messages(events))
            return answer

        @post(f"{PREFIX}/csp", status_code=204)
        async def post_csp(request: Asked) -> None:
            body = await request.body()
            csp_reports.inc()
            _log.warning(
                "csp_report", report=body[:REPORT_CHARACTERS_MAX].decode("utf-8", "replace")
            )

        return [get_live, post_csp]

    def _render_error(self, request: Asked, error: Exception) -> Response[Any]:
        ours = to_headrace_error(error)
        is_page = "text/html" in request.headers.get("accept", "")
        if not is_page and "hx-request" not in request.headers:
            return Response(
                msgspec.json.encode(problem_of(ours)),
                status_code=ours.status,
                media_type=MEDIA_TYPE,
                headers=headers_of(ours),
            )
        if isinstance(ours, LoginNeeded):
            return _to_login(request)
        answer = self._pages.message(
            request,
            visitor_of(request),
            status=ours.status,
            code=ours.code,
            text=ours.public_text,
        )
        for name, value in headers_of(ours).items():
            answer.headers.setdefault(name, value)
        return answer


async def _messages(events: Any) -> Any:
    yield ServerSentEventMessage(data=None, retry=RETRY_MS, comment="from now on")
    async for told in events:
        yield _message(told)


def _message(told: Told) -> ServerSentEventMessage:
    return ServerSentEventMessage(data=told.data, event=told.event, id=told.at or None)


def _to_login(request: Asked) -> Response[Any]:
    back = quote(str(request.scope.get(WAY_BACK) or url_of(request)), safe="")
    place = f"{PREFIX}/login?back={back}"
    if "hx-request" in request.headers:
        return Response(b"", status_code=200, headers={"hx-redirect": place})
    return Redirect(place, status_code=303)
