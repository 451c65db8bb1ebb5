"""Routes of actions: a form that describes the effect, and its submission with an audit entry.

Every action has one form, so its effect, its command and its HTTP call can be read before the
button is pressed. Scripts open the form as a dialog; without scripts it is a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from litestar import Request, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect

from headrace.console.actions import Action, has_invalid, is_complete
from headrace.console.model import PREFIX, ActionUnknown, FieldsInvalid
from headrace.console.pages import PageRenderer, require_scope, url_of
from headrace.console.security import (
    RETURN_URL,
    ConsoleSession,
    client_address,
    new_form_id,
    safe_return_url,
)
from headrace.console.views import ViewContext
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.terminal import visible

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

        return [get_form, get_calls, post_action]

    async def _submit(
        self,
        request: HttpRequest,
        session: ConsoleSession,
        action: Action,
        given: Mapping[str, str],
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
        entry_id = await self._begin_audit(request, session, action, values)
        tone, text = await self._run(
            context, action, values, entry_id=entry_id, form_id=given.get("form_id", "")
        )
        if tone == "bad":
            return await self._form(request, session, action, given, refusal=text)
        return self._redirect(request, back, tone, text)

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
    ) -> tuple[str, str]:
        """Run the action; return tone and text of its result."""
        audit = self._pages.audit
        try:
            self._auth.require_first_submission(form_id)
            text = visible(await action.run(context, values))
        except HeadraceError as refusal:
            await audit.end(entry_id, "refused", refusal.public_text)
            return "bad", refusal.public_text
        except BaseException:
            await audit.end(entry_id, "failed", "internal error of the server")
            raise
        await audit.end(entry_id, "done", text)
        _log.info("action_done", action=action.name, actor=context.caller.name, audit_id=entry_id)
        return "good", text

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
    path = urlsplit(url_of(request)).path.removesuffix("/calls")
    kept = {
        key: value
        for key, value in given.items()
        if key not in ("csrf_token", "form_id") and len(value) <= KEPT_CHARACTERS_MAX
    }
    return f"{path}?{urlencode(kept)}" if kept else path
