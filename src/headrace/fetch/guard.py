"""Access rules for URLs and addresses: no connection to our own networks on a seller's request.

Sellers choose the URLs, so each is hostile until checked. `judge_url` checks the text, at
validation and again at every redirect. `forbidden_reason` checks an address: every DNS answer, and
the peer of the socket, which decides. `ipaddress.is_global` alone is wrong: it accepts NAT64 and
6to4 of loopback, multicast, site-local and a cloud's host service. So: unwrap embedded IPv4
addresses, then apply a deny list, then `is_global`, then exclude multicast.

Hosts are parsed as browsers and getaddrinfo do: `2130706433`, `0x7f.1`, `0177.0.0.1` and `127.1`
are all 127.0.0.1, and full-width digits are digits. An unusual form of an allowed address is
refused too: no shop writes the host of its photos in octal.

`refusal_reason` serves catalogues with millions of links on few hosts: where a link is plain
(nothing in it is encoded, folded or cut) the result for its origin applies, and that is cached.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias
from urllib.parse import quote

from headrace.fetch.errors import UrlRefused
from headrace.fetch.model import URL_CHARACTERS_MAX

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_DENIED: Final[tuple[Network, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "168.63.129.16/32",  # Azure's host service, which has a public address
        "169.254.0.0/16",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "240.0.0.0/4",
        "2001::/23",  # Teredo, ORCHID, benchmarking
        "2001:db8::/32",
        "3fff::/20",
    )
)
_GLOBAL_V6: Final = ipaddress.ip_network("2000::/3")
_MAPPED: Final = ipaddress.ip_network("::ffff:0:0/96")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL: Final = ipaddress.ip_network("64:ff9b:1::/48")
_SIX_TO_FOUR: Final = ipaddress.ip_network("2002::/16")
_COMPATIBLE: Final = ipaddress.ip_network("::/96")
OPEN_NETWORK: Final = (
    "use a public host, or allow its network with the setting fetch.allow_networks"
)
OPEN_PORT: Final = "allow it with the setting fetch.allow_ports"
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER: Final = re.compile(r"0x[0-9a-f]*|[0-9]+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\\]")
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/?#]*)([^#]*))?")
_SAFE_IN_PATH: Final = "/?&=%:@!$'()*+,;[]~-._|"
ORIGINS_REMEMBERED_MAX: Final = 20_000
PLAIN_CHARACTERS_MAX: Final = 1900
"""Below the length limit of links, since an origin gains a slash."""
_PLAIN_LINK: Final = re.compile(r"(https?://[A-Za-z0-9.-]{1,253})/[A-Za-z0-9/?&=%:!$'()*+,;~._|-]*")


@dataclass(frozen=True, slots=True)
class Policy:
    """Networks allowed beside the public ones, and allowed ports."""

    networks: tuple[Network, ...] = ()
    ports: frozenset[int] = frozenset({80, 443})

    @classmethod
    def of(cls, networks: tuple[str, ...], ports: tuple[int, ...]) -> Policy:
        """The policy of the settings `fetch.allow_networks` and `fetch.allow_ports`."""
        return cls(tuple(ipaddress.ip_network(n) for n in networks), frozenset(ports))


@dataclass(frozen=True, slots=True)
class Target:
    """A checked URL in the form in which it is sent."""

    scheme: str
    host: str
    port: int
    path: str
    literal: Address | None
    """The checked address if the host is one; no name is resolved."""

    @property
    def url(self) -> str:
        """The URL in ASCII."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == {"http": 80, "https": 443}[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"


def forbidden_reason(address: Address, policy: Policy) -> str | None:
    """Why `address` is forbidden, or None if it is allowed."""
    if _is_in(address, policy.networks):
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        return f"{address} has a zone"
    inner = _unwrapped(address)
    if inner is not None:
        reason = forbidden_reason(inner, policy)
        return None if reason is None else f"{address} carries {reason}"
    is_outside = address.version == 6 and address not in _GLOBAL_V6
    if is_outside or address.is_multicast or not address.is_global or _is_in(address, _DENIED):
        return f"{address} is not public"
    return None


def _unwrapped(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address to which a gateway or the kernel would translate `address`."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    number = int(address)
    inner: int | None = None
    if _is_in(address, (_MAPPED, _NAT64, _COMPATIBLE)):
        inner = number & 0xFFFFFFFF
    elif address in _NAT64_LOCAL:
        # RFC 6052 with a prefix of 48 bits: 16 bits, eight zero bits, 16 bits.
        inner = (number >> 64 & 0xFFFF) << 16 | number >> 40 & 0xFFFF
    elif address in _SIX_TO_FOUR:
        inner = number >> 80 & 0xFFFFFFFF
    return None if inner is None else ipaddress.IPv4Address(inner)


def _is_in(address: Address, networks: tuple[Network, ...]) -> bool:
    return any(address.version == n.version and address in n for n in networks)


def judge_url(text: str, policy: Policy) -> Target:
    """Check a URL and return its normal form; addresses of names are checked later.

    Raises: UrlRefused with reason length, syntax, scheme, userinfo, host, port or
    forbidden_address.
    """
    shown = repr(text if len(text) <= 80 else text[:80] + "...")
    if len(text) > URL_CHARACTERS_MAX:
        raise UrlRefused(
            "length",
            f"URL {shown} has {len(text)} characters: use at most {URL_CHARACTERS_MAX}",
        )
    if _CONTROL.search(text):
        raise UrlRefused(
            "syntax", f"URL {shown} contains a control character or a backslash: remove it"
        )
    match = _URL.match(text)
    if match is None or match[1].lower() not in ("http", "https"):
        raise UrlRefused("scheme", f"URL {shown} must start with http:// or https://")
    if match[2] is None:
        raise UrlRefused("host", f"URL {shown} has no host")
    scheme = match[1].lower()
    if "@" in match[2]:
        raise UrlRefused("userinfo", f"URL {shown} contains a user name or password: remove it")
    host, port = _split_authority(match[2], scheme, shown)
    name, literal = _judge_host(host, policy, shown)
    if port not in policy.ports:
        allowed = ", ".join(str(p) for p in sorted(policy.ports)[:8])
        raise UrlRefused(
            "port", f"URL {shown} uses port {port}, allowed are {allowed}; {OPEN_PORT}"
        )
    try:
        path = quote(match[3], safe=_SAFE_IN_PATH)
    except UnicodeEncodeError:
        raise UrlRefused("syntax", f"URL {shown} contains invalid characters") from None
    target = Target(scheme, name, port, path if path.startswith("/") else f"/{path}", literal)
    if len(target.url) > URL_CHARACTERS_MAX:
        raise UrlRefused(
            "length", f"URL {shown} is over {URL_CHARACTERS_MAX} characters once it is encoded"
        )
    return target


def _split_authority(authority: str, scheme: str, shown: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::([^:]*))?", authority)
    if match is None or not match[1]:
        raise UrlRefused("host", f"URL {shown} has no valid host")
    if match[2] is None:
        return match[1], {"http": 80, "https": 443}[scheme]
    if not re.fullmatch(r"[0-9]{1,5}", match[2]) or not 1 <= int(match[2]) <= 65535:
        raise UrlRefused(
            "port", f"URL {shown}: port {match[2][:20]!r} is not a number from 1 to 65535"
        )
    return match[1], int(match[2])


def _judge_host(host: str, policy: Policy, shown: str) -> tuple[str, Address | None]:
    """The normal form of the host, and its address if it is one."""
    if host.startswith("["):
        return _judge_literal(_parse_v6(host[1:-1], shown), policy, shown)
    name = _ascii_name(host, shown).removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise UrlRefused("host", f"URL {shown}: the host may contain only letters, digits, - and .")
    if _NUMBER.fullmatch(labels[-1]):
        return _judge_literal(_parse_v4(name, policy, shown), policy, shown)
    if labels[-1] == "localhost":
        loopback = forbidden_reason(ipaddress.IPv4Address("127.0.0.1"), policy)
        if loopback is not None:
            raise UrlRefused(
                "forbidden_address", f"URL {shown}: {name} is this machine; {OPEN_NETWORK}"
            )
    return name, None


def _ascii_name(host: str, shown: str) -> str:
    """Normalize a host name: full-width digits and dots become ASCII."""
    if not host.isascii():
        host = unicodedata.normalize("NFKC", host)
        for label in re.split(r"[.\u3002]", host):
            scripts = {unicodedata.name(c, "?").split(" ")[0] for c in label if c.isalpha()}
            if len(scripts & {"LATIN", "CYRILLIC", "GREEK"}) > 1:
                raise UrlRefused("host", f"URL {shown}: the host mixes alphabets in one label")
        try:
            host = host.encode("idna").decode("ascii")
        except UnicodeError:
            raise UrlRefused(
                "host", f"URL {shown}: the host is not a valid internationalized name"
            ) from None
    return host.lower()


def _parse_v6(text: str, shown: str) -> Address:
    try:
        return ipaddress.IPv6Address("zone" if "%" in text else text)
    except ValueError:
        raise UrlRefused(
            "host", f"URL {shown}: the address in brackets is not an IPv6 address without zone"
        ) from None


def _parse_v4(name: str, policy: Policy, shown: str) -> Address:
    """Parse `name` by the C library's rules; refuse forms other than four decimal numbers."""
    try:
        address = ipaddress.IPv4Address(socket.inet_aton(name))
    except OSError:
        raise UrlRefused(
            "host", f"URL {shown}: the host ends in a number and is not an IPv4 address"
        ) from None
    if str(address) != name and forbidden_reason(address, policy) is None:
        raise UrlRefused("host", f"URL {shown}: write the address as {address}")
    return address


def _judge_literal(address: Address, policy: Policy, shown: str) -> tuple[str, Address]:
    reason = forbidden_reason(address, policy)
    if reason is not None:
        raise UrlRefused("forbidden_address", f"URL {shown}: {reason}; {OPEN_NETWORK}")
    return str(address), address


def refusal_reason(link: str, policy: Policy) -> str | None:
    """The reason of `refused:<reason>`, or None for an allowed link; cached by origin."""
    plain = _PLAIN_LINK.fullmatch(link) if len(link) <= PLAIN_CHARACTERS_MAX else None
    return _reason_of(link, policy) if plain is None else _origin_refusal(plain[1], policy)


@lru_cache(ORIGINS_REMEMBERED_MAX)
def _origin_refusal(origin: str, policy: Policy) -> str | None:
    return _reason_of(f"{origin}/", policy)


def _reason_of(link: str, policy: Policy) -> str | None:
    try:
        judge_url(link, policy)
    except UrlRefused as error:
        return error.reason
    return None
