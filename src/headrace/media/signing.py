"""Signed URLs: the holder may read one object until the URL expires.

    /m/tracks/a.mp3?e=1795302000&k=3f2a9c10&a=203.0.113.7&r=65536&t=<64 hex>&c=user=42&s=<43 chars>
    /m/photos/a.jpg?e=1795302000&k=3f2a9c10&w=400&h=300&fit=cover&fm=webp&s=<43 chars>

    e  expiry, whole seconds since 1970      a  only for this address or network
    k  id of the key that signed             r  at most this many bytes per second
    s  the signature                         t  id of the ID3 tag to put in front
                                             c  trace tags: user and request of the URL
    w, h, fit, fm  the variant of an image (media.variants)

The signature is HMAC-SHA256 over the path and the query before `&s=`, as received. So nothing is
decoded, sorted or joined before the check, and a URL has one notation: fields in this order, none
repeated, no escapes, no other field, no padding. Signatures are compared as text, since the 43rd
character of base64 has four notations.

Keys are derived from the root secret (`kernel.signing`), their ids from the keys. To change the
secret, let every node accept the next one first (`media.accepted_secrets`), then sign with it, then
remove the old one when its URLs have expired. An unknown key id costs as much as a wrong signature,
and all refusals are alike, so they reveal nothing to a forger. Expiry is checked when a request
starts, not while it is answered.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from headrace.engines.blobs import require_key
from headrace.kernel.errors import FieldProblem, Forbidden, InvalidInput
from headrace.kernel.signing import Key, derive_key

USE: Final = "media-url"
"""The purpose of the key: `derive_key(root, USE)`."""
TIER_USE: Final = "media-tier"
"""The purpose of the key by which another cluster reads this one."""
PATH_PREFIX: Final = "/m/"
EXPIRES_AT_MAX: Final = 99_999_999_999
RATE_MAX: Final = 10**12 - 1
A_YEAR_S: Final = 31_536_000
A_MINUTE_S: Final = 60
_MARK: Final = "&s="
_ADDRESS: Final = re.compile(r"[0-9a-f.:]{2,45}(?:/[0-9]{1,3})?")
_TAG: Final = re.compile(r"[0-9a-f]{64}")
_TRACE: Final = re.compile(
    r"(?:user|request)=[A-Za-z0-9._:@~/-]{1,128}(?:,(?:user|request)=[A-Za-z0-9._:@~/-]{1,128})?"
)
_QUERY: Final = re.compile(
    r"e=([1-9][0-9]{0,10})&k=([0-9a-f]{8})"
    r"(?:&a=([0-9a-f.:/]{2,49}))?(?:&r=([1-9][0-9]{0,11}))?(?:&t=([0-9a-f]{64}))?"
    r"(?:&c=([A-Za-z0-9._:@~/=,-]{1,280}))?"
    r"(?:&((?:w|h)=[1-9][0-9]{0,3}(?:&h=[1-9][0-9]{0,3})?(?:&fit=[a-z]{1,9})?(?:&fm=[a-z]{1,5})?))?"
    r"&s=([A-Za-z0-9_-]{43})"
)


class SignatureInvalid(Forbidden):
    """A media URL is unsigned, changed, expired, for another address, or signed with an unknown
    key.
    """

    code = "media.signature_invalid"

    def __init__(self) -> None:
        super().__init__(
            "this URL does not allow the request: it was changed, has expired, or is for another"
            " address; get a new one from the site that issued it"
        )


class UnsignableUrl(InvalidInput):
    """A media URL cannot be made; all problems are listed."""

    code = "media.unsignable_url"


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """The key that signs, all accepted keys by id, and the ids of those of other clusters."""

    signing: Key
    accepted: Mapping[str, Key]
    tiers: Collection[str] = ()

    @classmethod
    def derive(cls, root: str, others: Iterable[str] = (), *, use: str = USE) -> Keys:
        """Sign for `use` with secret `root`; accept URLs of it and of `others`.

        Raises: WeakSecret.
        """
        roots = [root, *others]
        keys = [derive_key(one, USE) for one in roots]
        tiers = [derive_key(one, TIER_USE) for one in roots]
        accepted = {key.id: key for key in (*keys, *tiers)}
        return cls(derive_key(root, use), accepted, {key.id for key in tiers})


@dataclass(frozen=True, slots=True)
class UrlRights:
    """The permissions of a request. `rate` is in bytes per second, `tag` the id of an ID3 tag.

    `variant` is the query of a variant of an image, as `media.variants` writes it. `is_tier`:
    another cluster requests it, which may read what the nodes of this one may read.
    """

    expires_at: int | None = None
    rate: int | None = None
    tag: str | None = None
    trace: str | None = None
    variant: str | None = None
    is_tier: bool = False


OPEN: Final = UrlRights()
"""The permissions of an unsigned request if no signature is required."""


def sign(
    keys: Keys,
    path: str,
    *,
    expires_at: int,
    address: str | None = None,
    rate: int | None = None,
    tag: str | None = None,
    trace: str | None = None,
    variant: str | None = None,
) -> str:
    """The query that allows `path` until `expires_at` (seconds since 1970).

    `address` is an address or network, `rate` in bytes per second, `tag` the id of an ID3 tag,
    `trace` such as `user=42,request=r7`, `variant` such as `w=400&fm=webp`. Raises: UnsignableUrl
    with every problem, InvalidBlobKey.
    """
    require_key(path.removeprefix(PATH_PREFIX))
    problems: list[FieldProblem] = []
    if not path.startswith(PATH_PREFIX):
        problems.append(FieldProblem("path", "invalid", "expected a path below /m/"))
    if not 0 < expires_at <= EXPIRES_AT_MAX:
        problems.append(FieldProblem("expires_at", "invalid", "expected seconds since 1970"))
    place = _canonical_address(address, problems)
    if rate is not None and not 0 < rate <= RATE_MAX:
        problems.append(
            FieldProblem("rate", "invalid", f"expected 1 to {RATE_MAX} bytes a second, got {rate}")
        )
    if tag is not None and _TAG.fullmatch(tag) is None:
        problems.append(
            FieldProblem("tag", "invalid", "expected the 64 hex digits of a stored tag")
        )
    if trace is not None and _TRACE.fullmatch(trace) is None:
        problems.append(
            FieldProblem("trace", "invalid", "expected user=, request= or both: user=42,request=r7")
        )
    UnsignableUrl.require_none(problems, "this URL cannot be made")
    fields = {"a": place, "r": rate, "t": tag, "c": trace}
    rest = "".join(f"&{name}={value}" for name, value in fields.items() if value is not None)
    rest += f"&{variant}" if variant else ""
    query = f"e={expires_at}&k={keys.signing.id}{rest}"
    return f"{query}{_MARK}{_signature(keys.signing, path, query)}"


def check(keys: Keys, path: str, query: str, *, now_s: int, address: str) -> UrlRights:
    """The permissions of `path?query` as received from `address`. Raises: SignatureInvalid."""
    match = _QUERY.fullmatch(query)
    if match is None or not path.isascii():
        raise SignatureInvalid
    expires, key_id, place, rate, tag, trace, variant, signature = match.groups()
    # A key never signs another key's id, so a wrong key fails at the cost of the right one.
    key = keys.accepted.get(key_id, keys.signing)
    signed = query[: match.start(8) - len(_MARK)]
    is_ours = hmac.compare_digest(_signature(key, path, signed), signature)
    expires_at = int(expires)
    if not is_ours or now_s >= expires_at or not (place is None or _is_within(address, place)):
        raise SignatureInvalid
    is_tier = key_id in keys.tiers
    return UrlRights(expires_at, int(rate) if rate else None, tag, trace, variant, is_tier)


def is_signed(query: str) -> bool:
    """Whether `query` has a signature, which is checked even if none is required."""
    return _MARK in query


_NO_KEYS: Final[Mapping[str, Key]] = {}


class Gate:
    """Checks the URL of every request before any other work."""

    def __init__(self, make_keys: Callable[[], Keys], *, is_required: bool) -> None:
        self._make_keys = make_keys
        self.is_required = is_required

    @cached_property
    def keys(self) -> Keys:
        """The keys, derived on first use: a node with plain URLs only needs no secret."""
        return self._make_keys()

    def known_keys(self) -> Mapping[str, Key]:
        """The accepted keys by id; none while a signature is neither required nor was checked."""
        is_known = self.is_required or "keys" in self.__dict__
        return self.keys.accepted if is_known else _NO_KEYS

    def admit(self, target: str, *, now_s: int, address: str) -> UrlRights:
        """The permissions of the request for `target` (path and query) from `address`.

        A signature is checked even if none is required, since it may set a tag or a rate. Any other
        query is then ignored. Raises: SignatureInvalid.
        """
        path, _, query = target.partition("?")
        if not self.is_required and not is_signed(query):
            return OPEN
        return check(self.keys, path, query, now_s=now_s, address=address)


def expiry_on_grid(now_s: float, ttl_s: float, grid_s: float) -> int:
    """The first multiple of `grid_s` that is at least `ttl_s` away.

    Calls within one step of the grid get the same URL, which browsers can cache.
    """
    return math.ceil(math.ceil((now_s + ttl_s) / grid_s) * grid_s)


def cache_control(rights: UrlRights, *, is_immutable: bool, now_s: int) -> str:
    """The Cache-Control of an answer. A signed one is private and expires with its URL."""
    fresh_s = A_YEAR_S if is_immutable else A_MINUTE_S
    tail = ", immutable" if is_immutable else ""
    if rights.expires_at is None:
        return f"public, max-age={fresh_s}{tail}"
    return f"private, max-age={max(0, min(fresh_s, rights.expires_at - now_s))}{tail}"


def _signature(key: Key, path: str, query: str) -> str:
    digest = key.sign(f"{path}?{query}".encode("ascii"))
    return base64.urlsafe_b64encode(digest)[:43].decode()


def _canonical_address(address: str | None, problems: list[FieldProblem]) -> str | None:
    """The canonical notation of an address or network; problems are added to `problems`."""
    if address is None:
        return None
    try:
        network = ipaddress.ip_network(_unmapped(address))
    except ValueError:
        network = None
    text = "" if network is None else str(network).removesuffix(f"/{network.max_prefixlen}")
    if _ADDRESS.fullmatch(text) is None:
        expected = "expected an address or a network such as 203.0.113.7 or 2001:db8::/64"
        problems.append(FieldProblem("address", "invalid", expected))
    return text


def _is_within(address: str, place: str) -> bool:
    network = _network(place)
    try:
        return network is not None and ipaddress.ip_address(_unmapped(address)) in network
    except ValueError:
        return False


@lru_cache(maxsize=4096)
def _network(place: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(place)
    except ValueError:
        return None


def _unmapped(address: str) -> str:
    """`1.2.3.4` for `::ffff:1.2.3.4`, the form in which dual-stack sockets report IPv4 peers."""
    return address[7:] if address.startswith("::ffff:") and "." in address else address
