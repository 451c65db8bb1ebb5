"""The bytes of a disk: superblock, index, sets of 16 frames, and checksums.

    blocks:  superblock (48 bytes) ... from 2 MiB: frame 0, frame 1, ..., two probe blocks
    index:   head (64 bytes, padded to 4 KiB), then sets of 512 bytes: one sector each

A set has 16 tags of 8 bytes, then 16 entries of 24 bytes: `fingerprint u32, generation u32, length
u32, block checksum u64, entry checksum u32`. A frame's number is its position in the index and on
the disk, so no free list is needed. A block device holds both parts, the index from 4 KiB.

Both checksums are xxh3_64:

- The entry checksum covers tag, fields and frame number, seeded with the disk id. A torn, moved or
  foreign entry is invalid.
- The block checksum covers the data, seeded with the disk id and the key. A correct block under a
  wrong key is invalid too.

A disk is identified by the random id in its superblock, never by name or position. The digest of a
key selects one of SLOTS, and weighted rendezvous hashing over the disk ids assigns slots to disks.
So a disk that is added or removed moves only its own share. The rest of the digest selects the set.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from headrace.media.model import BLOCK_BYTES, Shape

WAYS: Final = 16
TAG_BYTES: Final = 8
TAGS_BYTES: Final = WAYS * TAG_BYTES
ENTRY_BYTES: Final = 24
SET_BYTES: Final = WAYS * (TAG_BYTES + ENTRY_BYTES)
HEAD_BYTES: Final = 4096
DATA_AT: Final = 2 * 1024 * 1024
"""Alignment that no large folio of the page cache crosses."""
PROBE_BLOCKS: Final = 2
BLANK_BYTES: Final = 128 * 1024
"""This much must be zero before a disk is claimed: every file system writes a signature there."""
DISK_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 20
SLOTS: Final = 8192
"""Parts of the key space; over 12 equal disks their shares are within 4 % of even."""

_NAME: Final = struct.Struct("<8sIIQ16s")
_SUM: Final = struct.Struct("<Q")
_CLEAN: Final = struct.Struct("<Q")
ENTRY: Final = struct.Struct("<IIIQI")
_SUMMED: Final = struct.Struct("<QIIIQQ")
_SUPERBLOCK: Final = b"HEADRACE"
_INDEX: Final = b"HR-INDEX"
_FORMAT: Final = 1


class BlockKey(NamedTuple):
    """One block of one version of an object. The other fields derive from these three."""

    object: str
    version: str
    number: int
    digest: bytes
    tag: bytes
    fingerprint: int
    """32 bits that are compared in addition to the tag."""
    hash_bits: int
    """Hash bits that select slot (and so disk) and set."""


class Digests:
    """Makes block keys. The hash is keyed, so object names cannot be chosen to collide."""

    def __init__(self, hash_key: bytes) -> None:
        self._keyed = hashlib.blake2b(digest_size=DIGEST_BYTES, key=hash_key[:64])

    def key(self, name: str, version: str, number: int) -> BlockKey:
        """The key of block `number` of this version."""
        text = f"{len(version)}:{version}:{number}:{name}"
        digest = self._digest(text)
        fingerprint = int.from_bytes(digest[8:12], "little")
        hash_bits = int.from_bytes(digest[12:20], "little")
        return BlockKey(name, version, number, digest, digest[:TAG_BYTES], fingerprint, hash_bits)

    def _digest(self, text: str) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(text.encode())
        digest = keyed.digest()
        # A tag of zero means an empty frame.
        return digest if any(digest[:TAG_BYTES]) else b"\1" + digest[1:]


def version_of(shape: Shape, generation: int) -> str:
    """What a block's bytes depend on besides the object's name: purge generation, size and ETag."""
    return f"{generation}:{shape.size_bytes}:{shape.etag}"


def parts_of_version(version: str) -> tuple[int, str]:
    """Size and ETag in a version. Raises: ValueError if it is malformed."""
    _, size_bytes, etag = version.split(":", 2)
    return int(size_bytes), etag


def length_of_block(size_bytes: int, number: int) -> int:
    """The length of block `number` of an object; the last block is shorter."""
    return max(0, min(BLOCK_BYTES, size_bytes - number * BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class Superblock:
    """The identity of a disk and its number of frames."""

    disk_id: bytes
    frames: int

    @property
    def seed(self) -> int:
        """The seed of all checksums of this disk."""
        return int.from_bytes(self.disk_id[:8], "little")

    @property
    def sets(self) -> int:
        return self.frames // WAYS

    @property
    def index_bytes(self) -> int:
        return self.sets * SET_BYTES


def pack_superblock(superblock: Superblock) -> bytes:
    """The superblock as bytes."""
    return _summed(_pack_name(_SUPERBLOCK, superblock))


def read_superblock(data: bytes) -> Superblock | None:
    """The superblock at the start of `data`, or None."""
    return _read_name(_SUPERBLOCK, data, _NAME.size)


def pack_head(superblock: Superblock, *, is_clean: bool) -> bytes:
    """The head of an index: its disk, and whether it was closed in order."""
    return _summed(_pack_name(_INDEX, superblock) + _CLEAN.pack(is_clean))


def read_head(data: bytes, superblock: Superblock) -> bool | None:
    """Whether the index of this disk was closed in order; None: it is no index of this disk."""
    if _read_name(_INDEX, data, _NAME.size + _CLEAN.size) != superblock:
        return None
    return bool(_CLEAN.unpack_from(data, _NAME.size)[0])


def _pack_name(magic: bytes, superblock: Superblock) -> bytes:
    return _NAME.pack(magic, _FORMAT, BLOCK_BYTES, superblock.frames, superblock.disk_id)


def _summed(data: bytes) -> bytes:
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def _read_name(magic: bytes, data: bytes, summed_bytes: int) -> Superblock | None:
    if len(data) < summed_bytes + _SUM.size:
        return None
    (found,) = _SUM.unpack_from(data, summed_bytes)
    if found != xxhash.xxh3_64_intdigest(data[:summed_bytes]):
        return None
    seen_magic, version, block_bytes, frames, disk_id = _NAME.unpack_from(data)
    is_known = (seen_magic, version, block_bytes) == (magic, _FORMAT, BLOCK_BYTES)
    return Superblock(disk_id, frames) if is_known and frames and frames % WAYS == 0 else None


def frames_within(size_bytes: int) -> int:
    """The number of frames that fit a disk of this size with its index; a multiple of WAYS."""
    spare = 2 * DATA_AT + PROBE_BLOCKS * BLOCK_BYTES
    per_frame = BLOCK_BYTES + SET_BYTES // WAYS
    return max(0, (size_bytes - spare) // per_frame) // WAYS * WAYS


def data_at_in_device(frames: int) -> int:
    """The offset of the frames on a block device, after its index, aligned to 2 MiB."""
    index_end = 2 * HEAD_BYTES + frames // WAYS * SET_BYTES
    return -(-index_end // DATA_AT) * DATA_AT


def entry_sum(
    tag: int, fields: tuple[int, int, int, int], *, frame: int, superblock: Superblock
) -> int:
    """The checksum of an entry (fingerprint, generation, length, block checksum)."""
    summed = _SUMMED.pack(tag, *fields, frame)
    return xxhash.xxh3_64_intdigest(summed, superblock.seed) & 0xFFFFFFFF


def block_sum(data: bytes | memoryview, tag: int, fingerprint: int, superblock: Superblock) -> int:
    """The checksum of a block's data for this key on this disk."""
    return xxhash.xxh3_64_intdigest(data, superblock.seed ^ tag ^ fingerprint)


def slot_owners(disks: Sequence[tuple[bytes, int]]) -> list[int]:
    """The position in `disks` (id, frames) of each slot's owner; -1 without disks.

    Weighted rendezvous hashing: the disk with the lowest -ln(u) / frames owns the slot, in any
    order of `disks`.
    """
    owners = [-1] * SLOTS
    best = [math.inf] * SLOTS
    for position, (disk_id, frames) in enumerate(disks):
        seed = int.from_bytes(disk_id[:8], "little")
        for slot in range(SLOTS):
            hashed = xxhash.xxh3_64_intdigest(slot.to_bytes(4, "little"), seed)
            score = -math.log((hashed + 1) * 2.0**-64) / frames
            if score < best[slot]:
                best[slot], owners[slot] = score, position
    return owners
