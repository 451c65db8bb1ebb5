"""Epochs: the filler never reuses a frame that a worker may be sending.

Each worker has a cell of 64 bytes in shared memory: a counter that is odd inside an epoch of its
event loop, its process id, and its start time. After hiding a frame, the filler:

1. has every processor execute a memory barrier (`linux.barrier`), or waits a millisecond;
2. copies the counters: a worker inside an epoch may have found the frame before it was hidden;
3. waits until each of those counters has changed. No frame is used beyond its epoch, so the frame
   is free.

Counters read before the barrier could miss a worker whose store is still in its store buffer. A
worker that died inside an epoch is skipped. If a worker is stopped or hangs, the fill gives up its
frame and passes the bytes through; later fills do not wait for the same epoch again.

The first cell belongs to the filler: the revision of its newest manifest.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import time
from itertools import compress
from pathlib import Path
from typing import Final

from headrace.media.cache.linux import barrier, open_shared, register_for_barriers

WORKERS_MAX: Final = 256
PLANE_CELLS: Final = 128
"""Cells from this one on belong to the native data planes of the workers with lower numbers."""
STUCK_S: Final = 0.25
"""Maximum time to wait for one epoch, which normally takes a millisecond."""
_CELLS: Final = range(WORKERS_MAX)
_CELL_WORDS: Final = 8
BOARD_BYTES: Final = (1 + WORKERS_MAX) * _CELL_WORDS * 8
_EPOCH, _PID, _STARTED, _HEARS_BARRIERS = range(4)
_STORE_BUFFER_S: Final = 0.001
_SPINS: Final = 20
_PAUSE_S: Final = 0.0005
_LOOK_FOR_DEAD_S: Final = 0.005


def _open_board(run: Path) -> tuple[mmap.mmap, memoryview]:
    _, memory = open_shared(run, "board", BOARD_BYTES)
    return memory, memoryview(memory).cast("Q")


class WorkerEpochs:
    """The epochs of one worker, which alone writes its cell."""

    def __init__(self, run: Path, worker: int) -> None:
        assert 0 <= worker < WORKERS_MAX, f"a node has at most {WORKERS_MAX} workers"
        self._memory, self._words = _open_board(run)
        self._cell = (1 + worker) * _CELL_WORDS
        self._exported: ctypes.Array[ctypes.c_uint64] | None = None
        # Even, and different from any value that a filler may be waiting for.
        self._epoch = (self._words[self._cell + _EPOCH] | 1) + 1
        self._words[self._cell + _EPOCH] = self._epoch
        self._words[self._cell + _STARTED] = started_at(os.getpid())
        self._words[self._cell + _HEARS_BARRIERS] = register_for_barriers()
        self._words[self._cell + _PID] = os.getpid()

    @property
    def revision(self) -> int:
        """The revision of the filler's newest manifest."""
        return self._words[0]

    @property
    def is_inside(self) -> bool:
        return self._epoch % 2 == 1

    def enter(self) -> None:
        """Begin an epoch: frames may be looked up."""
        self._epoch += 1
        self._words[self._cell] = self._epoch

    def leave(self) -> None:
        """End the epoch: no frame that was looked up is used any more."""
        self._epoch += 1
        self._words[self._cell] = self._epoch

    def addresses(self) -> tuple[int, int]:
        """The addresses of the board and of this worker's epoch, for the native data plane."""
        self._exported = (ctypes.c_uint64 * 1).from_buffer(self._memory)
        board = ctypes.addressof(self._exported)
        return board, board + self._cell * 8

    def close(self) -> None:
        """Release the cell."""
        self._exported = None
        self._words[self._cell + _PID] = 0
        self._words.release()
        self._memory.close()


class FillerEpochs:
    """The epochs of all workers, as the filler reads them."""

    def __init__(self, run: Path) -> None:
        self._memory, self._words = _open_board(run)
        self._stuck: dict[int, int] = {}

    def publish_revision(self, revision: int) -> None:
        """Publish that a new manifest can be read."""
        self._words[0] = revision

    @property
    def revision(self) -> int:
        return self._words[0]

    async def wait_for_workers(self) -> bool:
        """Wait until every worker has left its current epoch; False: one is stuck in it.

        Call it after hiding a frame, and reuse the frame only after True.
        """
        await self.fence()
        inside = self._inside()
        if any(self._stuck.get(cell) == epoch for cell, epoch in inside.items()):
            inside = self._still_inside(inside, looks_for_dead=True)
            if any(self._stuck.get(cell) == epoch for cell, epoch in inside.items()):
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
        """Order the stores and loads of all processes: those before the call come before those
        after it.
        """
        is_done = barrier()
        hears = self._column(_HEARS_BARRIERS)
        if not (is_done and all(hears[cell] for cell in self._epochs())):
            await asyncio.sleep(_STORE_BUFFER_S)

    def workers(self) -> int:
        """The number of live workers with a cell."""
        return sum(map(self._is_alive, (cell for cell in self._epochs() if cell < PLANE_CELLS)))

    def close(self) -> None:
        """Close the shared memory."""
        self._words.release()
        self._memory.close()

    def _column(self, word: int) -> list[int]:
        # Read as one slice: reading 256 cells one by one is far slower.
        return self._words[_CELL_WORDS + word :: _CELL_WORDS].tolist()

    def _epochs(self) -> dict[int, int]:
        """The epoch of each worker with a cell."""
        epochs = self._column(_EPOCH)
        return {cell: epochs[cell] for cell in compress(_CELLS, self._column(_PID))}

    def _inside(self) -> dict[int, int]:
        return {cell: epoch for cell, epoch in self._epochs().items() if epoch % 2}

    def _still_inside(self, inside: dict[int, int], *, looks_for_dead: bool) -> dict[int, int]:
        epochs = self._column(_EPOCH)
        left = {cell: epoch for cell, epoch in inside.items() if epochs[cell] == epoch}
        if looks_for_dead:
            left = {cell: epoch for cell, epoch in left.items() if self._is_alive(cell)}
        return left

    def _is_alive(self, cell: int) -> bool:
        words = self._words[(1 + cell) * _CELL_WORDS :]
        return words[_PID] != 0 and started_at(words[_PID]) == words[_STARTED]


def started_at(pid: int) -> int:
    """The start time of a process in ticks since boot; 0: none. It detects reused pids."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - a path object costs more than the read
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = text.rpartition(b")")[2].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
