"""URLs of the engines, and how a URL is shown without its secrets.

A password with an unescaped `/`, `?`, `#` or `@` makes a URL that parsers split differently. A URL
with an unexpected `@` is masked completely.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qs, parse_qsl, unquote, urlsplit

from headrace.kernel.config import parse_url, require_known_parameters
from headrace.kernel.masking import MASK, NAMED_USER, masked_query

_HOST: Final = re.compile(r"[A-Za-z0-9._:,\[\]-]+")
_NODES: Final = re.compile(
    r"(?P<before>[a-z]+://(?:[^/?#]*@)?)(?P<hosts>[^/?#@]*)(?P<after>.*)", re.DOTALL
)
"""`urlsplit` fails on a list of hosts with an IPv6 address."""
SENTINEL_PORT: Final = 26379
_SENTINEL_PARAMETER: Final = re.compile(r"sentinel(?:_username|_password)?=")
_SENTINEL_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SEED: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://.*", re.DOTALL)
_URL_IN_TEXT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>,;]+")
_SERVICES: Final = frozenset({"http", "https"})
"""Schemes of webhooks, whose paths and parameters are often secret."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The URLs that `Postgres`, `Valkey` and `Blobs` open.

    URLs of embedded engines may use a descriptor of this process (see `embedded.settings`), so
    another process calls `running_endpoints` for its own.
    """

    postgres_url: str
    valkey_url: str
    blobs_url: str


@dataclass(frozen=True, slots=True, repr=False)
class SentinelUrls:
    """The Sentinels of a URL; `name` is what they call the primary."""

    name: str
    urls: tuple[str, ...]
    """One per Sentinel, with its own user and password."""

    @property
    def server(self) -> str:
        """How errors name the primary, without user and password."""
        shown = ",".join(server_of(url, port=SENTINEL_PORT, socket="") for url in self.urls)
        return f"{self.name} (Sentinels {shown})"


def split_sentinels(url: str) -> tuple[str, SentinelUrls | None]:
    """The URL without the parameters of Sentinels, and the Sentinels if it has any.

    `valkey://me:pw@a,b:26379/0?sentinel=main&sentinel_password=pw`: user, password and database
    are those of the servers. TLS and its parameters apply to both. Raises: ValueError.
    """
    before, _, query = url.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    own = dict(pair.split("=", 1) for pair in pairs if _SENTINEL_PARAMETER.match(pair))
    if not own:
        return url, None
    others = "&".join(pair for pair in pairs if not _SENTINEL_PARAMETER.match(pair))
    rest = f"{before}?{others}" if others else before
    found = _NODES.fullmatch(rest)
    name = own.pop("sentinel", "")
    if not _SENTINEL_NAME.fullmatch(name) or found is None or not found["hosts"]:
        raise ValueError(
            "a URL of Sentinels and the name of their primary: valkey://a:26379,b:26379?sentinel=NAME"
        )
    user, password = (own.get(f"sentinel_{word}", "") for word in ("username", "password"))
    login = f"{user}:{password}@" if user or password else ""
    scheme = found["before"].partition("://")[0]
    parameters = f"?{others}" if others else ""
    hosts = [
        host if re.search(r":[0-9]+$", host) else f"{host}:{SENTINEL_PORT}"
        for host in found["hosts"].split(",")
    ]
    return rest, SentinelUrls(name, tuple(f"{scheme}://{login}{h}{parameters}" for h in hosts))


def parse_valkey_url(text: str) -> str:
    """A URL of one Valkey server, of cluster nodes, or of Sentinels: `valkey://a:6379,b:6379`.

    Raises: ValueError.
    """
    url = text.strip()
    found = _NODES.fullmatch(url)
    hosts = found["hosts"].split(",") if found else []
    if len(hosts) > 1 and not all(_SEED.fullmatch(host) for host in hosts):
        raise ValueError("a URL whose nodes are HOST or HOST:PORT joined by commas, none empty")
    require_known_parameters(url)
    rest, sentinels = split_sentinels(url)
    schemes = ("valkey", "valkeys", "redis", "rediss", *(() if sentinels else ("unix",)))
    for seed in seeds_of(rest):
        parse_url(*schemes)(seed)
        _require_valkey_values(seed)
    return url


def _require_valkey_values(seed: str) -> None:
    """Refuse what the drivers would ignore or fail on later. Raises: ValueError."""
    parts = urlsplit(seed)
    options = dict(parse_qsl(parts.query))
    databases = [options.get("db", "0")]
    if parts.scheme != "unix":
        databases.append(parts.path.removeprefix("/") or "0")
    if not all(re.fullmatch(r"[0-9]{1,4}", database) for database in databases):
        raise ValueError("a URL whose database is a number: valkey://HOST/0")
    if options.get("ssl_cert_reqs", "none") not in ("none", "optional", "required"):
        raise ValueError("a URL with ssl_cert_reqs=none, optional or required")


def seeds_of(url: str) -> list[str]:
    """One URL per node of a Valkey URL, in its order."""
    found = _NODES.fullmatch(url)
    if found is None or "," not in found["hosts"]:
        return [url]
    return [found["before"] + host + found["after"] for host in found["hosts"].split(",")]


def server_of(url: str, *, port: int, socket: str) -> str:
    """The server of `url` as `db:5432` or a socket path, without user and password.

    `port` is the default port; `socket` is the file name in a folder that the URL has as host.
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
        # A long path goes through a descriptor of this process, which means nothing to people.
        seen = os.path.realpath(folder) if folder.startswith("/proc/self/fd/") else folder
        return f"{seen}/{name}"
    if not _HOST.fullmatch(place):
        return "the configured address"
    has_port = re.search(r":[0-9]+$", place) is not None
    return place if has_port else f"{place}:{options.get('port', [str(port)])[0]}"


def masked_url(text: str, *, is_secret: bool = True) -> str:
    """`text` without secrets: `postgresql://me:(masked)@db/site`; malformed URLs are masked.

    An http(s) URL with `is_secret`, such as a webhook, shows only the server.
    """
    if text.startswith("file:///"):
        return text
    parts = _split(text) if _URL.fullmatch(text) else None
    if parts is None:
        return MASK
    user_info, at, place = parts.netloc.rpartition("@")
    user, colon, _ = user_info.partition(":")
    shown = f"{user}{colon}{MASK if colon else ''}"
    if user_info and parts.scheme not in NAMED_USER:
        shown = MASK
    netloc = f"{shown}{at}{place}"
    if is_secret and parts.scheme in _SERVICES:
        has_more = parts.path.strip("/") or parts.query
        return f"{parts.scheme}://{netloc}/{MASK if has_more else ''}"
    query = masked_query(parts.query)
    return f"{parts.scheme}://{netloc}{parts.path}{'?' if query else ''}{query}"


def masked_text(text: str) -> str:
    """`text` with the secrets of all URLs masked."""
    return _URL_IN_TEXT.sub(lambda found: masked_url(found[0], is_secret=False), text)


def _split(url: str) -> SplitResult | None:
    """The parts of `url`, or None if the end of its password is ambiguous."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    is_ambiguous = parts.netloc.count("@") > 1 or parts.fragment
    return None if is_ambiguous or "@" in parts.path + parts.query else parts
