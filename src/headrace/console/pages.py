"""One page: its visitor, what its view found, and the template around that, as a response."""

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
from headrace.console.live import Sample, Sampler, Watched
from headrace.console.model import PREFIX, ConsoleConfig, PageUnknown
from headrace.console.rates import Rates
from headrace.console.rendering import (
    COMPRESSED_FROM_BYTES,
    Assets,
    Live,
    make_environment,
    packed,
)
from headrace.console.security import Door, Visitor, page_headers, theme_of, told_over
from headrace.console.seeing import Ask, Query, Room, Screen
from headrace.web.model import Application, ScopeMissing, current_request_id
from headrace.web.problems import title_of
from headrace.web.sessions import Audit
from headrace.web.tokens import Caller

HTML: Final = "text/html"


@dataclass(frozen=True, slots=True)
class Route:
    """A screen with its room, as it is found by its path."""

    room: Room
    screen: Screen


class Pages:
    """Renders every page of the console."""

    def __init__(self, house: Application, door: Door, rooms: Sequence[Room]) -> None:
        self.house, self.door, self.rooms = house, door, rooms
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
        self._rates = Rates(house.metrics_folder)
        self._environment: Environment = make_environment(
            self.assets, version=house.version, rooms=rooms, actions=self.actions
        )

    def ask(
        self, caller: Caller, *, path: str, params: Mapping[str, str], query: Mapping[str, str]
    ) -> Ask:
        """A request in the words of views."""
        return Ask(
            path=path,
            params=params,
            query=Query(query),
            services=self._services,
            caller=caller,
            now_at=datetime.now(UTC),
            rates=self._rates,
            media_origin=self.media_origin,
            house=self.house,
        )

    async def screen(self, request: Any) -> Response[bytes]:
        """A whole page of a screen. Raises: LoginNeeded, PageUnknown, ScopeMissing, whatever its view raises."""
        visitor = await self.door.visitor(request)
        route, path, params, query = self.find(url_of(request))
        # Metrics name pages by their template.
        request.scope["path_template"] = PREFIX + route.screen.path.rstrip("/")
        require_scope(visitor.caller, route.screen.scope)
        ask = self.ask(visitor.caller, path=path, params=params, query=query)
        view = await route.screen.view(ask)
        page_id = secrets.token_urlsafe(12)
        live = Live()
        body, _ = self._render(
            route, ask, view, live, visitor=visitor, request=request, page=page_id
        )
        if route.screen.live:
            self.sampler.remember(page_id, live.parts)
        return self.respond(request, body)

    async def sample(self, watched: Watched) -> Sample:
        """The live fragments of an address, for the sampler."""
        route, path, params, query = self.find(watched.url)
        caller = Caller(0, "viewer", watched.scopes)
        require_scope(caller, route.screen.scope)
        ask = self.ask(caller, path=path, params=params, query=query)
        live = Live()
        body, frame = self._render(route, ask, await route.screen.view(ask), live)
        return Sample(live.parts, frame, len(packed(body)))

    def find(self, url: str) -> tuple[Route, str, dict[str, str], dict[str, str]]:
        """Screen, path, parameters and query of an address. Raises: PageUnknown."""
        found = find_route(self.rooms, url)
        if found is None:
            raise PageUnknown("the console has no such page: the menu leads to all that it has")
        return found

    def message(
        self, request: Any, visitor: Visitor | None, *, status: int, code: str, text: str
    ) -> Response[bytes]:
        """A page that says why there is no other."""
        body = self._plain(
            "error.html",
            request,
            visitor,
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
        visitor: Visitor | None,
        template: str,
        *,
        status: int = 200,
        **values: Any,
    ) -> Response[bytes]:
        """A page around a form."""
        return self.respond(
            request, self._plain(template, request, visitor, **values), status=status
        )

    def fragment(self, template: str, **values: Any) -> Response[bytes]:
        """A piece of a page alone."""
        text = self._environment.get_template(template).render(**values)
        return Response(text.encode(), media_type=HTML, headers=page_headers(self.media_origin))

    def respond(self, request: Any, body: bytes, *, status: int = 200) -> Response[bytes]:
        """`body` with the policy of all pages, and the cookies that are due.

        That the mark of forms is packed beside texts of users tells nobody its letters by the length: requests of other
        sites come without the cookie that it belongs to.
        """
        headers = page_headers(self.media_origin)
        if len(body) > COMPRESSED_FROM_BYTES and takes_gzip(request):
            body, headers["content-encoding"] = packed(body), "gzip"
        answer = Response(body, media_type=HTML, status_code=status, headers=headers)
        if self.door.told(request) is not None:
            answer.cookies.append(told_over())
        return answer

    def _plain(self, template: str, request: Any, visitor: Visitor | None, **values: Any) -> bytes:
        caller = visitor.caller if visitor else Caller(0, "nobody", frozenset())
        parts = urlsplit(url_of(request))
        query = dict(parse_qsl(parts.query))
        live = Live()
        context = self._context(self.ask(caller, path=parts.path, params={}, query=query), live)
        context.update(self._frame(request, visitor), room=None, screen=None, page="", **values)
        return live.finish(self._environment.get_template(template).render(context))[0]

    def _render(
        self,
        route: Route,
        ask: Ask,
        view: Any,
        live: Live,
        *,
        visitor: Visitor | None = None,
        request: Any = None,
        page: str = "",
    ) -> tuple[bytes, str]:
        context = self._context(ask, live)
        context.update(
            self._frame(request, visitor),
            room=route.room,
            screen=route.screen,
            title=route.screen.title,
            view=view,
            page=page,
        )
        return live.finish(self._environment.get_template(route.screen.template).render(context))

    def _context(self, ask: Ask, live: Live) -> dict[str, Any]:
        return {"ask": ask, "now_at": ask.now_at, "live": live, "fragment": live}

    def _frame(self, request: Any, visitor: Visitor | None) -> dict[str, Any]:
        return {
            "visitor": visitor,
            "mark": visitor.mark if visitor else "",
            "theme": "auto" if request is None else theme_of(request),
            "told": None if request is None else self.door.told(request),
        }


def media_origin(house: Application) -> str:
    """Where browsers reach the media role; empty where it is not installed."""
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
    """Which screen an address of the console leads to, matched segment by segment."""
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
            f"token {caller.name!r} lacks the scope {scope}: log in with one that has it"
        )


def takes_gzip(request: Any) -> bool:
    """Whether the answer may be packed."""
    return "gzip" in request.headers.get("accept-encoding", "")


def url_of(request: Any) -> str:
    """The address that was asked for, as it was sent."""
    scope = request.scope
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path
