"""The ASGI app of the console, mounted under `/console` beside the API.

It is a Litestar app of its own: it authenticates by session cookie, renders errors as pages, reads
form bodies, and none of its routes belongs to the OpenAPI document.

Every action has one form, with an audit entry for each submission, so its effect, its command and
its HTTP call can be read before the button is pressed. Scripts open the form as a dialog; without
scripts it is a page.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect, ServerSentEvent
from litestar.response.sse import ServerSentEventMessage

from headrace.console.actions import Action, Done, has_invalid, is_complete
from headrace.console.live import ClientState, LiveEvent, WatchedPage
from headrace.console.model import (
    BODY_BYTES_MAX,
    PREFIX,
    ActionUnknown,
    FieldsInvalid,
    LoginNeeded,
    PageUnknown,
    csp_reports,
)
from headrace.console.pages import PageRenderer, require_scope, takes_gzip, url_of
from headrace.console.screens import ROOMS
from headrace.console.screens.search import TEXT_CHARACTERS_MAX, find_matches
from headrace.console.security import (
    RETURN_URL,
    ConsoleSession,
    SessionAuth,
    client_address,
    new_form_id,
    safe_return_url,
    session_of,
    theme_cookie,
)
from headrace.console.uploads import receive_form
from headrace.console.views import ViewContext
from headrace.fetch.settings import FetchConfig
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.routes import ENDLESS
from headrace.kernel.terminal import visible
from headrace.web.model import Application, TokenRefused
from headrace.web.problems import headers_of, problem_response, to_headrace_error
from headrace.web.sessions import Sessions

_log: Final = logger(__name__)
KEPT_CHARACTERS_MAX: Final = 500
"""Longer values are not kept through a login, as servers and proxies limit URLs to a few KB."""
HttpRequest = Request[Any, Any, Any]


class ActionRoutes:
    """Serves the forms of actions and runs them."""

    def __init__(self, pages: PageRenderer) -> None:
        self._pages = pages
        self._auth = pages.auth

    def routes(self) -> list[Any]:
        """The Litestar handlers."""

        @get(f"{PREFIX}/do/{{name:str}}")
        async def get_form(request: HttpRequest, name: FromPath[str]) -> Response[bytes]:
            session = await self._auth.require_session(request)
            action = self._action(name)
            require_scope(session.caller, action.scope)
            return await self._form(request, session, action, _query(request))

        @get(f"{PREFIX}/do/{{name:str}}/calls")
        async def get_calls(request: HttpRequest, name: FromPath[str]) -> Response[bytes]:
            session = await self._session(request, _query(request))
            action = self._action(name)
            require_scope(session.caller, action.scope)
            return self._pages.fragment(
                "action_preview.html", **await self._summary(session, action, _query(request))
            )

        @post(f"{PREFIX}/do/{{name:str}}", status_code=200)
        async def post_action(request: HttpRequest, name: FromPath[str]) -> Response[Any]:
            given = {key: str(value) for key, value in dict(await request.form()).items()}
            session = await self._session(request, given)
            return await self._submit(request, session, self._action(name), given)

        @post(f"{PREFIX}/do/{{name:str}}/file", status_code=200, request_max_body_size=None)
        async def post_file(request: HttpRequest, name: FromPath[str]) -> Response[Any]:
            session = await self._session(request, {})
            action = self._action(name)
            # The body is read only for a caller that may run the action.
            require_scope(session.caller, action.scope)
            with tempfile.TemporaryDirectory(prefix="headrace-upload-") as folder:
                path = Path(folder) / "upload"
                bytes_max = self._pages.house.config.section(FetchConfig).catalogue_max_bytes
                given = await receive_form(request, path, bytes_max=bytes_max)
                return await self._submit(request, session, action, given, path=path)

        return [get_form, get_calls, post_action, post_file]

    async def _submit(
        self,
        request: HttpRequest,
        session: ConsoleSession,
        action: Action,
        given: Mapping[str, str],
        *,
        path: Path | None = None,
    ) -> Response[Any]:
        try:
            self._auth.require_csrf_token(request, session, given)
            require_scope(session.caller, action.scope)
        except HeadraceError as refusal:
            entry_id = await self._begin_audit(request, session, action, action.sketch(given))
            await self._pages.audit.end(entry_id, "refused", refusal.public_text)
            raise
        try:
            values = action.parse(given)
        except FieldsInvalid as faults:
            return await self._form(request, session, action, given, faults=faults)
        back = safe_return_url(given.get("back", ""))
        context = self._pages.view_context(session.caller, path=back, params={}, query={})
        context = replace(context, origin=request.headers["origin"])
        entry_id = await self._begin_audit(request, session, action, values)
        if path is not None:
            values["path"] = path
        tone, done = await self._run(
            context, action, values, entry_id=entry_id, form_id=given.get("form_id", "")
        )
        if tone == "bad" and not action.is_direct:
            return await self._form(request, session, action, given, refusal=done.text)
        return self._redirect(request, done.url or back, tone, done.text)

    async def _session(self, request: HttpRequest, given: Mapping[str, str]) -> ConsoleSession:
        """The session; a login leads back to the form as it was filled in."""
        request.scope[RETURN_URL] = _form_url(request, given)  # type: ignore[typeddict-unknown-key]
        return await self._auth.require_session(request)

    async def _begin_audit(
        self,
        request: HttpRequest,
        session: ConsoleSession,
        action: Action,
        values: dict[str, Any],
    ) -> int:
        """Record an attempt in the audit log; return the entry's id."""
        return await self._pages.audit.begin(
            actor=session.caller.name,
            address=client_address(request),
            action=action.name,
            command=action.as_command(values),
        )

    async def _run(
        self,
        context: ViewContext,
        action: Action,
        values: dict[str, Any],
        *,
        entry_id: int,
        form_id: str,
    ) -> tuple[str, Done]:
        """Run the action; return tone and result."""
        audit = self._pages.audit
        try:
            self._auth.require_first_submission(form_id)
            done = await action.apply(context, values)
        except HeadraceError as refusal:
            await audit.end(entry_id, "refused", refusal.public_text)
            return "bad", Done(refusal.public_text)
        except BaseException:
            await audit.end(entry_id, "failed", "internal error of the server")
            raise
        text = visible(done.text)
        await audit.end(entry_id, "done", text)
        _log.info("action_done", action=action.name, actor=context.caller.name, audit_id=entry_id)
        return "good", replace(done, text=text + done.unlogged)

    async def _form(
        self,
        request: HttpRequest,
        session: ConsoleSession,
        action: Action,
        given: Mapping[str, str],
        *,
        faults: FieldsInvalid | None = None,
        refusal: str = "",
    ) -> Response[bytes]:
        """The form; with `faults` or a `refusal` it keeps the typed values."""
        return self._pages.form(
            request,
            session,
            "action.html",
            status=422 if faults or refusal else 200,
            title=action.title,
            given=given,
            form_id=new_form_id(),
            faults={p.pointer: p.text for p in faults.problems} if faults else {},
            refusal=refusal,
            back=safe_return_url(given.get("back", "")),
            **await self._summary(session, action, given),
        )

    async def _summary(
        self, session: ConsoleSession, action: Action, given: Mapping[str, str]
    ) -> dict[str, Any]:
        """Description, preview, command and HTTP call of a form as far as it is filled in."""
        values = action.sketch(given)
        preview = ""
        if action.preview is not None and is_complete(values):
            back = safe_return_url(given.get("back", ""))
            context = self._pages.view_context(session.caller, path=back, params={}, query={})
            try:
                preview = visible(await action.preview(context, values))
            except HeadraceError as refusal:
                preview = refusal.public_text
        return {
            "action": action,
            "described": action.described(values),
            "preview": preview,
            "command": "" if has_invalid(values) else action.as_command(values),
            "http": action.as_http(values),
        }

    def _redirect(self, request: HttpRequest, back: str, tone: str, text: str) -> Response[Any]:
        answer: Response[Any]
        if "hx-request" in request.headers:
            answer = Response(b"", status_code=200, headers={"hx-redirect": back})
        else:
            answer = Redirect(back, status_code=303)
        answer.cookies.append(self._auth.flash_cookie(tone, text))
        return answer

    def _action(self, name: str) -> Action:
        found = self._pages.actions.get(name)
        if found is None:
            raise ActionUnknown(f"the console has no action {name[:80]!r}")
        return found


def _query(request: HttpRequest) -> dict[str, str]:
    return {key: request.query_params[key] for key in request.query_params}


def _form_url(request: HttpRequest, given: Mapping[str, str]) -> str:
    """URL of a form with the values that were sent to it."""
    path = urlsplit(url_of(request)).path.removesuffix("/calls").removesuffix("/file")
    kept = {
        key: value
        for key, value in given.items()
        if key not in ("csrf_token", "form_id") and len(value) <= KEPT_CHARACTERS_MAX
    }
    return f"{path}?{urlencode(kept)}" if kept else path


RETRY_MS: Final = 2_000
CLIENT_STATE: Final = ("page", "layout", "tab")
CACHE_FOREVER: Final = "public, max-age=31536000, immutable"
REPORT_CHARACTERS_MAX: Final = 2_000

DATA_KINDS: Final = ("json", "text/event-stream")
"""Parts of an Accept header without `text/html` that request an error as JSON."""
REDIRECT_PAGE: Final = f'<!doctype html><meta http-equiv="refresh" content="0; url={PREFIX}">'
"""Leads from a link on another site to the console."""


class Console:
    """The ASGI app; implements `headrace.web.server.Pages`."""

    prefix = PREFIX

    def __init__(self, house: Application) -> None:
        self._auth = SessionAuth(house, Sessions(house.engines.postgres))
        self._pages = PageRenderer(house, self._auth, ROOMS)
        self._app = Litestar(
            route_handlers=[
                self._asset_route(),
                *self._login_routes(),
                *self._live_routes(),
                *ActionRoutes(self._pages).routes(),
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
        """The path templates that label the metrics."""
        screens = {PREFIX + screen.path.rstrip("/") for room in ROOMS for screen in room.screens}
        return screens | {route.path_format for route in self._app.routes}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)

    def _screen_routes(self) -> list[Any]:
        @get([PREFIX, f"{PREFIX}/{{rest:path}}"])
        async def get_screen(request: HttpRequest) -> Response[bytes]:
            return await self._pages.screen(request)

        return [get_screen]

    def _asset_route(self) -> Any:
        @get(f"{PREFIX}/assets/{{name:path}}", sync_to_thread=False)
        def get_asset(request: HttpRequest) -> Response[bytes]:
            name = request.scope["path"].removeprefix(f"{PREFIX}/assets/")
            found = self._pages.assets.find(name)
            if found is None:
                raise PageUnknown("the console has no such file")
            headers = {"etag": f'"{found.tag}"', "vary": "Accept-Encoding"}
            is_tagged = request.query_params.get("v") == found.tag
            headers["cache-control"] = CACHE_FOREVER if is_tagged else "no-cache"
            if request.headers.get("if-none-match") == headers["etag"]:
                return Response(b"", status_code=304, headers=headers)
            body = found.body
            if found.packed and takes_gzip(request):
                body, headers["content-encoding"] = found.packed, "gzip"
            return Response(body, media_type=found.media_type, headers=headers)

        return get_asset

    def _login_form(
        self, request: HttpRequest, back: str, refusal: HeadraceError | None = None
    ) -> Response[Any]:
        status, text = (refusal.status, refusal.public_text) if refusal else (200, "")
        page = {"title": "Log in", "back": back, "text": text}
        return self._pages.form(request, None, "login.html", status=status, **page)

    def _login_routes(self) -> list[Any]:
        auth = self._auth

        @get(f"{PREFIX}/login")
        async def get_login(request: HttpRequest) -> Response[Any]:
            return self._login_form(request, safe_return_url(request.query_params.get("back", "")))

        @get(f"{PREFIX}/enter")
        async def get_enter(request: HttpRequest) -> Response[Any]:
            # Link previews and prefetching browsers must not consume the one-time link.
            mode = request.headers.get("sec-fetch-mode", "navigate")
            is_opened = mode == "navigate" and "origin" not in request.headers
            if request.scope.get("is_head") or "sec-purpose" in request.headers or not is_opened:
                return Response(b"", status_code=204, headers={"cache-control": "no-store"})
            code = request.query_params.get("code", "")
            try:
                cookie = await auth.login_by_link(code, client_address(request))
            except TokenRefused as refusal:
                return self._login_form(request, PREFIX, refusal)
            answer: Response[Any] = Redirect(PREFIX, status_code=303)
            if request.headers.get("sec-fetch-site") == "cross-site":
                # After a redirect, the navigation still counts as cross-site, so the browser
                # would not send the SameSite=Strict cookie.
                answer = Response(REDIRECT_PAGE, media_type="text/html; charset=utf-8")
            answer.cookies.append(auth.session_cookie(request, cookie))
            return answer

        @post(f"{PREFIX}/login", status_code=200)
        async def post_login(request: HttpRequest) -> Response[Any]:
            given = dict(await request.form())
            back = safe_return_url(str(given.get("back", "")))
            try:
                cookie = await auth.login(str(given.get("token", "")), client_address(request))
            except HeadraceError as refusal:
                return self._login_form(request, back, refusal)
            answer: Response[Any] = Redirect(back, status_code=303)
            answer.cookies.append(auth.session_cookie(request, cookie))
            return answer

        @post(f"{PREFIX}/logout", status_code=200)
        async def post_logout(request: HttpRequest) -> Response[Any]:
            session = await auth.require_session(request)
            auth.require_csrf_token(request, session, dict(await request.form()))
            await auth.logout(session)
            answer: Response[Any] = Redirect(f"{PREFIX}/login", status_code=303)
            answer.cookies.append(auth.session_cookie(request, ""))
            return answer

        @post(f"{PREFIX}/theme", status_code=200)
        async def post_theme(request: HttpRequest) -> Response[Any]:
            given = dict(await request.form())
            back = safe_return_url(str(given.get("back", "")))
            answer: Response[Any] = Redirect(back, status_code=303)
            answer.cookies.append(theme_cookie(str(given.get("theme", ""))))
            return answer

        return [get_login, get_enter, post_login, post_logout, post_theme]

    def _live_routes(self) -> list[Any]:
        pages = self._pages

        @get(f"{PREFIX}/live")
        async def get_live(request: HttpRequest) -> Response[Any]:
            session = await self._auth.require_session(request)
            url = safe_return_url(request.query_params.get("url", ""))
            route, *_ = pages.find(url)
            require_scope(session.caller, route.scope)
            pages.sampler.require_room()
            given = {name: request.query_params.get(name, "")[:64] for name in CLIENT_STATE}
            events = pages.sampler.watch(
                WatchedPage(url, session.caller.scopes),
                ClientState(**given),
                lambda: self._auth.is_valid(session),
            )
            request.scope[ENDLESS] = True  # type: ignore[typeddict-unknown-key]
            answer: Response[Any] = ServerSentEvent(_messages(events))
            return answer

        @post(f"{PREFIX}/csp", status_code=204)
        async def post_csp(request: HttpRequest) -> None:
            body = await request.body()
            csp_reports.inc()
            _log.warning(
                "csp_report", report=body[:REPORT_CHARACTERS_MAX].decode("utf-8", "replace")
            )

        @get(f"{PREFIX}/palette")
        async def get_palette(request: HttpRequest) -> Response[bytes]:
            session = await self._auth.require_session(request)
            query = {"q": request.query_params.get("q", "")}
            context = pages.view_context(session.caller, path=PREFIX, params={}, query=query)
            text = context.query.text("q", most=TEXT_CHARACTERS_MAX).strip()
            body = msgspec.json.encode(await find_matches(context, text))
            headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
            return Response(body, media_type="application/json", headers=headers)

        return [get_live, get_palette, post_csp]

    def _render_error(self, request: HttpRequest, error: Exception) -> Response[Any]:
        ours = to_headrace_error(error)
        accept = request.headers.get("accept", "")
        is_data = "text/html" not in accept and any(kind in accept for kind in DATA_KINDS)
        if is_data and "hx-request" not in request.headers:
            return problem_response(ours)
        if isinstance(ours, LoginNeeded):
            return _to_login(request)
        answer = self._pages.message(
            request,
            session_of(request),
            status=ours.status,
            code=ours.code,
            text=ours.public_text,
        )
        for name, value in headers_of(ours).items():
            answer.headers.setdefault(name, value)
        return answer


async def _messages(events: AsyncIterator[LiveEvent]) -> AsyncIterator[ServerSentEventMessage]:
    yield ServerSentEventMessage(data=None, retry=RETRY_MS, comment="start of the stream")
    async for one in events:
        yield ServerSentEventMessage(data=one.data, event=one.event, id=one.at or None)


def _to_login(request: HttpRequest) -> Response[Any]:
    back = quote(str(request.scope.get(RETURN_URL) or url_of(request)), safe="")
    login = f"{PREFIX}/login?back={back}"
    if "hx-request" in request.headers:
        return Response(b"", status_code=200, headers={"hx-redirect": login})
    return Redirect(login, status_code=303)
