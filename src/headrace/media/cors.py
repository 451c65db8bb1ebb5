"""Which pages of other origins may read media (the CORS protocol of the Fetch standard), as `media.cors_origins` has it.

Pages may always embed media (`<audio>`, `<img>`). A script that reads bytes with `fetch`, or a canvas or Web Audio that uses
them, needs these fields; a range by script needs a preflight as well, in browsers that do not list `Range` as safe. Cookies are
never allowed: media need none. A preflight is answered without a look at the object or its signature, so it reveals nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

ANY: Final = "*"
ALLOWED_METHODS: Final = "GET, HEAD, OPTIONS"
PREFLIGHT_S: Final = 86_400
"""How long a browser may keep the answer to a preflight; Chromium keeps it for two hours at most."""
_ORIGIN: Final = re.compile(
    r"https?://(?:[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[1-9][0-9]{0,4})?"
)
_EXPOSED: Final = (
    "Accept-Ranges, Cache-Status, Content-Length, Content-Range, Date, ETag, Retry-After"
)
_REQUEST_FIELDS: Final = "Range, If-Range, If-Match, If-None-Match, If-Modified-Since, If-Unmodified-Since, Traceparent, Baggage"


def parse_origins(text: str) -> tuple[str, ...]:
    """`*`, or origins such as `https://a.example, http://localhost:3000`; the empty text is none. Raises: ValueError."""
    found = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    if found != (ANY,) and not all(_ORIGIN.fullmatch(origin) for origin in found):
        raise ValueError(
            "* or origins without a path such as https://a.example, http://localhost:3000"
        )
    return found


class Cors:
    """The fields that let scripts of other origins read an answer."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)
        self._is_any = origins == (ANY,)

    def lines(self, fields: Mapping[str, str]) -> str:
        """Of the answer to a request with `fields` (names in lower case), as they go out."""
        if not self._origins:
            return ""
        vary = "" if self._is_any else "Vary: Origin\r\n"
        allowed = ANY if self._is_any else fields.get("origin", "")
        if not self._is_any and allowed not in self._origins:
            return vary
        return (
            f"{vary}Access-Control-Allow-Origin: {allowed}\r\n"
            f"Access-Control-Expose-Headers: {_EXPOSED}\r\n"
        )

    def preflight_lines(self, fields: Mapping[str, str]) -> str:
        """Of the answer to OPTIONS."""
        lines = self.lines(fields)
        if "Access-Control-Allow-Origin" not in lines:
            return lines
        return (
            f"{lines}Access-Control-Allow-Methods: {ALLOWED_METHODS}\r\n"
            f"Access-Control-Allow-Headers: {_REQUEST_FIELDS}\r\n"
            f"Access-Control-Max-Age: {PREFLIGHT_S}\r\n"
        )
