"""Memory shared by agent and slots: one 64-byte cell per slot, written before each call.

It shows what a slot does when the slot itself cannot report it: which job ran when its process
died, how long a call in C code has been running, when its event loop last ran. It needs no
messages, and a slot writes only its own cell.

A cell is eight words, each stored by one instruction, under a sequence lock: the first word is odd
while the others are written, and a reader retries until it is even and unchanged around them.
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
class SlotStatus:
    """The content of a cell. Times are CLOCK_MONOTONIC, which all processes of a machine share."""

    job_id: int | None
    """The job that runs alone; None if several run, or none."""
    jobs: int
    """Jobs in running calls."""
    started_s: float
    timeout_s: float
    beat_s: float
    """When the slot's event loop last ran; 0: never yet."""
    is_whole: bool = True
    """False: the slot was interrupted or died during a write."""


class StatusCell:
    """A slot's own cell. Written from the slot's event loop alone; never waits or raises."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._writes = 0

    def begin(self, job_id: int, jobs: int, timeout_s: float, began_s: float | None = None) -> None:
        """Record that `jobs` run since `began_s`, before a further handler starts.

        `job_id` is the one that runs alone, or -1. A slot that runs long after `timeout_s` and its
        grace hangs.
        """
        now_ns = time.monotonic_ns()
        started_ns = now_ns if began_s is None else int(began_s * 1e9)
        self._write(job_id, jobs, started_ns, int(timeout_s * 1e9))
        self._words[_BEAT] = now_ns

    def beat(self) -> None:
        """Record that the event loop runs, about every second during calls."""
        self._words[_BEAT] = time.monotonic_ns()

    def end(self) -> None:
        """Record that no job runs."""
        self._write(0, 0, 0, 0)

    def _write(self, job_id: int, jobs: int, started_ns: int, timeout_ns: int) -> None:
        words = self._words
        self._writes += 2
        words[_WRITES] = self._writes - 1
        words[_JOB], words[_JOBS] = job_id, jobs
        words[_STARTED], words[_TIMEOUT] = started_ns, timeout_ns
        words[_WRITES] = self._writes


class StatusBoard:
    """All cells. The agent creates it; zygote and slots inherit its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, SLOTS_MAX * CELL_BYTES)).cast("q")

    @classmethod
    def make(cls) -> StatusBoard:
        """Create a board with empty cells."""
        descriptor = os.memfd_create("headrace-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, SLOTS_MAX * CELL_BYTES)
        return cls(descriptor)

    def cell(self, number: int) -> StatusCell:
        """The cell of slot `number`, for writing."""
        return StatusCell(self._cell(number))

    def clear(self, number: int) -> None:
        """Empty a cell before a new slot gets its number."""
        words = self._cell(number)
        for index in range(_WORDS):
            words[index] = 0

    def read(self, number: int) -> SlotStatus:
        """What slot `number` is running."""
        words = self._cell(number)
        for _ in range(_READS_MAX):
            writes = words[_WRITES]
            job_id, jobs = words[_JOB], words[_JOBS]
            started_ns, timeout_ns = words[_STARTED], words[_TIMEOUT]
            is_whole = writes % 2 == 0 and words[_WRITES] == writes
            if is_whole:
                break
        return SlotStatus(
            job_id=job_id if jobs == 1 else None,
            jobs=jobs,
            started_s=started_ns / 1e9,
            timeout_s=timeout_ns / 1e9,
            beat_s=words[_BEAT] / 1e9,
            is_whole=is_whole,
        )

    def _cell(self, number: int) -> memoryview:
        return self._words[number * _WORDS : (number + 1) * _WORDS]
