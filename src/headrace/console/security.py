"""Sessions of the console and the security headers of its pages.

A session in PostgreSQL represents a token. It lasts `console.session` and ends with the token. A
session starts with a one-time link from `headrace up` or `headrace console link`, or with the
token itself. The peer's address and proxy headers never start one. The cookie is HttpOnly and
SameSite=Strict, and each form carries the CSRF token of its session.

Pages load scripts, styles and data from this origin only, and pictures and sound from the media
role as well. Nothing runs inline, so user text that slipped through as markup would not run.
Browsers report violations of this policy; reports are logged and counted.
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
FLASH_COOKIE: Final = "headrace_flash"
THEME_COOKIE: Final = "headrace_theme"
SESSION: Final = "headrace.console.session"
"""ASGI scope key of the request's session."""
RETURN_URL: Final = "headrace.console.return_url"
"""ASGI scope key of the URL after login, where it differs from the requested URL."""
THEMES: Final = ("auto", "light", "dark")
FLASH_BYTES_MAX: Final = 1_500
FORM_IDS_MAX: Final = 10_000
"""Ids of submitted forms that this process remembers."""
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:{media};"
    " media-src 'self'{media}; connect-src 'self'; form-action 'self'; frame-ancestors 'none';"
    f" base-uri 'none'; report-uri {PREFIX}/csp; report-to csp"
)
_log: Final = logger(__name__)
_COOKIE: Final = re.compile(r"[0-9A-Za-z_-]{43}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSession:
    """A logged-in caller, the session cookie, and the CSRF token of the session's forms."""

    caller: Caller
    cookie: str
    csrf_token: str


class SessionAuth:
    """Starts, checks and ends sessions of the console."""

    def __init__(self, house: Application, sessions: Sessions) -> None:
        self._config = house.config.section(ConsoleConfig)
        self._house = house
        self._sessions = sessions
        self._submitted: OrderedDict[str, None] = OrderedDict()
        self._often = SparseLogger(_log)

    async def require_session(self, request: Any) -> ConsoleSession:
        """Return the session and store it in the scope. Raises: LoginNeeded, PostgresDown."""
        session = await self._find(request)
        request.scope[SESSION] = session
        return session

    async def _find(self, request: Any) -> ConsoleSession:
        cookie = request.cookies.get(SESSION_COOKIE, "")
        is_well_formed = _COOKIE.fullmatch(cookie) is not None
        caller = await self._sessions.find(cookie) if is_well_formed else None
        if caller is None:
            raise LoginNeeded(
                "the console needs a login: open a link from `headrace console link`, or enter a"
                " token"
            )
        return ConsoleSession(caller=caller, cookie=cookie, csrf_token=self._csrf_token(cookie))

    async def is_valid(self, session: ConsoleSession) -> bool:
        """Whether `session` is valid; True while PostgreSQL is down, as none can end then."""
        try:
            caller = await self._sessions.find(session.cookie)
        except Unavailable:
            return True
        return caller is not None and caller.scopes == session.caller.scopes

    def require_csrf_token(
        self, request: Any, session: ConsoleSession, given: Mapping[str, str]
    ) -> None:
        """Refuse a form from elsewhere. Raises: OriginRefused, FormRefused."""
        origin = request.headers.get("origin", "")
        if origin_host(origin) != request.headers.get("host", "").lower():
            raise OriginRefused(
                f"origin {origin[:80]!r} may not send forms: use the console's own pages"
            )
        sent = str(given.get("csrf_token", "")).encode()
        if not hmac.compare_digest(sent, session.csrf_token.encode()):
            raise FormRefused(
                "this form belongs to a session that has ended: reload its page and send it again"
            )

    def require_first_submission(self, form_id: str) -> None:
        """Refuse a form that was sent before, as by a double click. Raises: FormRefused."""
        form_id = form_id[:64]
        if form_id in self._submitted:
            raise FormRefused(
                "this form was already sent and is not applied twice: open it again to repeat it"
            )
        if form_id:
            self._submitted[form_id] = None
        if len(self._submitted) > FORM_IDS_MAX:
            self._submitted.popitem(last=False)

    async def login(self, token: str, address: str) -> str:
        """Start a session with `token`; return its cookie. Raises: TokenRefused."""
        try:
            return await self._sessions.begin(token, lasts_s=self._config.session_s)
        except TokenRefused as refusal:
            self._often.warning("logins_refused", address=address)
            raise TokenRefused(
                "this token is not valid here: check that it is complete and not revoked;"
                " `headrace tokens create` makes a new one"
            ) from refusal

    async def login_by_link(self, code: str, address: str) -> str:
        """Start a session with a one-time link; return its cookie. Raises: TokenRefused."""
        try:
            return await self._sessions.begin_by_link(code, lasts_s=self._config.session_s)
        except TokenRefused as refusal:
            self._often.warning("logins_refused", address=address)
            raise TokenRefused(
                "this link was used or has expired: `headrace console link` prints a new one"
            ) from refusal

    async def logout(self, session: ConsoleSession) -> None:
        """End a session."""
        await self._sessions.end(session.cookie)

    def session_cookie(self, request: Any, text: str) -> Cookie:
        """The cookie that starts a session, or ends it if `text` is empty."""
        lasts_s = int(self._config.session_s) if text else 0
        # Behind a TLS proxy, the browser must never send the cookie in plain text.
        is_secure = request.headers.get("x-forwarded-proto") == "https"
        return _cookie(SESSION_COOKIE, text, lasts_s, is_secure=is_secure)

    def flash_cookie(self, tone: str, text: str) -> Cookie:
        """The signed cookie that carries the result of an action to the next page."""
        plain = f"{tone}.{text}".encode("utf-8", "replace")[:FLASH_BYTES_MAX].hex()
        signature = self._key().sign(plain.encode()).hex()[:32]
        return _cookie(FLASH_COOKIE, signature + plain, 60)

    def flash(self, request: Any) -> tuple[str, str] | None:
        """Tone and text of a valid flash cookie; None for a fragment, which is no next page."""
        if "hx-request" in request.headers:
            return None
        given = request.cookies.get(FLASH_COOKIE, "")
        signature, plain = given[:32], given[32:]
        expected = self._key().sign(plain.encode("latin-1", "replace")).hex()[:32]
        if not plain or not hmac.compare_digest(signature.encode(), expected.encode()):
            return None
        tone, _, text = bytes.fromhex(plain).decode(errors="ignore").partition(".")
        return tone, text

    def _csrf_token(self, cookie: str) -> str:
        return self._key().sign(b"form " + cookie.encode()).hex()[:32]

    def _key(self) -> Key:
        return derive_key(self._house.secret, "console")


def new_form_id() -> str:
    """A random id that makes one form submission unique."""
    return secrets.token_urlsafe(12)


def client_address(request: Any) -> str:
    """IP address of the request's client."""
    address: str = (request.scope.get("client") or ("unknown", 0))[0]
    return address


def session_of(request: Any) -> ConsoleSession | None:
    """The session that `require_session` stored, if it ran."""
    session: ConsoleSession | None = request.scope.get(SESSION)
    return session


def expired_flash_cookie() -> Cookie:
    """The cookie that removes the flash message."""
    return _cookie(FLASH_COOKIE, "", 0)


def theme_cookie(theme: str) -> Cookie:
    """The cookie that stores the chosen theme."""
    return _cookie(THEME_COOKIE, theme if theme in THEMES else THEMES[0], 366 * 86_400)


def theme_of(request: Any) -> str:
    """`auto`, `light` or `dark`."""
    theme: str = request.cookies.get(THEME_COOKIE, "")
    return theme if theme in THEMES else THEMES[0]


def page_headers(media_origin: str) -> dict[str, str]:
    """Security headers of every page."""
    media = f" {media_origin}" if media_origin else ""
    return {
        "content-security-policy": CSP.format(media=media),
        "reporting-endpoints": f'csp="{PREFIX}/csp"',
        # With `no-referrer`, browsers would hide the Origin of the console's own forms.
        "referrer-policy": "same-origin",
        "x-frame-options": "DENY",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
        "vary": "Accept-Encoding, Cookie, HX-Request",
    }


def safe_return_url(given: str) -> str:
    """`given` if it is a page of the console, else the overview."""
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
