"""The routes of actions: a form that says what will be done, and the doing, with a line in the audit.

Every action has one form, so that what it does, its command and its HTTP call are read before the button is pressed. With
scripts it opens above the page; without it is a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from litestar import Request, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect

from headrace.console.actions import Action, is_faulty, is_whole
from headrace.console.model import PREFIX, ActionUnknown, FieldsInvalid
from headrace.console.pages import Pages, require_scope, url_of
from headrace.console.security import WAY_BACK, Visitor, new_once, place_of, safe_back
from headrace.console.seeing import Ask
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.terminal import visible

_log: Final = logger(__name__)
KEPT_CHARACTERS_MAX: Final = 500
"""What is longer is not kept through a login: servers and proxies take addresses of a few KB alone."""
Asked = Request[Any, Any, Any]


class Doing:
    """Forms of actions and what they do."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._door = pages.door

    def routes(self) -> list[Any]:
        """The Litestar handlers."""

        @get(f"{PREFIX}/do/{{name:str}}")
        async def get_form(request: Asked, name: FromPath[str]) -> Response[bytes]:
            visitor = await self._door.visitor(request)
            action = self._action(name)
            require_scope(visitor.caller, action.scope)
            return await self._form(request, visitor, action, _query(request))

        @get(f"{PREFIX}/do/{{name:str}}/calls")
        async def get_calls(request: Asked, name: FromPath[str]) -> Response[bytes]:
            visitor = await self._visitor(request, _query(request))
            action = self._action(name)
            require_scope(visitor.caller, action.scope)
            return self._pages.fragment(
                "followed.html", **await self._told(visitor, action, _query(request))
            )

        @post(f"{PREFIX}/do/{{name:str}}", status_code=200)
        async def post_action(request: Asked, name: FromPath[str]) -> Response[Any]:
            given = {key: str(value) for key, value in dict(await request.form()).items()}
            visitor = await self._visitor(request, given)
            action = self._action(name)
            try:
                self._door.require_own_form(request, visitor, given)
                require_scope(visitor.caller, action.scope)
            except HeadraceError as refusal:
                line_id = await self._note(request, visitor, action, action.sketch(given))
                await self._pages.audit.end(line_id, "refused", refusal.public_text)
                raise
            try:
                values = action.parse(given)
            except FieldsInvalid as faults:
                return await self._form(request, visitor, action, given, faults=faults)
            back = safe_back(given.get("back", ""))
            ask = self._pages.ask(visitor.caller, path=back, params={}, query={})
            line_id = await self._note(request, visitor, action, values)
            tone, text = await self._do(
                ask, action, values, line_id=line_id, once=given.get("once", "")
            )
            if tone == "bad":
                return await self._form(request, visitor, action, given, refusal=text)
            return self._back(request, back, tone, text)

        return [get_form, get_calls, post_action]

    async def _visitor(self, request: Asked, given: Mapping[str, str]) -> Visitor:
        """Who looks; whoever has to log in first comes back to the form as it was filled in."""
        request.scope[WAY_BACK] = _form_url(request, given)  # type: ignore[typeddict-unknown-key]
        return await self._door.visitor(request)

    async def _note(
        self, request: Asked, visitor: Visitor, action: Action, values: dict[str, Any]
    ) -> int:
        """The id of the line of a try in the audit."""
        return await self._pages.audit.begin(
            actor=visitor.caller.name,
            address=place_of(request),
            action=action.name,
            command=action.as_command(values),
        )

    async def _do(
        self, ask: Ask, action: Action, values: dict[str, Any], *, line_id: int, once: str
    ) -> tuple[str, str]:
        """Tone and sentence of what became of it."""
        audit = self._pages.audit
        try:
            self._door.require_unsent(once)
            text = visible(await action.run(ask, values))
        except HeadraceError as refusal:
            await audit.end(line_id, "refused", refusal.public_text)
            return "bad", refusal.public_text
        except BaseException:
            await audit.end(line_id, "failed", "the server failed on this, which is our mistake")
            raise
        await audit.end(line_id, "done", text)
        _log.info("action_done", action=action.name, actor=ask.caller.name, audit_id=line_id)
        return "good", text

    async def _form(
        self,
        request: Asked,
        visitor: Visitor,
        action: Action,
        given: Mapping[str, str],
        *,
        faults: FieldsInvalid | None = None,
        refusal: str = "",
    ) -> Response[bytes]:
        """The form; with `faults` or a `refusal` it keeps what was typed."""
        return self._pages.form(
            request,
            visitor,
            "action.html",
            status=422 if faults or refusal else 200,
            title=action.title,
            given=given,
            once=new_once(),
            faults={p.pointer: p.text for p in faults.problems} if faults else {},
            refusal=refusal,
            back=safe_back(given.get("back", "")),
            **await self._told(visitor, action, given),
        )

    async def _told(
        self, visitor: Visitor, action: Action, given: Mapping[str, str]
    ) -> dict[str, Any]:
        """What a form says that it will do, as far as it is filled in."""
        values = action.sketch(given)
        preview = ""
        if action.preview is not None and is_whole(values):
            back = safe_back(given.get("back", ""))
            ask = self._pages.ask(visitor.caller, path=back, params={}, query={})
            try:
                preview = visible(await action.preview(ask, values))
            except HeadraceError as refusal:
                preview = refusal.public_text
        return {
            "action": action,
            "described": action.described(values),
            "preview": preview,
            "command": "" if is_faulty(values) else action.as_command(values),
            "http": action.as_http(values),
        }

    def _back(self, request: Asked, back: str, tone: str, text: str) -> Response[Any]:
        answer: Response[Any]
        if "hx-request" in request.headers:
            answer = Response(b"", status_code=200, headers={"hx-redirect": back})
        else:
            answer = Redirect(back, status_code=303)
        answer.cookies.append(self._door.told_cookie(tone, text))
        return answer

    def _action(self, name: str) -> Action:
        found = self._pages.actions.get(name)
        if found is None:
            raise ActionUnknown(f"the console has no action {name[:80]!r}")
        return found


def _query(request: Asked) -> dict[str, str]:
    return {key: request.query_params[key] for key in request.query_params}


def _form_url(request: Asked, given: Mapping[str, str]) -> str:
    """The address of a form that was sent, or asked what it would call."""
    place = urlsplit(url_of(request)).path.removesuffix("/calls")
    kept = {
        key: value
        for key, value in given.items()
        if key not in ("mark", "once") and len(value) <= KEPT_CHARACTERS_MAX
    }
    return f"{place}?{urlencode(kept)}" if kept else place
