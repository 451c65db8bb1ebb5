"""The frames of one disk, shared by all processes, and the choice of the frame to evict (SIEVE).

The shared memory holds sets of 512 bytes (see `layout`), then a byte `visited` and a byte
`verified` for each frame.

A block is found through its tag only: one aligned 8-byte store of 0 hides it, one of the tag
publishes it. The filler is the only writer of sets. Workers add marks to `visited` and the filler
removes them. A worker sets `verified` after a correct checksum. These are two arrays, because two
writers of bits in one byte would lose updates.

`verified` is never written to a disk. Fills and checks set it to VERIFIED; a starting node sets all
to UNVERIFIED, so every block is verified once before it is served. That is why the index needs no
log: whatever an old, torn or foreign index contains, the checksums of entry and block decide. A
verified block that left the page cache becomes COLD and is verified again when it is read. Any
process may remove a verified mark at any time; that costs one check.

Lookups do not check entry checksums. Fields are written only while no process can find the frame,
and an entry read from a disk is checked before its block is.

SIEVE keeps blocks in insertion order with a hand that moves from the oldest to the newest. A
visited block loses a mark and stays; the first block without a mark is evicted. A visit writes one
byte and moves nothing, so workers need no lock. A block has up to MARKS_MAX marks: one is too
coarse in a set of 16, and more than two keep blocks that are no longer requested.

In a plain array SIEVE would decay into CLOCK, because a new block would take the position of the
evicted one. Here a new block's generation is one more than the highest of its set, so sorting the
16 frames by generation restores insertion order. `simulate/eviction.py` compares this with one
global queue.

Source: Zhang et al., SIEVE is Simpler than LRU, NSDI 2024.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from headrace.kernel.resilience import crash_point
from headrace.media.cache.layout import (
    ENTRY,
    ENTRY_BYTES,
    SET_BYTES,
    TAG_BYTES,
    TAGS_BYTES,
    WAYS,
    BlockKey,
    Superblock,
    block_sum,
    entry_sum,
)

UNVERIFIED, VERIFIED, COLD = range(3)
"""States in `verified`: not checked since the start; served; to be checked again."""
_FOUND: Final = struct.Struct("<III").unpack_from
_FIELDS: Final = struct.Struct("<IIIQ")
_ENTRY_SUM: Final = struct.Struct("<I")
MARKS_MAX: Final = 2


class Entry(NamedTuple):
    """The entry of a frame."""

    tag: int
    fingerprint: int
    generation: int
    length: int
    block_sum: int
    entry_sum: int


class Hit(NamedTuple):
    """A frame that a key was found in."""

    frame: int
    generation: int
    length: int


def table_bytes(superblock: Superblock) -> int:
    """Size of a disk's table in shared memory: 34 bytes for each frame."""
    return superblock.index_bytes + 2 * superblock.frames


class FrameTable:
    """The frames of one disk."""

    def __init__(self, memory: mmap.mmap, superblock: Superblock) -> None:
        self.superblock = superblock
        self.sets = superblock.sets
        frames, index_bytes = superblock.frames, superblock.index_bytes
        self._memory = memory
        self._bytes = memoryview(memory)
        self.index = self._bytes[:index_bytes]
        self._words = self.index.cast("Q")
        self.visited = self._bytes[index_bytes : index_bytes + frames]
        self.verified = self._bytes[index_bytes + frames :]

    def find(self, key: BlockKey) -> Hit | None:
        """The frame with this key, verified or not."""
        memory, tag = self._memory, key.tag
        number = (key.hash_bits >> 16) % self.sets
        start = number * SET_BYTES
        end = start + TAGS_BYTES
        at = memory.find(tag, start, end)
        while at >= 0:
            if not (at - start) % TAG_BYTES:
                way = (at - start) // TAG_BYTES
                fingerprint, generation, length = _FOUND(memory, end + way * ENTRY_BYTES)
                if fingerprint == key.fingerprint:
                    # Half the time of Hit(...), in every request.
                    return tuple.__new__(Hit, (number * WAYS + way, generation, length))
            at = memory.find(tag, at + 1, end)
        return None

    def set_of(self, key: BlockKey) -> int:
        """The number of the set of this key."""
        return (key.hash_bits >> 16) % self.sets

    def entry(self, frame: int) -> Entry:
        """The entry of a frame; a tag of 0 means that it is empty."""
        return Entry(
            self._words[_tag_at(frame)], *ENTRY.unpack_from(self._memory, _fields_at(frame))
        )

    def is_sound(self, frame: int, entry: Entry) -> bool:
        """Whether an entry is intact and belongs to this frame of this disk."""
        fields = (entry.fingerprint, entry.generation, entry.length, entry.block_sum)
        expected = entry_sum(entry.tag, fields, frame=frame, superblock=self.superblock)
        return entry.tag != 0 and entry.entry_sum == expected

    def is_right(self, frame: int, entry: Entry, data: bytes | memoryview) -> bool:
        """Whether `data`, read from the disk, matches an intact entry."""
        if not self.is_sound(frame, entry) or len(data) < entry.length:
            return False
        found = block_sum(data[: entry.length], entry.tag, entry.fingerprint, self.superblock)
        return found == entry.block_sum

    def note_cold(self, frame: int) -> None:
        """Mark a verified block for re-verification: it will be read from the disk again."""
        if self.verified[frame] == VERIFIED:
            self.verified[frame] = COLD

    def generations(self, number: int) -> list[int]:
        """The generations of a set's frames; 0: empty or not servable."""
        frames = range(number * WAYS, (number + 1) * WAYS)
        entries = [(frame, self.entry(frame)) for frame in frames]
        return [
            entry.generation
            if entry.tag and (self.verified[frame] or self.is_sound(frame, entry))
            else 0
            for frame, entry in entries
        ]

    def set_bytes(self, number: int) -> memoryview:
        """A set as it is written to the disk."""
        return self.index[number * SET_BYTES : (number + 1) * SET_BYTES]

    def used(self) -> int:
        """The number of frames with a block."""
        tags = 0
        for number in range(self.sets):
            start = number * SET_BYTES // TAG_BYTES
            tags += WAYS - self._words[start : start + WAYS].tolist().count(0)
        return tags

    def hide(self, frame: int) -> None:
        """Hide a frame from all later lookups. Only the filler calls this and the methods below."""
        self._words[_tag_at(frame)] = 0
        self.verified[frame] = UNVERIFIED
        self.visited[frame] = 0

    def write_fields(self, frame: int, key: BlockKey, *, generation: int, data: bytes) -> None:
        """Write the entry of a hidden frame."""
        tag, fingerprint = int.from_bytes(key.tag, "little"), key.fingerprint
        summed = block_sum(data, tag, fingerprint, self.superblock)
        fields = (fingerprint, generation, len(data), summed)
        at = _fields_at(frame)
        _FIELDS.pack_into(self._memory, at, *fields)
        crash_point("media.fill.fields_stored")
        whole = entry_sum(tag, fields, frame=frame, superblock=self.superblock)
        _ENTRY_SUM.pack_into(self._memory, at + _FIELDS.size, whole)
        crash_point("media.fill.entry_summed")
        self.verified[frame] = VERIFIED

    def show(self, frame: int, key: BlockKey) -> None:
        """Publish a frame, so that it can be found."""
        self._words[_tag_at(frame)] = int.from_bytes(key.tag, "little")

    def hide_all(self) -> None:
        """Hide all frames and clear all marks, as in a new table."""
        self.index[:] = bytes(len(self.index))
        self.visited[:] = bytes(len(self.visited))
        self.verified[:] = bytes(len(self.verified))

    def close(self) -> None:
        """Release the memory."""
        for view in (self.visited, self.verified, self._words, self.index, self._bytes):
            view.release()
        self._memory.close()


def _tag_at(frame: int) -> int:
    """In words of 8 bytes."""
    return frame // WAYS * (SET_BYTES // TAG_BYTES) + frame % WAYS


def _fields_at(frame: int) -> int:
    return frame // WAYS * SET_BYTES + TAGS_BYTES + frame % WAYS * ENTRY_BYTES


class Choice(NamedTuple):
    """The frame of the set to evict, the frames that lost a mark, and the new hand.

    Frames are positions in the set. One is listed once for each mark that it lost.
    """

    way: int
    unmarked: tuple[int, ...]
    hand: int


def choose(
    generations: Sequence[int],
    visited: Sequence[int],
    *,
    hand: int,
    busy: Collection[int] = (),
) -> Choice | None:
    """The frame of a full set to evict; None: all are being filled.

    `hand` is that of the last choice, 0 at first. The search begins at the first generation above
    it.
    """
    order = sorted(
        (generation, way) for way, generation in enumerate(generations) if way not in busy
    )
    if not order:
        return None
    start = next((at for at, (generation, _) in enumerate(order) if generation > hand), 0)
    unmarked: list[int] = []
    left, at = list(visited), start
    while left[order[at][1]]:
        left[order[at][1]] -= 1
        unmarked.append(order[at][1])
        at = (at + 1) % len(order)
    generation, way = order[at]
    # After the newest block the hand returns to the oldest, so the next block is not the first
    # victim.
    return Choice(way, tuple(unmarked), 0 if at == len(order) - 1 else generation)
