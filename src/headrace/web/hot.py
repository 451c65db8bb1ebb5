"""The hot routes: plain ASGI between the guard and Litestar, for handlers that carry a fast path in their `opt`.

A Litestar route costs 55 us of CPU more a request than a plain ASGI handler (prototypes of 2026-11-21: 9,400 reads a second
of 20 counters a process through a route, 20,000 through a router in front). Only what is plain is answered here: the
method and path of a hot route, no body, nothing escaped, no parameter twice. All else goes on to Litestar.
Tokens, scopes, errors, metrics and trace are those of every other route: the same functions, called directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from litestar import Litestar

from headrace.kernel.hot import HOT, HotAnswer, HotPath, HotRequest
from headrace.web.auth import FOR_PAGES, Callers, require_scope, scope_of
from headrace.web.model import WHOLE_ANSWER
from headrace.web.openapi import handlers_of
from headrace.web.problems import MEDIA_TYPE, as_ours, headers_of, problem_of
from headrace.web.quotas import Quotas

_JSON: Final = (b"content-type", b"application/json")
_REFUSED: Final = frozenset({b"transfer-encoding", b"idempotency-key", b"content-encoding"})
"""Headers whose meaning Litestar's guards judge."""


@dataclass(frozen=True, slots=True)
class HotRoute:
    """One hot route: `prefix`, one name without a slash, `suffix`; or the prefix alone."""

    template: str
    prefix: str
    suffix: str | None
    scope: str
    for_pages: bool
    run: HotPath
    service: Any


class HotRoutes:
    """The ASGI layer in front of `app`."""

    def __init__(
        self, app: Litestar, callers: Callers, quotas: Quotas, services: dict[str, Any]
    ) -> None:
        self._app, self._callers, self._quotas = app, callers, quotas
        self._exact: dict[tuple[str, str], HotRoute] = {}
        self._named: dict[str, list[HotRoute]] = {}
        for method, template, handler in handlers_of(app):
            if HOT in handler.opt:
                self._add(method, template, handler, services)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        found = self.find(scope["method"], scope["path"])
        if found is None:
            await self._app(scope, receive, send)
            return
        route, name = found
        scope["path_template"] = route.template
        try:
            answer = await self._answer(route, name, scope)
        except Exception as error:  # noqa: BLE001 - every failure is told as a problem, as Litestar's handler does
            await _send_problem(send, error)
            return
        if answer is None:
            await self._app(scope, receive, send)
            return
        length = (b"content-length", b"%d" % len(answer.body))
        headers = [_JSON, length, *answer.headers]
        if WHOLE_ANSWER in scope.get("extensions", ()):
            status, body = answer.status, answer.body
            await send({"type": WHOLE_ANSWER, "status": status, "headers": headers, "body": body})
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def answer(
        self,
        route: HotRoute,
        name: str,
        query_string: bytes,
        scope: Any,
        *,
        authorization: str | None,
        user_agent: str | None,
        if_none_match: str | None = None,
    ) -> HotAnswer | None:
        """The answer of `route` to a request without a body, or None: it is Litestar's. Raises: what the route raises.

        `scope` takes what the request is charged.
        """
        query = _plain_query(query_string)
        if query is None:
            return None
        if route.for_pages:
            caller = await self._callers.require_caller_of(authorization, query_string)
        else:
            caller = await self._callers.require_caller(authorization)
        require_scope(caller, route.scope)
        self._quotas.charge(caller, scope)
        asked = HotRequest(name, query, user_agent, if_none_match, caller.is_publishable)
        return await route.run(route.service, asked)

    def _add(self, method: str, template: str, handler: Any, services: dict[str, Any]) -> None:
        prefix, brace, rest = template.partition("{")
        scope = scope_of(handler)
        assert scope is not None, f"{template}: a hot route names its scope"
        [service] = [name for name in services if name in handler.parsed_fn_signature.parameters]
        route = HotRoute(
            template,
            prefix,
            rest.partition("}")[2] if brace else None,
            scope,
            bool(handler.opt.get(FOR_PAGES)),
            handler.opt[HOT],
            services[service],
        )
        if brace:
            self._named.setdefault(method, []).append(route)
        else:
            self._exact[method, template] = route

    def find(self, method: str, path: str) -> tuple[HotRoute, str] | None:
        """The hot route of a request, and the name in its path."""
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact, ""
        for route in self._named.get(method, ()):
            if path.startswith(route.prefix):
                name = path[len(route.prefix) :]
                if route.suffix:
                    if not name.endswith(route.suffix):
                        continue
                    name = name[: -len(route.suffix)]
                if name and "/" not in name:
                    return route, name
        return None

    async def _answer(self, route: HotRoute, name: str, scope: Any) -> HotAnswer | None:
        if b"%" in scope["raw_path"]:
            return None
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not _REFUSED.isdisjoint(headers) or headers.get(b"content-length", b"0") != b"0":
            return None
        return await self.answer(
            route,
            name,
            scope["query_string"],
            scope,
            authorization=_text(headers.get(b"authorization")),
            user_agent=_text(headers.get(b"user-agent")),
            if_none_match=_text(headers.get(b"if-none-match")),
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _plain_query(query_string: bytes) -> dict[str, str] | None:
    """The parameters, or None if any is escaped, without a value or given twice."""
    if not query_string:
        return {}
    if b"%" in query_string or b"+" in query_string:
        return None
    found: dict[str, str] = {}
    parts = query_string.decode("latin-1").split("&")
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not value:
            return None
        found[name] = value
    return found if len(found) == len(parts) else None


async def _send_problem(send: Any, error: Exception) -> None:
    ours = as_ours(error)
    body = msgspec.json.encode(problem_of(ours))
    headers = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), **headers_of(ours)}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": ours.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
