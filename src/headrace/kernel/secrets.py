"""Keys for what leaves the house and comes back: cursors, media URLs, webhooks, peer hops.

One root secret a deployment, from `HEADRACE_SECRET` or made once in the data folder, mode 0600. Each use
derives its own key from it (HMAC-SHA256 of the use's name, as HKDF-Expand does in RFC 5869), so that a
signature made for one use is worth nothing to another. The key id is derived from the key, so two
machines with the same secret agree on it and a rotated secret is told apart at once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.kernel.errors import InvalidInput

ROOT_CHARACTERS_MIN: Final = 32
SIGNATURE_BYTES_MIN: Final = 16
"""A shortened signature is not worth less than this: 128 bits."""


class WeakSecret(InvalidInput):
    """The root secret given is too short to sign with."""

    code = "weak_secret"


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """A signing key of one use; `id` may be shown, the rest never is."""

    id: str
    secret: bytes

    def sign(self, message: bytes) -> bytes:
        """HMAC-SHA256 of `message`, 32 bytes."""
        return hmac.digest(self.secret, message, "sha256")

    def verify(self, message: bytes, signature: bytes) -> bool:
        """Whether `signature` is ours, compared in constant time."""
        return hmac.compare_digest(self.sign(message), signature)

    def verify_start(self, message: bytes, start: bytes) -> bool:
        """Whether `start` is the first 16 bytes or more of our signature, compared in constant time."""
        return len(start) >= SIGNATURE_BYTES_MIN and hmac.compare_digest(
            self.sign(message)[: len(start)], start
        )


def derive_key(root: str, use: str) -> Key:
    """The key of one `use`, such as `cursor` or `media-url`.

    Raises: WeakSecret.
    """
    if len(root) < ROOT_CHARACTERS_MIN:
        raise WeakSecret(
            f"HEADRACE_SECRET has {len(root)} characters, at least {ROOT_CHARACTERS_MIN} are needed:"
            " make one with `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        )
    secret = hmac.digest(root.encode(), b"headrace " + use.encode(), "sha256")
    return Key(hashlib.sha256(secret).hexdigest()[:8], secret)


def load_or_make_root(folder: Path) -> str:
    """The root secret kept in `folder`, made there on first use; safe with several processes. Raises: WeakSecret."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    if not path.exists():
        _make_root(path)
    root = path.read_text().strip()
    if len(root) < ROOT_CHARACTERS_MIN:
        raise WeakSecret(
            f"the secret in {path} has {len(root)} characters, at least {ROOT_CHARACTERS_MIN} are needed: put the"
            " former one back; where there was none remove the file, and a new one is made"
        )
    return root


def _make_root(path: Path) -> None:
    """Make it beside and give it its name once it is whole: another process may read it at any moment."""
    draft = path.with_name(f"secret-{secrets.token_hex(8)}.draft")
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
            file.flush()
            os.fsync(file.fileno())
        # A name that is there already is kept: the first secret made is everybody's.
        with suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)
