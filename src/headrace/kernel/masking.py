"""How URLs are shown in errors and lists without their secrets, also if they are wrong.

A password with an unescaped character makes a URL that parsers split differently. What may be a
part of a password is masked.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

MASK: Final = "(masked)"
"""Replaces a secret in a shown URL."""
NAMED_USER: Final = frozenset(
    {"postgresql", "postgres", "redis", "rediss", "valkey", "valkeys", "unix"}
)
"""Schemes with a public user name; with others a lone user may be a token or access key."""
_SECRET_PARAMETER: Final = re.compile(r"(?i)pass|pwd|secret|key|token|credential|sig|auth|jwt|code")
_ENGINES: Final = NAMED_USER | {"s3", "file"}
_URL_START: Final = re.compile(r"([a-z][a-z0-9+]{0,20})(:?)(//)")


def is_secret(parameter: str) -> bool:
    """Whether the name of a parameter is that of a secret."""
    return _SECRET_PARAMETER.search(unquote(parameter)) is not None


def masked_query(query: str) -> str:
    """The parameters of a URL without values of secret ones."""
    pairs = [pair.partition("=") for pair in query.split("&")]
    return "&".join(
        f"{name}={MASK}" if equals and is_secret(name) else f"{name}{equals}{text}"
        for name, equals, text in pairs
    )


def shown_url(text: str) -> str:
    """A secret value in an error: the URL of an engine without its password, or less."""
    found = _URL_START.match(text.strip())
    if found is None:
        lack = "" if "://" in text else ' without "://"'
        return f"a hidden value{lack}"
    scheme, colon, _ = found.groups()
    if scheme not in _ENGINES:
        return f"a URL starting with {found[0]}"
    shown = found[0] + _without_password(text.strip()[found.end() :], scheme)
    return repr(shown) + ("" if colon else f', which has no ":" after {scheme}')


def _without_password(rest: str, scheme: str) -> str:
    """What follows `://` in a URL that may be wrong; what may be a part of a password is masked."""
    login, at, place = rest.rpartition("@")
    if re.search(r"\?[A-Za-z_]+=", login):
        return MASK  # the "@" may be in a secret parameter
    if not at:
        # A ":" without a port after it may precede a password whose "@" is missing.
        host, colon, _ = place.partition("?")[0].partition(":")
        has_port = re.match(r"[^:]*:[0-9]{1,5}(?=[/?,]|$)", place)
        return f"{host}:{MASK}" if colon and not has_port else _masked_place(place)
    user, colon, _ = login.partition(":")
    is_name = scheme in NAMED_USER and re.fullmatch(r"[A-Za-z0-9._%+~-]*", user)
    shown = f"{user}{colon}{MASK if colon else ''}" if is_name else MASK
    return f"{shown}@{_masked_place(place)}"


def _masked_place(place: str) -> str:
    server, mark, query = place.partition("?")
    # What follows a secret parameter may be its end, after a "&" in it.
    end = re.search(r"(?<==)\(masked\).*", shown := masked_query(query))
    return server + mark + (shown[: end.start()] + MASK if end else shown)
