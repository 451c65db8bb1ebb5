"""The bytes of a disk: superblock, index, sets of 16 frames, and the sums that make a wrong block a miss.

    blocks:  superblock (48 bytes) ... from 2 MiB: frame 0, frame 1, ..., two more blocks for the probe
    index:   head (64 bytes, padded to 4 KiB), then sets of 512 bytes: one sector each

A set is 16 tags of 8 bytes, then 16 entries of 24 bytes: `fingerprint u32, generation u32, length u32, block sum
u64, entry sum u32`. So an entry costs 32 bytes; the frame's number is its place, in the index and on the disk, and no free
list is needed. On a block device both parts are in the device, the index from 4 KiB; the code is the same.

Two sums, both xxh3_64 (a block in 4.1 us; crc32c 9.4, zlib.crc32 61, blake2b 277: prototypes of 2026-11-21):

- entry sum, over tag, fields and frame number, seeded with the disk's id: a torn, moved or foreign entry is no entry;
- block sum, over the data, seeded with the disk's id and the key: a right block under a wrong key fails too.

A disk is known by the random id in its superblock, never by its name or position. Key to disk: the digest picks one of
SLOTS, and each slot belongs to a disk by weighted rendezvous over the ids, so a disk that comes or goes moves
its own share alone. Key to set: the rest of the digest.
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
"""The border that no large folio of the page cache crosses."""
PROBE_BLOCKS: Final = 2
BLANK_BYTES: Final = 128 * 1024
"""What must be all zero before a disk is made ours: every file system leaves its mark there."""
DISK_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 20
SLOTS: Final = 8192
"""Shares of the key space; over 12 equal disks they come out within 4 % of even."""

_NAME: Final = struct.Struct("<8sIIQ16s")
_SUM: Final = struct.Struct("<Q")
_CLEAN: Final = struct.Struct("<Q")
ENTRY: Final = struct.Struct("<IIIQI")
_SUMMED: Final = struct.Struct("<QIIIQQ")
_SUPERBLOCK: Final = b"HEADRACE"
_INDEX: Final = b"PENINDEX"
_FORMAT: Final = 1


class BlockKey(NamedTuple):
    """One block of one version of an object; the rest is of the digest that `Digests` makes of these three."""

    object: str
    version: str
    number: int
    digest: bytes
    tag: bytes
    fingerprint: int
    """32 bits that are compared beside the tag."""
    place: int
    """What the slot, and so the disk, and the set are taken from."""


class Digests:
    """Makes keys. Keyed, so that nobody who chooses object names can aim at a set or at another's tag."""

    def __init__(self, hash_key: bytes) -> None:
        self._keyed = hashlib.blake2b(digest_size=DIGEST_BYTES, key=hash_key[:64])

    def key(self, name: str, version: str, number: int) -> BlockKey:
        """The key of block `number` of that version."""
        text = f"{len(version)}:{version}:{number}:{name}"
        digest = self._digest(text)
        fingerprint = int.from_bytes(digest[8:12], "little")
        place = int.from_bytes(digest[12:20], "little")
        return BlockKey(name, version, number, digest, digest[:TAG_BYTES], fingerprint, place)

    def _digest(self, text: str) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(text.encode())
        digest = keyed.digest()
        # A tag of zero means that the frame is empty.
        return digest if any(digest[:TAG_BYTES]) else b"\1" + digest[1:]


def version_of(shape: Shape, generation: int) -> str:
    """What a block's bytes depend on beside the object's name: purge generation, size and ETag."""
    return f"{generation}:{shape.size_bytes}:{shape.etag}"


def parts_of_version(version: str) -> tuple[int, str]:
    """Size and ETag in a version. Raises: ValueError where it is none."""
    _, size_bytes, etag = version.split(":", 2)
    return int(size_bytes), etag


def length_of_block(size_bytes: int, number: int) -> int:
    """How much of the object is in its block `number`; the last one is shorter."""
    return max(0, min(BLOCK_BYTES, size_bytes - number * BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class Superblock:
    """Which disk this is and how many frames it has."""

    disk_id: bytes
    frames: int

    @property
    def seed(self) -> int:
        """What every sum of this disk starts from."""
        return int.from_bytes(self.disk_id[:8], "little")

    @property
    def sets(self) -> int:
        return self.frames // WAYS

    @property
    def index_bytes(self) -> int:
        return self.sets * SET_BYTES


def pack_superblock(superblock: Superblock) -> bytes:
    """The bytes that make a disk ours."""
    return _summed(_pack_name(_SUPERBLOCK, superblock))


def read_superblock(data: bytes) -> Superblock | None:
    """The superblock that `data` begins with, or None."""
    return _read_name(_SUPERBLOCK, data, _NAME.size)


def pack_head(superblock: Superblock, *, is_clean: bool) -> bytes:
    """The head of an index: of which disk, and whether it was closed in order."""
    return _summed(_pack_name(_INDEX, superblock) + _CLEAN.pack(is_clean))


def read_head(data: bytes, superblock: Superblock) -> bool | None:
    """Whether the index of that very disk was closed in order; None: this is no index of it."""
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
    """How many frames a disk of that size holds, with its index; a multiple of WAYS."""
    spare = 2 * DATA_AT + PROBE_BLOCKS * BLOCK_BYTES
    per_frame = BLOCK_BYTES + SET_BYTES // WAYS
    return max(0, (size_bytes - spare) // per_frame) // WAYS * WAYS


def data_at_in_device(frames: int) -> int:
    """Where the frames begin on a block device, behind its index: at a border of 2 MiB."""
    index_end = 2 * HEAD_BYTES + frames // WAYS * SET_BYTES
    return -(-index_end // DATA_AT) * DATA_AT


def entry_sum(
    tag: int, fields: tuple[int, int, int, int], *, frame: int, superblock: Superblock
) -> int:
    """The sum of an entry (fingerprint, generation, length, block sum) at its place on its disk."""
    summed = _SUMMED.pack(tag, *fields, frame)
    return xxhash.xxh3_64_intdigest(summed, superblock.seed) & 0xFFFFFFFF


def block_sum(data: bytes | memoryview, tag: int, fingerprint: int, superblock: Superblock) -> int:
    """The sum of a block's data as that key's, on that disk."""
    return xxhash.xxh3_64_intdigest(data, superblock.seed ^ tag ^ fingerprint)


def slot_owners(disks: Sequence[tuple[bytes, int]]) -> list[int]:
    """For each slot the position in `disks` (id, frames) of the disk that has it; -1 without disks.

    Weighted rendezvous: the disk with the least -ln(u) / frames has the slot, whatever the order of `disks`. About
    2 ms a disk, at a start and whenever a disk comes or goes.
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
