"""Derived signing keys, and signed cursors of listings.

A deployment has one root secret, from `HEADRACE_SECRET` or created once in the data folder with
mode 0600. Each use derives its own key (HMAC-SHA256 of the use's name, as HKDF-Expand in RFC 5869),
so a signature for one use is not valid for another. The key id is derived from the key, so machines
with the same secret agree on it, and a changed secret is visible.

A cursor is `base64url(signature . key id . position)`. The signature covers the listing's name and
filter, so another listing or filter refuses the cursor instead of skipping rows. A cursor grants no
rights: each page checks the caller again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.kernel.errors import InvalidInput, Malformed

ROOT_CHARACTERS_MIN: Final = 32
SIGNATURE_BYTES_MIN: Final = 16
"""Shortest accepted prefix of a signature: 128 bits."""


class WeakSecret(InvalidInput):
    """The root secret is too short."""

    code = "weak_secret"


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """A signing key for one use; only `id` may be shown."""

    id: str
    secret: bytes

    def sign(self, message: bytes) -> bytes:
        """HMAC-SHA256 of `message`, 32 bytes."""
        return hmac.digest(self.secret, message, "sha256")

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is valid, compared in constant time."""
        return hmac.compare_digest(self.sign(message), signature)

    def verify_prefix(self, message: bytes, prefix: bytes) -> bool:
        """Whether `prefix` is at least 16 bytes of a valid signature; constant time."""
        return len(prefix) >= SIGNATURE_BYTES_MIN and hmac.compare_digest(
            self.sign(message)[: len(prefix)], prefix
        )


def derive_key(root: str, use: str) -> Key:
    """The key for one `use`, such as `cursor` or `media-url`. Raises: WeakSecret."""
    if len(root) < ROOT_CHARACTERS_MIN:
        raise WeakSecret(
            f"HEADRACE_SECRET has {len(root)} characters, at least {ROOT_CHARACTERS_MIN} are"
            " required: create one with `python -c 'import secrets;"
            " print(secrets.token_urlsafe(32))'`"
        )
    secret = hmac.digest(root.encode(), b"headrace " + use.encode(), "sha256")
    return Key(hashlib.sha256(secret).hexdigest()[:8], secret)


def load_or_create_secret(folder: Path) -> str:
    """The root secret in `folder`, created on first use; safe for concurrent processes.

    Raises: WeakSecret.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    root = read_or_create(path, lambda: secrets.token_urlsafe(32))
    if len(root) < ROOT_CHARACTERS_MIN:
        raise WeakSecret(
            f"the secret in {path} has {len(root)} characters, at least {ROOT_CHARACTERS_MIN} are"
            " required: restore the former secret; if there was none, delete the file to create one"
        )
    return root


def read_or_create(path: Path, make: Callable[[], str]) -> str:
    """The line in `path`, a file of mode 0600 that is created with `make()` if it is missing.

    A draft is linked into place, because another process may read or create at any time.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            with os.fdopen(os.open(draft, flags, 0o600), "w") as file:
                file.write(f"{make()}\n")
                file.flush()
                os.fsync(file.fileno())
            # An existing file wins: all processes use the text that was stored first.
            with suppress(FileExistsError):
                path.hardlink_to(draft)
        finally:
            draft.unlink(missing_ok=True)
    return path.read_text().strip()


CURSOR_USE: Final = "cursor"
"""The use of the cursor key: `derive_key(root, CURSOR_USE)`."""
SIGNATURE_BYTES: Final = 16
CURSOR_CHARACTERS_MAX: Final = 2_048


class CursorInvalid(Malformed):
    """A cursor was changed, belongs to another listing or filter, or has an old signing key."""

    code = "cursor.invalid"

    def __init__(self, cursor: str) -> None:
        super().__init__(
            f"cursor {cursor[:40]!r} does not belong to this listing and filter: pass the cursor of"
            " the previous page with the same filter, or omit it to start at the first page"
        )


def sign_cursor(key: Key, listing: str, filters: Mapping[str, Any], position: Any) -> str:
    """A signed cursor that continues `listing` with `filters` after `position` (JSON)."""
    plain = key.id.encode() + b"." + msgspec.json.encode(position)
    signature = key.sign(_signed_bytes(listing, filters, plain))[:SIGNATURE_BYTES]
    return base64.urlsafe_b64encode(signature + plain).rstrip(b"=").decode()


def read_cursor(key: Key, listing: str, filters: Mapping[str, Any], cursor: str) -> Any:
    """The position in a cursor for this listing and filter. Raises: CursorInvalid."""
    if len(cursor) > CURSOR_CHARACTERS_MAX:
        raise CursorInvalid(cursor)
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error) as error:
        raise CursorInvalid(cursor) from error
    signature, plain = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
    key_id, _, position = plain.partition(b".")
    if key_id != key.id.encode() or not key.verify_prefix(
        _signed_bytes(listing, filters, plain), signature
    ):
        raise CursorInvalid(cursor)
    return msgspec.json.decode(position)


def _signed_bytes(listing: str, filters: Mapping[str, Any], plain: bytes) -> bytes:
    kept = sorted((name, value) for name, value in filters.items() if value is not None)
    return msgspec.json.encode([listing, kept]) + b"\0" + plain
