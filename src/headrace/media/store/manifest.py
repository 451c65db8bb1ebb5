"""What the filler tells the workers of the disks: one small file in the run folder, replaced as a whole.

Its revision is also on the board, where each worker sees at the start of a turn that it is behind. Files are named with what
they are (device and inode), so that nobody opens, or keeps open, another file than the filler writes to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.media.store.layout import slot_owners

_NAME: Final = "manifest.json"
IN_USE: Final = "in use"
DRAINING: Final = "draining"
OUT: Final = "out"
NOBODY: Final = 255
"""In a map of slots: no disk has this one."""


class ManifestDisk(msgspec.Struct, frozen=True):
    """A disk as a worker needs to know it."""

    id: str
    frames: int
    state: str
    reader_path: str
    reader_identity: str
    data_at: int
    table_path: str
    table_identity: str
    is_copied: bool


class Manifest(msgspec.Struct, frozen=True):
    """All disks that this filler opened, each at its place for as long as it runs."""

    boot: str
    revision: int
    hash_key: bytes
    disks: tuple[ManifestDisk, ...]
    owners: bytes
    """Slot -> place in `disks` of the one that its blocks are put on."""
    owners_before: bytes
    """The same as if no disk were being drained; empty: none is."""


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Replace the manifest; readable for this user alone, since the key is in it. Raises: OSError."""
    draft = run / f"{_NAME}.draft"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(manifest))
    draft.replace(run / _NAME)


def read_manifest(run: Path) -> Manifest | None:
    """The newest manifest; None before the first, or if it is damaged: the filler writes it anew."""
    try:
        return msgspec.json.decode((run / _NAME).read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def remove_manifest(run: Path) -> None:
    """Take it away with the shared memory that it speaks of."""
    (run / _NAME).unlink(missing_ok=True)


def places_of(disks: Sequence[ManifestDisk]) -> tuple[bytes, bytes]:
    """`owners` and `owners_before` of a manifest; 5 ms a disk."""
    is_draining = any(disk.state == DRAINING for disk in disks)
    owners = _owners(disks, (IN_USE,))
    return owners, _owners(disks, (IN_USE, DRAINING)) if is_draining else b""


def _owners(disks: Sequence[ManifestDisk], states: tuple[str, ...]) -> bytes:
    taken = [place for place, disk in enumerate(disks) if disk.state in states]
    owners = slot_owners([(bytes.fromhex(disks[at].id), disks[at].frames) for at in taken])
    return bytes(taken[owner] if owner >= 0 else NOBODY for owner in owners)
