"""The board: which workers are inside a turn, so that the filler never touches a frame that one may be sending.

Each worker has 64 bytes of shared memory: a counter that is odd inside a turn of its event loop, its process, and since when
that runs. The filler, having hidden a frame:

1. has every processor pass a memory barrier (`kernel_calls.barrier`), or waits a millisecond;
2. copies the counters: who is in a turn may have found the frame before it was hidden;
3. waits until each of those counters has moved on. Nothing of a frame outlives a turn, so nobody has it then.

Read before the barrier, the counters could miss a worker whose store still stands in its store buffer. The wait cost 5 to 14
us, and 98 us with workers that were put to sleep inside their turns (prototypes of 2026-11-21, 2 cores). A worker that
died inside a turn is skipped; one that is stopped or hangs there is never waited out: the fill gives up its frame and passes the
bytes through, and is not held up by the same turn again.

The first cell is the filler's: the number of its newest manifest, by which workers see that disks came or went.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from itertools import compress
from pathlib import Path
from typing import Final

from headrace.media.cache.linux import barrier, open_shared, register_for_barriers

WORKERS_MAX: Final = 256
STUCK_S: Final = 0.25
"""A turn takes a millisecond; one that lasts this long is not waited for."""
_CELLS: Final = range(WORKERS_MAX)
_CELL_WORDS: Final = 8
BOARD_BYTES: Final = (1 + WORKERS_MAX) * _CELL_WORDS * 8
_TURN, _PID, _STARTED, _HEARS_BARRIERS = range(4)
_STORE_BUFFER_S: Final = 0.001
_SPINS: Final = 20
_PAUSE_S: Final = 0.0005
_LOOK_FOR_DEAD_S: Final = 0.005


def _open_board(run: Path) -> tuple[mmap.mmap, memoryview]:
    _, memory = open_shared(run, "board", BOARD_BYTES)
    return memory, memoryview(memory).cast("Q")


class WorkerTurns:
    """A worker's side: it alone writes its cell."""

    def __init__(self, run: Path, worker: int) -> None:
        assert 0 <= worker < WORKERS_MAX, f"a node has at most {WORKERS_MAX} workers"
        self._memory, self._words = _open_board(run)
        self._cell = (1 + worker) * _CELL_WORDS
        # Even, and another number than any that a filler may be waiting to see gone.
        self._turn = (self._words[self._cell + _TURN] | 1) + 1
        self._words[self._cell + _TURN] = self._turn
        self._words[self._cell + _STARTED] = started_at(os.getpid())
        self._words[self._cell + _HEARS_BARRIERS] = register_for_barriers()
        self._words[self._cell + _PID] = os.getpid()

    @property
    def revision(self) -> int:
        """The number of the filler's newest manifest."""
        return self._words[0]

    @property
    def is_inside(self) -> bool:
        return self._turn % 2 == 1

    def enter(self) -> None:
        """Frames may be looked up from here on."""
        self._turn += 1
        self._words[self._cell] = self._turn

    def leave(self) -> None:
        """Whatever was looked up is forgotten."""
        self._turn += 1
        self._words[self._cell] = self._turn

    def close(self) -> None:
        """Give the cell back."""
        self._words[self._cell + _PID] = 0
        self._words.release()
        self._memory.close()


class FillerTurns:
    """The filler's side."""

    def __init__(self, run: Path) -> None:
        self._memory, self._words = _open_board(run)
        self._stuck: dict[int, int] = {}

    def publish_revision(self, revision: int) -> None:
        """Tell the workers that a new manifest can be read."""
        self._words[0] = revision

    @property
    def revision(self) -> int:
        return self._words[0]

    async def wait_left(self) -> bool:
        """Wait until every worker has left the turn it may be in now; False: one is stuck in it.

        Call it after the frame was hidden, and touch the frame only after True.
        """
        await self.fence()
        inside = self._inside()
        if any(self._stuck.get(cell) == turn for cell, turn in inside.items()):
            inside = self._still_inside(inside, looks_for_dead=True)
            if any(self._stuck.get(cell) == turn for cell, turn in inside.items()):
                return False
        began_s = time.monotonic()
        spins = 0
        while inside:
            spins += 1
            await asyncio.sleep(0 if spins < _SPINS else _PAUSE_S)
            waited_s = time.monotonic() - began_s
            inside = self._still_inside(inside, looks_for_dead=waited_s > _LOOK_FOR_DEAD_S)
            if inside and waited_s > STUCK_S:
                self._stuck = inside
                return False
        return True

    async def fence(self) -> None:
        """What this process stored before is seen by all before what it stores after; as are their loads."""
        is_done = barrier()
        hears = self._column(_HEARS_BARRIERS)
        if not (is_done and all(hears[cell] for cell in self._turns())):
            await asyncio.sleep(_STORE_BUFFER_S)

    def workers(self) -> int:
        """How many workers have a cell and live."""
        return sum(map(self._is_alive, self._turns()))

    def close(self) -> None:
        """Give the memory back."""
        self._words.release()
        self._memory.close()

    def _column(self, word: int) -> list[int]:
        # In one piece: 256 cells read one by one would cost each fill 40 us three times.
        return self._words[_CELL_WORDS + word :: _CELL_WORDS].tolist()

    def _turns(self) -> dict[int, int]:
        """Cell -> turn of the workers that have a cell."""
        turns = self._column(_TURN)
        return {cell: turns[cell] for cell in compress(_CELLS, self._column(_PID))}

    def _inside(self) -> dict[int, int]:
        return {cell: turn for cell, turn in self._turns().items() if turn % 2}

    def _still_inside(self, inside: dict[int, int], *, looks_for_dead: bool) -> dict[int, int]:
        turns = self._column(_TURN)
        left = {cell: turn for cell, turn in inside.items() if turns[cell] == turn}
        if looks_for_dead:
            left = {cell: turn for cell, turn in left.items() if self._is_alive(cell)}
        return left

    def _is_alive(self, cell: int) -> bool:
        words = self._words[(1 + cell) * _CELL_WORDS :]
        return words[_PID] != 0 and started_at(words[_PID]) == words[_STARTED]


def started_at(pid: int) -> int:
    """When that process began, in ticks since boot; 0: it is gone. A number used again begins later."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - a path object costs more than the read
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = text.rpartition(b")")[2].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
