"""Who may see the console, and what its pages may do.

A session in PostgreSQL stands for a token: it lasts `console.session` and ends with the token. A one-time link of
`headrace up` or `headrace console link` begins one, or the token itself, shown once. Nothing else does: neither the
address of the peer nor a header of a proxy. The cookie is HttpOnly and SameSite=Strict; a form needs the mark of its
session besides, which only our pages know.

Pages may load scripts, styles and data from here alone, pictures and sound from the media role as well; nothing is inline, so
text of users that slipped through as markup would still run nothing. What breaks this is reported and counted.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from litestar.datastructures import Cookie

from headrace.console.model import PREFIX, ConsoleConfig, FormRefused, LoginNeeded
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.signing import Key, derive_key
from headrace.web.guard import origin_host
from headrace.web.model import Application, OriginRefused, TokenRefused
from headrace.web.sessions import Sessions
from headrace.web.tokens import Caller

SESSION_COOKIE: Final = "headrace_console"
TOLD_COOKIE: Final = "headrace_told"
THEME_COOKIE: Final = "headrace_theme"
VISITOR: Final = "headrace.console.visitor"
"""The key in an ASGI scope."""
WAY_BACK: Final = "headrace.console.way_back"
"""The key in an ASGI scope of where a login leads back to, where that is not what was asked for."""
THEMES: Final = ("auto", "light", "dark")
TOLD_BYTES_MAX: Final = 1_500
SENT_MAX: Final = 10_000
"""Forms that were sent are remembered up to so many, each until this process ends."""
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:{media};"
    " media-src 'self'{media}; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
    f" base-uri 'none'; report-uri {PREFIX}/csp; report-to csp"
)
_log: Final = logger(__name__)
_COOKIE: Final = re.compile(r"[0-9A-Za-z_-]{43}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who looks: the caller, the text of the session's cookie, and the mark that its forms carry."""

    caller: Caller
    cookie: str
    mark: str


class Door:
    """Lets visitors in."""

    def __init__(self, house: Application, sessions: Sessions) -> None:
        self._config = house.config.section(ConsoleConfig)
        self._house = house
        self._sessions = sessions
        self._sent: OrderedDict[str, None] = OrderedDict()
        self._often = SparseLogger(_log)

    async def visitor(self, request: Any) -> Visitor:
        """Who looks; `visitor_of` knows it from then on. Raises: LoginNeeded, PostgresDown."""
        visitor = await self._visitor(request)
        request.scope[VISITOR] = visitor
        return visitor

    async def _visitor(self, request: Any) -> Visitor:
        cookie = request.cookies.get(SESSION_COOKIE, "")
        is_known = _COOKIE.fullmatch(cookie) is not None
        caller = await self._sessions.find(cookie) if is_known else None
        if caller is None:
            raise LoginNeeded(
                "the console needs a login: open a link of `headrace console link`, or show a token"
            )
        return Visitor(caller=caller, cookie=cookie, mark=self._mark(cookie))

    async def is_still_in(self, visitor: Visitor) -> bool:
        """Whether the session of `visitor` goes on; while PostgreSQL is away it does, since nobody can end it then."""
        try:
            caller = await self._sessions.find(visitor.cookie)
        except Unavailable:
            return True
        return caller is not None and caller.scopes == visitor.caller.scopes

    def require_own_form(self, request: Any, visitor: Visitor, given: Mapping[str, str]) -> None:
        """Refuse a form that is not of this session's pages. Raises: OriginRefused, FormRefused."""
        origin = request.headers.get("origin", "")
        if origin_host(origin) != request.headers.get("host", "").lower():
            raise OriginRefused(
                f"origin {origin[:80]!r} may not change anything here: use the console's own pages"
            )
        if not hmac.compare_digest(str(given.get("mark", "")).encode(), visitor.mark.encode()):
            raise FormRefused(
                "this form is of a session that has ended: load its page again, then send it"
            )

    def require_unsent(self, once: str) -> None:
        """Refuse a form that was sent already, by a double press or sent again by a browser. Raises: FormRefused."""
        once = once[:64]
        if once in self._sent:
            raise FormRefused(
                "this form was sent before, and nothing was done again: open it anew to do it once more"
            )
        if once:
            self._sent[once] = None
        if len(self._sent) > SENT_MAX:
            self._sent.popitem(last=False)

    async def login(self, token: str, place: str) -> str:
        """The cookie of a new session for whoever holds `token`. Raises: TokenRefused, in a person's words."""
        try:
            return await self._sessions.begin(token, lasts_s=self._config.session_s)
        except TokenRefused as refusal:
            self._often.warning("logins_refused", place=place)
            raise TokenRefused(
                "this is not a valid token here: see that all of it was copied, and that it was not"
                " revoked; `headrace tokens create` makes one"
            ) from refusal

    async def enter(self, code: str, place: str) -> str:
        """The cookie of a new session by a one-time link. Raises: TokenRefused, in a person's words."""
        try:
            return await self._sessions.begin_by_link(code, lasts_s=self._config.session_s)
        except TokenRefused as refusal:
            self._often.warning("logins_refused", place=place)
            raise TokenRefused(
                "this link was used or has expired: `headrace console link` prints a new one"
            ) from refusal

    async def logout(self, visitor: Visitor) -> None:
        """End a session."""
        await self._sessions.end(visitor.cookie)

    def session_cookie(self, request: Any, text: str) -> Cookie:
        """The cookie that begins a session, or with an empty text ends it."""
        lasts_s = int(self._config.session_s) if text else 0
        # Behind a proxy that speaks TLS the cookie never leaves it again.
        is_secure = request.headers.get("x-forwarded-proto") == "https"
        return _cookie(SESSION_COOKIE, text, lasts_s, is_secure=is_secure)

    def told_cookie(self, tone: str, text: str) -> Cookie:
        """The cookie that carries what was done to the next page; signed, so that no one else tells."""
        plain = f"{tone}.{text}".encode("utf-8", "replace")[:TOLD_BYTES_MAX].hex()
        signature = self._key().sign(plain.encode()).hex()[:32]
        return _cookie(TOLD_COOKIE, signature + plain, 60)

    def told(self, request: Any) -> tuple[str, str] | None:
        """Tone and text of that cookie, if it is ours. A piece that a script asks for is no next page."""
        if "hx-request" in request.headers:
            return None
        given = request.cookies.get(TOLD_COOKIE, "")
        signature, plain = given[:32], given[32:]
        expected = self._key().sign(plain.encode("latin-1", "replace")).hex()[:32]
        if not plain or not hmac.compare_digest(signature.encode(), expected.encode()):
            return None
        tone, _, text = bytes.fromhex(plain).decode(errors="ignore").partition(".")
        return tone, text

    def _mark(self, cookie: str) -> str:
        return self._key().sign(b"form " + cookie.encode()).hex()[:32]

    def _key(self) -> Key:
        return derive_key(self._house.secret, "console")


def new_once() -> str:
    """What a form carries so that it is sent once."""
    return secrets.token_urlsafe(12)


def place_of(request: Any) -> str:
    """The address that a request came from."""
    place: str = (request.scope.get("client") or ("unknown", 0))[0]
    return place


def visitor_of(request: Any) -> Visitor | None:
    """Who looks, where that was asked already."""
    visitor: Visitor | None = request.scope.get(VISITOR)
    return visitor


def told_over() -> Cookie:
    """The cookie after which nothing is told any more."""
    return _cookie(TOLD_COOKIE, "", 0)


def theme_cookie(theme: str) -> Cookie:
    """The cookie that keeps how a visitor wants pages to look."""
    return _cookie(THEME_COOKIE, theme if theme in THEMES else THEMES[0], 366 * 86_400)


def theme_of(request: Any) -> str:
    """`auto`, `light` or `dark`."""
    theme: str = request.cookies.get(THEME_COOKIE, "")
    return theme if theme in THEMES else THEMES[0]


def page_headers(media_origin: str) -> dict[str, str]:
    """The headers of every page. `same-origin`: with `no-referrer` browsers would hide the Origin of our own forms."""
    media = f" {media_origin}" if media_origin else ""
    return {
        "content-security-policy": CSP.format(media=media),
        "reporting-endpoints": f'csp="{PREFIX}/csp"',
        "referrer-policy": "same-origin",
        "x-frame-options": "DENY",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
        "vary": "Accept-Encoding, Cookie, HX-Request",
    }


def safe_back(given: str) -> str:
    """Where to go back to: a page of the console, whatever was asked."""
    parts = urlsplit(given)
    is_ours = parts.path == PREFIX or parts.path.startswith(f"{PREFIX}/")
    is_plain = given.isascii() and given.isprintable() and "\\" not in given
    is_plain = is_plain and not parts.scheme and not parts.netloc
    return given if is_ours and is_plain and not given.startswith("//") else PREFIX


def _cookie(name: str, text: str, lasts_s: int, *, is_secure: bool = False) -> Cookie:
    return Cookie(
        key=name,
        value=text,
        path=PREFIX,
        max_age=lasts_s,
        secure=is_secure,
        httponly=True,
        samesite="strict",
    )
