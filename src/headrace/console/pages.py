"""Render pages: session, view data and template become a response."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from jinja2 import Environment
from litestar import Response

from headrace.console.actions import Action
from headrace.console.history import Boards
from headrace.console.live import Sample, Sampler, WatchedPage
from headrace.console.model import PREFIX, ConsoleConfig, PageUnknown
from headrace.console.rendering import (
    COMPRESSED_FROM_BYTES,
    Assets,
    LiveFragments,
    make_environment,
    packed,
)
from headrace.console.security import (
    ConsoleSession,
    SessionAuth,
    expired_flash_cookie,
    page_headers,
    theme_of,
)
from headrace.console.views import Query, Rates, Room, Screen, ViewContext
from headrace.web.model import Application, ScopeMissing, current_request_id
from headrace.web.problems import title_of
from headrace.web.sessions import Audit
from headrace.web.tokens import Caller

HTML: Final = "text/html"


@dataclass(frozen=True, slots=True)
class Route:
    """A screen and its room."""

    room: Room
    screen: Screen

    @property
    def scope(self) -> str | None:
        """The scope that the screen needs, if any."""
        return self.screen.scope or self.room.scope


class PageRenderer:
    """Renders every page of the console."""

    def __init__(self, house: Application, auth: SessionAuth, rooms: Sequence[Room]) -> None:
        self.house, self.auth, self.rooms = house, auth, rooms
        self.media_origin = media_origin(house)
        self.assets = Assets()
        self.actions: dict[str, Action] = {
            action.name: action for room in rooms for action in room.actions
        }
        self.sampler = Sampler(
            self.sample, every_s=house.config.section(ConsoleConfig).live_every_s
        )
        self._services = house.services()
        self.audit: Audit = self._services["audit"]
        self._boards = Boards()
        self._rates = Rates(house.metrics_folder)
        self._environment: Environment = make_environment(
            self.assets, version=house.version, rooms=rooms, actions=self.actions
        )

    def view_context(
        self, caller: Caller, *, path: str, params: Mapping[str, str], query: Mapping[str, str]
    ) -> ViewContext:
        """The context that view functions and actions receive."""
        return ViewContext(
            path=path,
            params=params,
            query=Query(query),
            jobs=self._services["jobs"],
            views=self._services["views"],
            feed=self._services["feed"],
            media=self._services["media"],
            audit=self.audit,
            installed_fetch=self._services.get("fetch"),
            caller=caller,
            now_at=datetime.now(UTC),
            rates=self._rates,
            rooms=self.rooms,
            history=self._services["history"],
            backups=self._services["backups"],
            boards=self._boards,
            media_origin=self.media_origin,
            house=self.house,
        )

    async def screen(self, request: Any) -> Response[bytes]:
        """The whole page of a screen. Raises: LoginNeeded, PageUnknown, ScopeMissing."""
        session = await self.auth.require_session(request)
        route, path, params, query = self.find(url_of(request))
        # Metrics are labelled by path template.
        request.scope["path_template"] = PREFIX + route.screen.path.rstrip("/")
        require_scope(session.caller, route.scope)
        context = self.view_context(session.caller, path=path, params=params, query=query)
        view = await route.screen.view(context)
        page_id = secrets.token_urlsafe(12)
        live = LiveFragments()
        body, _ = self._render(
            route, context, view, live, session=session, request=request, page=page_id
        )
        if route.screen.live:
            self.sampler.remember(page_id, live.parts)
        return self.respond(request, body)

    async def sample(self, watched: WatchedPage) -> Sample:
        """The live fragments of a page, for the sampler."""
        route, path, params, query = self.find(watched.url)
        caller = Caller(0, "viewer", watched.scopes)
        require_scope(caller, route.scope)
        context = self.view_context(caller, path=path, params=params, query=query)
        live = LiveFragments()
        body, layout = self._render(route, context, await route.screen.view(context), live)
        return Sample(live.parts, layout, len(packed(body)))

    def find(self, url: str) -> tuple[Route, str, dict[str, str], dict[str, str]]:
        """Route, path, parameters and query of a URL. Raises: PageUnknown."""
        found = find_route(self.rooms, url)
        if found is None:
            raise PageUnknown("the console has no such page: the menu lists all pages")
        return found

    def message(
        self, request: Any, session: ConsoleSession | None, *, status: int, code: str, text: str
    ) -> Response[bytes]:
        """An error page."""
        body = self._plain(
            "error.html",
            request,
            session,
            status=status,
            title=title_of(code),
            code=code,
            text=text,
            request_id=current_request_id.get(),
        )
        return self.respond(request, body, status=status)

    def form(
        self,
        request: Any,
        session: ConsoleSession | None,
        template: str,
        *,
        status: int = 200,
        **values: Any,
    ) -> Response[bytes]:
        """A page that contains a form."""
        return self.respond(
            request, self._plain(template, request, session, **values), status=status
        )

    def fragment(self, template: str, **values: Any) -> Response[bytes]:
        """A fragment of a page."""
        text = self._environment.get_template(template).render(**values)
        return Response(text.encode(), media_type=HTML, headers=page_headers(self.media_origin))

    def respond(self, request: Any, body: bytes, *, status: int = 200) -> Response[bytes]:
        """`body` as a response with security headers; removes a shown flash message.

        Compressing the CSRF token beside user text is safe: requests from other sites carry no
        session cookie, so they cannot probe it by response length.
        """
        headers = page_headers(self.media_origin)
        if len(body) > COMPRESSED_FROM_BYTES and takes_gzip(request):
            body, headers["content-encoding"] = packed(body), "gzip"
        answer = Response(body, media_type=HTML, status_code=status, headers=headers)
        if self.auth.flash(request) is not None:
            answer.cookies.append(expired_flash_cookie())
        return answer

    def _plain(
        self, template: str, request: Any, session: ConsoleSession | None, **values: Any
    ) -> bytes:
        caller = session.caller if session else Caller(0, "nobody", frozenset())
        parts = urlsplit(url_of(request))
        query = dict(parse_qsl(parts.query))
        live = LiveFragments()
        variables = self._variables(
            self.view_context(caller, path=parts.path, params={}, query=query), live
        )
        variables.update(
            self._base_variables(request, session), room=None, screen=None, page="", **values
        )
        return live.finish(self._environment.get_template(template).render(variables))[0]

    def _render(
        self,
        route: Route,
        context: ViewContext,
        view: Any,
        live: LiveFragments,
        *,
        session: ConsoleSession | None = None,
        request: Any = None,
        page: str = "",
    ) -> tuple[bytes, str]:
        variables = self._variables(context, live)
        variables.update(
            self._base_variables(request, session),
            room=route.room,
            screen=route.screen,
            title=route.screen.title,
            view=view,
            page=page,
        )
        return live.finish(self._environment.get_template(route.screen.template).render(variables))

    def _variables(self, context: ViewContext, live: LiveFragments) -> dict[str, Any]:
        return {"context": context, "now_at": context.now_at, "live": live, "fragment": live}

    def _base_variables(self, request: Any, session: ConsoleSession | None) -> dict[str, Any]:
        return {
            "session": session,
            "csrf_token": session.csrf_token if session else "",
            "theme": "auto" if request is None else theme_of(request),
            "flash": None if request is None else self.auth.flash(request),
        }


def media_origin(house: Application) -> str:
    """Origin of the media role for browsers; empty if it is not installed."""
    config = house.config.sections.get("media")
    if config is None:
        return ""
    host, port = config.listen
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - nothing is bound here
    own = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    parts = urlsplit(config.public_url or own)
    return f"{parts.scheme}://{parts.netloc}"


def find_route(
    rooms: Sequence[Room], url: str
) -> tuple[Route, str, dict[str, str], dict[str, str]] | None:
    """The screen that a URL leads to, matched segment by segment; None if there is none."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/") or PREFIX
    if path != PREFIX and not path.startswith(f"{PREFIX}/"):
        return None
    given = [unquote(part) for part in path.removeprefix(PREFIX).split("/") if part]
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if any("\0" in part for part in given):
        return None
    for room in rooms:
        for screen in room.screens:
            params = _matched([part for part in screen.path.split("/") if part], given)
            if params is not None:
                return Route(room, screen), path, params, query
    return None


def _matched(wanted: Sequence[str], given: Sequence[str]) -> dict[str, str] | None:
    if len(wanted) != len(given):
        return None
    params = {}
    for part, text in zip(wanted, given, strict=True):
        if part.startswith("{"):
            params[part.strip("{}").partition(":")[0]] = text
        elif part != text:
            return None
    return params


def require_scope(caller: Caller, scope: str | None) -> None:
    """Refuse a caller without `scope`. Raises: ScopeMissing."""
    if scope is not None and not caller.may(scope):
        raise ScopeMissing(
            f"token {caller.name!r} lacks the scope {scope}: log in with a token that has it"
        )


def takes_gzip(request: Any) -> bool:
    """Whether the client accepts gzip."""
    return "gzip" in request.headers.get("accept-encoding", "")


def url_of(request: Any) -> str:
    """Path and query of the request, as sent."""
    scope = request.scope
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path
