"""Exact Host and Origin names, and which cross-origin requests web pages may send.

A web page on another origin may call a route marked FOR_PAGES with a valid publishable key in the address (`?k=hrk_...`).
Only such a request, its preflight and its response carry CORS headers. Every other cross-origin request that changes
something is refused before routing. Nothing ambient, such as a cookie, authorizes a cross-origin request.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Final

from litestar import Litestar

from headrace.web.auth import FOR_PAGES, KEY_IN_QUERY, Callers
from headrace.web.model import TokenRefused
from headrace.web.openapi import handlers_of
from headrace.web.parameters import path_pattern

PREFLIGHT_KEPT_S: Final = 86_400
_NAME: Final = r"(?:\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})"
_PORT: Final = r"(?::[0-9]{1,5})?"
_HOST: Final = re.compile(f"({_NAME}){_PORT}")
_ORIGIN: Final = re.compile(f"https?://({_NAME}{_PORT})")
_Headers = dict[bytes, bytes]
_Pairs = tuple[tuple[bytes, bytes], ...]


def host_name(host: str) -> str:
    """The name in a Host header without its port (`[::1]:80` -> `::1`), empty where the header is malformed."""
    found = _HOST.fullmatch(host.lower())
    return found[1].strip("[]") if found else ""


def origin_host(origin: str) -> str:
    """Host and port of an Origin header, empty where it is `null` or malformed."""
    found = _ORIGIN.fullmatch(origin.lower())
    return found[1] if found else ""


def is_address(name: str) -> bool:
    """Whether `name` is an IP address, which DNS cannot point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class PageRoutes:
    """The routes that web pages may call from another origin."""

    def __init__(self, app: Litestar, callers: Callers) -> None:
        self._callers = callers
        templates: dict[str, list[str]] = {}
        for method, template, handler in handlers_of(app):
            if handler.opt.get(FOR_PAGES):
                templates.setdefault(method, []).append(template)
        self._paths = {method: path_pattern("|".join(found)) for method, found in templates.items()}

    async def cors_headers(self, scope: Any, headers: _Headers) -> _Pairs:
        """The CORS headers of the response; none unless the route and the key allow the request.

        Raises: PostgresDown.
        """
        keys = KEY_IN_QUERY.findall(scope["query_string"])
        if len(keys) != 1 or b"authorization" in headers:
            return ()
        methods = [name for name, paths in self._paths.items() if paths.fullmatch(scope["path"])]
        if not methods or _method_of(scope, headers) not in methods:
            return ()
        try:
            await self._callers.require_key(keys[0].decode())
        except TokenRefused:
            return ()
        return (
            (b"access-control-allow-origin", b"*"),
            (b"access-control-allow-methods", ", ".join(sorted(methods)).encode()),
            (b"access-control-allow-headers", b"content-type"),
            (b"access-control-max-age", b"%d" % PREFLIGHT_KEPT_S),
        )


def _method_of(scope: Any, headers: _Headers) -> str:
    """The method of the request itself, or of the request that a preflight announces."""
    method: str = scope["method"]
    if method == "OPTIONS":
        method = headers.get(b"access-control-request-method", b"").decode("latin-1")
    return "GET" if method == "HEAD" else method
