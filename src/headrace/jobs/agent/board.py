"""The board: one 64-byte cell a slot in memory shared by agent and slots, written before each handler call.

It says what a slot is doing when the slot itself cannot say it any more: which job ran when its process died, for
how long a call in C code has been running, when its event loop last turned. Nothing is sent for that, and a
slot writes its own cell only.

A cell is eight words, each stored by one instruction, under a sequence lock: the first word is odd while the
others are written, and a reader looks again until it finds it even and unchanged around them.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import Final

CELL_BYTES: Final = 64
SLOTS_MAX: Final = 4096
_WORDS: Final = CELL_BYTES // 8
_WRITES, _JOB, _JOBS, _STARTED, _TIMEOUT, _BEAT = range(6)
_READS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Doing:
    """What a cell says. Moments are CLOCK_MONOTONIC, which all processes of a machine share."""

    job_id: int | None
    """The job that runs alone; None where several do, or none."""
    jobs: int
    """Jobs whose calls run."""
    started_s: float
    timeout_s: float
    beat_s: float
    """When the slot's event loop last turned; 0: never yet."""
    is_whole: bool = True
    """False: the slot stands in the midst of a write, having lost its core or its life there."""


class SlotCell:
    """A slot's side of its cell; the runner writes here before and after each call."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._writes = 0

    def begin(self, job_id: int, jobs: int, timeout_s: float) -> None:
        """`jobs` run from now on: `job_id` alone, or several (-1)."""
        now_ns = time.monotonic_ns()
        self._write(job_id, jobs, now_ns, int(timeout_s * 1e9))
        self._words[_BEAT] = now_ns

    def beat(self) -> None:
        """The event loop turns."""
        self._words[_BEAT] = time.monotonic_ns()

    def end(self) -> None:
        """Nothing runs any more."""
        self._write(0, 0, 0, 0)

    def _write(self, job_id: int, jobs: int, started_ns: int, timeout_ns: int) -> None:
        words = self._words
        self._writes += 2
        words[_WRITES] = self._writes - 1
        words[_JOB], words[_JOBS] = job_id, jobs
        words[_STARTED], words[_TIMEOUT] = started_ns, timeout_ns
        words[_WRITES] = self._writes


class Board:
    """All cells; made by the agent, its descriptor is inherited by the zygote and so by every slot."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, SLOTS_MAX * CELL_BYTES)
        self._words = memoryview(self._memory).cast("q")

    @classmethod
    def make(cls) -> Board:
        """A new board with empty cells."""
        descriptor = os.memfd_create("headrace-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, SLOTS_MAX * CELL_BYTES)
        return cls(descriptor)

    def cell(self, number: int) -> SlotCell:
        """The cell of slot `number`, to write."""
        return SlotCell(self._cell(number))

    def clear(self, number: int) -> None:
        """Empty a cell before its number is given to a new slot."""
        words = self._cell(number)
        for index in range(_WORDS):
            words[index] = 0

    def read(self, number: int) -> Doing:
        """What slot `number` is doing."""
        words = self._cell(number)
        for _ in range(_READS_MAX):
            writes = words[_WRITES]
            job_id, jobs = words[_JOB], words[_JOBS]
            started_ns, timeout_ns = words[_STARTED], words[_TIMEOUT]
            is_whole = writes % 2 == 0 and words[_WRITES] == writes
            if is_whole:
                break
        return Doing(
            job_id=job_id if jobs == 1 else None,
            jobs=jobs,
            started_s=started_ns / 1e9,
            timeout_s=timeout_ns / 1e9,
            beat_s=words[_BEAT] / 1e9,
            is_whole=is_whole,
        )

    def close(self) -> None:
        """Give the memory back."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)

    def _cell(self, number: int) -> memoryview:
        return self._words[number * _WORDS : (number + 1) * _WORDS]
