"""The frames of one disk, as all processes see them: the index in shared memory, and two marks a frame.

    sets of 512 bytes (see `layout`) | visited, a byte a frame | verified, a byte a frame

A block is found through its tag alone: one aligned 8-byte store of 0 hides it, one of the tag shows it. The filler is the only
writer of sets and of `verified` (a worker sets it after a right sum); workers add marks to `visited`, the filler takes them off:
two arrays, since two writers of two bits in one byte would lose marks.

`verified` is never on a disk. A fill sets it to PROVED, as does each comparison of a block with its sum; all are UNPROVED when a
node starts, so every block is proved once before it is served, however the node ended. That is why the index needs
no log: whatever an old, torn, mixed or foreign index says, the sums of entry and block have the last word. A proved block that
the kernel dropped from memory becomes COLD: it is compared again when it is read again. Any process may take a proof away,
at any moment, since that costs one comparison.

Entry sums are not looked at here on the way of a request: fields are written only while nobody can have the frame (`turns`), and
an entry that came from a disk is checked before its block is.

Cost in a table of 4,194,304 frames, random keys: see `bench/media_store.py`.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final, NamedTuple

from headrace.kernel.resilience import crash_point
from headrace.media.store.layout import (
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

UNPROVED, PROVED, COLD = range(3)
"""States of a block in `verified`: not compared since the start; served; proved since the start, to be compared again."""
_FOUND: Final = struct.Struct("<III").unpack_from
_FIELDS: Final = struct.Struct("<IIIQ")
_ENTRY_SUM: Final = struct.Struct("<I")


class Entry(NamedTuple):
    """What a frame says that it holds."""

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
    """How much shared memory a disk's table takes: 34 bytes a frame."""
    return superblock.index_bytes + 2 * superblock.frames


class Table:
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
        """The frame with that key, proved or not."""
        memory, tag = self._memory, key.tag
        number = (key.place >> 16) % self.sets
        start = number * SET_BYTES
        end = start + TAGS_BYTES
        at = memory.find(tag, start, end)
        while at >= 0:
            if not (at - start) % TAG_BYTES:
                way = (at - start) // TAG_BYTES
                fingerprint, generation, length = _FOUND(memory, end + way * ENTRY_BYTES)
                if fingerprint == key.fingerprint:
                    # Half the time of Hit(...), on the way of every request.
                    return tuple.__new__(Hit, (number * WAYS + way, generation, length))
            at = memory.find(tag, at + 1, end)
        return None

    def set_of(self, key: BlockKey) -> int:
        """The number of the set that a key belongs to."""
        return (key.place >> 16) % self.sets

    def entry(self, frame: int) -> Entry:
        """All that is written of a frame; a tag of 0: it is empty."""
        return Entry(
            self._words[_tag_at(frame)], *ENTRY.unpack_from(self._memory, _fields_at(frame))
        )

    def is_sound(self, frame: int, entry: Entry) -> bool:
        """Whether an entry is whole, and was made for that frame of that disk."""
        fields = (entry.fingerprint, entry.generation, entry.length, entry.block_sum)
        expected = entry_sum(entry.tag, fields, frame=frame, superblock=self.superblock)
        return entry.tag != 0 and entry.entry_sum == expected

    def is_right(self, frame: int, entry: Entry, data: bytes | memoryview) -> bool:
        """Whether `data`, read off the disk, is what a sound entry says."""
        if not self.is_sound(frame, entry) or len(data) < entry.length:
            return False
        found = block_sum(data[: entry.length], entry.tag, entry.fingerprint, self.superblock)
        return found == entry.block_sum

    def note_cold(self, frame: int) -> None:
        """Have a proved block compared again before it is served: its bytes are read from the disk again."""
        if self.verified[frame] == PROVED:
            self.verified[frame] = COLD

    def generations(self, number: int) -> list[int]:
        """The generations of a set's frames, way by way; 0: empty, or nothing that could be served."""
        frames = range(number * WAYS, (number + 1) * WAYS)
        entries = [(frame, self.entry(frame)) for frame in frames]
        return [
            entry.generation
            if entry.tag and (self.verified[frame] or self.is_sound(frame, entry))
            else 0
            for frame, entry in entries
        ]

    def set_bytes(self, number: int) -> memoryview:
        """A set as it goes to the disk."""
        return self.index[number * SET_BYTES : (number + 1) * SET_BYTES]

    def used(self) -> int:
        """How many frames hold a block; 0.15 s for 4M frames."""
        tags = 0
        for number in range(self.sets):
            start = number * SET_BYTES // TAG_BYTES
            tags += WAYS - self._words[start : start + WAYS].tolist().count(0)
        return tags

    def hide(self, frame: int) -> None:
        """Nobody who looks from now on finds the frame. The filler's alone, as what follows."""
        self._words[_tag_at(frame)] = 0
        self.verified[frame] = UNPROVED
        self.visited[frame] = 0

    def write_fields(self, frame: int, key: BlockKey, *, generation: int, data: bytes) -> None:
        """Say what a hidden frame holds now."""
        tag, fingerprint = int.from_bytes(key.tag, "little"), key.fingerprint
        summed = block_sum(data, tag, fingerprint, self.superblock)
        fields = (fingerprint, generation, len(data), summed)
        at = _fields_at(frame)
        _FIELDS.pack_into(self._memory, at, *fields)
        crash_point("media.fill.fields_stored")
        whole = entry_sum(tag, fields, frame=frame, superblock=self.superblock)
        _ENTRY_SUM.pack_into(self._memory, at + _FIELDS.size, whole)
        crash_point("media.fill.entry_summed")
        self.verified[frame] = PROVED

    def show(self, frame: int, key: BlockKey) -> None:
        """Let the frame be found."""
        self._words[_tag_at(frame)] = int.from_bytes(key.tag, "little")

    def hide_all(self) -> None:
        """Nobody finds anything, nothing is proved and nothing was visited: as in a new table."""
        self.index[:] = bytes(len(self.index))
        self.visited[:] = bytes(len(self.visited))
        self.verified[:] = bytes(len(self.verified))

    def close(self) -> None:
        """Give the memory back."""
        for view in (self.visited, self.verified, self._words, self.index, self._bytes):
            view.release()
        self._memory.close()


def _tag_at(frame: int) -> int:
    """In words of 8 bytes."""
    return frame // WAYS * (SET_BYTES // TAG_BYTES) + frame % WAYS


def _fields_at(frame: int) -> int:
    return frame // WAYS * SET_BYTES + TAGS_BYTES + frame % WAYS * ENTRY_BYTES
