"""Pages for people beside the API: whose paths are theirs, and the way there from `/`.

They are made by someone above the web floor. What asks for `/` and wants HTML is a person with a browser, who
is sent there; every other path goes to the API.
"""

from __future__ import annotations

from typing import Any, Protocol


class Pages(Protocol):
    """An ASGI app whose paths begin with `prefix`; `templates` are the ones that metrics may name."""

    @property
    def prefix(self) -> str: ...

    @property
    def templates(self) -> set[str]: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class Beside:
    """The ASGI layer that hands requests to `pages` or on to `api`."""

    def __init__(self, pages: Pages, api: Any) -> None:
        self._pages, self._api = pages, api

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        path, prefix = scope["path"], self._pages.prefix
        if path == prefix or path.startswith(f"{prefix}/"):
            await self._pages(scope, receive, send)
        elif path == "/" and scope["method"] == "GET" and _wants_html(scope):
            scope["path_template"] = "/"
            place = (b"location", prefix.encode())
            headers = [place, (b"vary", b"Accept"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 303, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._api(scope, receive, send)


def _wants_html(scope: Any) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
