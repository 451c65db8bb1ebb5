"""Where the engines answer: three URLs, whoever started them, and how a URL is shown without its secrets.

A password with an unescaped `/`, `?`, `#` or `@` makes a URL that every parser cuts elsewhere. Nothing is
shown of a URL in which an `@` stands where none belongs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

MASK: Final = "(masked)"
_PLACE: Final = re.compile(r"[A-Za-z0-9._:,\[\]-]+")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://.*", re.DOTALL)
_SECRET_PARAMETER: Final = re.compile(r"(?i)pass|secret|key|token|credential|sig")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The URLs that `Postgres`, `Valkey` and `Blobs` open.

    Those of embedded engines may go through a descriptor of this process (see
    `embedded.sockets`): another process asks `running_endpoints` for its own.
    """

    postgres_url: str
    valkey_url: str
    blobs_url: str


def server_of(url: str, *, port: int, socket: str) -> str:
    """Which server `url` means, as `db:5432` or the path of a socket; never a user or a password.

    `port` is the usual one, `socket` the name of a socket in a folder that the URL names as its host.
    """
    parts = _split(url)
    if parts is None:
        return "the configured address"
    options = parse_qs(parts.query)
    place = options.get("host", [parts.netloc.rpartition("@")[2]])[0]
    folder, name = place, socket
    if parts.scheme == "unix":
        folder, _, name = unquote(parts.path).rpartition("/")
    if folder.startswith("/"):
        # A long path is reached through a descriptor of this process, which tells a person nothing.
        seen = os.path.realpath(folder) if folder.startswith("/proc/self/fd/") else folder
        return f"{seen}/{name}"
    if not _PLACE.fullmatch(place):
        return "the configured address"
    has_port = re.search(r":[0-9]+$", place) is not None
    return place if has_port else f"{place}:{options.get('port', [str(port)])[0]}"


def masked_url(text: str) -> str:
    """`text` without its password, `postgresql://me:(masked)@db/site`; what is no URL is masked whole."""
    if text.startswith("file:///"):
        return text
    parts = _split(text) if _URL.fullmatch(text) else None
    if parts is None:
        return MASK
    user_info, at, place = parts.netloc.rpartition("@")
    user, colon, _ = user_info.partition(":")
    netloc = f"{user}{colon}{MASK if colon else ''}{at}{place}"
    query = "&".join(_masked_parameter(pair) for pair in parts.query.split("&"))
    return f"{parts.scheme}://{netloc}{parts.path}{'?' if query else ''}{query}"


def _masked_parameter(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    return f"{name}={MASK}" if equals and _SECRET_PARAMETER.search(name) else pair


def _split(url: str) -> SplitResult | None:
    """The parts of `url`, or None if it cannot be told where its password ends."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    doubtful = parts.netloc.count("@") > 1 or parts.fragment
    return None if doubtful or "@" in parts.path + parts.query else parts
