"""Where objects are served, plainly or by signed URLs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, TypedDict, Unpack
from urllib.parse import quote

from headrace.engines.blobs import require_key
from headrace.kernel.errors import FieldProblem
from headrace.media import signing
from headrace.media.cluster.documents import is_reserved
from headrace.media.model import MediaConfig, content_type

TTL_S_MAX: Final = 366 * 86_400.0
GRID_S_MAX: Final = 7 * 86_400.0
TAGGED_TYPE: Final = "audio/mpeg"


@dataclass(frozen=True, slots=True)
class SignedUrl:
    """A URL that allows one object until a moment."""

    key: str
    url: str
    expires_at: datetime


class SignOptions(TypedDict, total=False):
    """What `Media.sign` may be told; None is as good as leaving it out."""

    ttl_s: float | None
    grid_s: float
    address: str | None
    rate: int | None
    tag: str | None
    trace: str | None


class Urls:
    """Makes URLs and, for nodes, the keys that check them."""

    def __init__(self, config: MediaConfig, secret: Callable[[], str] | None) -> None:
        self._config = config
        self._secret = secret

    @cached_property
    def keys(self) -> signing.Keys:
        """What signs, and what is accepted. Raises: WeakSecret."""
        assert self._secret is not None, "this Media was made without a secret"
        return signing.Keys.derive(self._secret(), self._config.accepted_secrets)

    def plain(self, key: str) -> str:
        """Where `key` is served, unsigned. Raises: InvalidBlobKey."""
        host, port = self._config.listen
        own = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        base = (self._config.public_url or own).rstrip("/")
        return f"{base}{signing.PATH_PREFIX}{quote(require_key(key), safe='/@~')}"

    def sign(self, key: str, **options: Unpack[SignOptions]) -> SignedUrl:
        """See `Media.sign`."""
        ttl_s, tag = options.get("ttl_s"), options.get("tag")
        grid_s = options.get("grid_s", 1.0)
        kept_s = self._config.url_ttl_s if ttl_s is None else ttl_s
        faults = _faults(key, ttl_s=kept_s, grid_s=grid_s, tag=tag)
        if faults:
            raise signing.UnsignableUrl.of(faults)
        expires_at = signing.expiry_on_grid(time.time(), kept_s, grid_s)
        query = signing.sign(
            self.keys,
            signing.PATH_PREFIX + key,
            expires_at=expires_at,
            address=options.get("address"),
            rate=options.get("rate"),
            tag=tag,
            trace=options.get("trace"),
        )
        return SignedUrl(key, f"{self.plain(key)}?{query}", datetime.fromtimestamp(expires_at, UTC))


def _faults(key: str, *, ttl_s: float, grid_s: float, tag: str | None) -> list[FieldProblem]:
    faults = []
    if is_reserved(key):
        faults.append(FieldProblem("key", "invalid", "expected a key outside _headrace/"))
    if not 1 <= ttl_s <= TTL_S_MAX:
        text = f"expected 1 s to {TTL_S_MAX / 86_400:g} days, got {ttl_s:g} s"
        faults.append(FieldProblem("ttl_s", "invalid", text))
    if not 1 <= grid_s <= GRID_S_MAX:
        text = f"expected 1 s to {GRID_S_MAX / 86_400:g} days, got {grid_s:g} s"
        faults.append(FieldProblem("grid_s", "invalid", text))
    if tag is not None and content_type(key) != TAGGED_TYPE:
        text = f"expected none for a key that is no .mp3: {key[:80]!r}"
        faults.append(FieldProblem("tag", "invalid", text))
    return faults
