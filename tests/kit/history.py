"""What was seen to happen, written down by those who saw it: clients and handlers, never the code under test.

A client notes that it asks (`invoke`) and what it was told: `ok`, `fail` (certainly nothing was done) or
`unknown` (it may have been done: a lost answer, a time limit). A handler notes `start` and `end`. Each process
writes a file of its own, one line an event in one write to a file opened for appending, before the answer
is used: what it knew survives its SIGKILL. Moments are CLOCK_MONOTONIC, which all processes of a machine
share and nobody sets. The checkers (see `checkers`) judge what `read_history` merges.

Source of the shape: the histories of Jepsen, where an unknown answer is an answer of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from headrace.kernel.errors import HeadraceError, Unavailable

INVOKE: Final = "invoke"
OK: Final = "ok"
FAIL: Final = "fail"
UNKNOWN: Final = "unknown"
START: Final = "start"
END: Final = "end"
LOST: Final = "lost"
"""What process `pid` was doing counts no more: it is about to be killed, or was declared dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a history."""

    kind: str
    what: str
    """The operation, or the queue whose handler ran."""
    at_ns: int
    pid: int
    call: str = ""
    """The same in an `invoke` and its answer, in a `start` and its `end`."""
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.at_ns / 1e9:.6f} pid={self.pid} {self.kind} {self.what} {told}".rstrip()


@dataclass(frozen=True, slots=True)
class History:
    """Every event of a run, by time."""

    events: tuple[Event, ...]
    torn: int = 0
    """Lines that a killed process did not finish."""

    def of(self, *kinds: str, what: str | None = None) -> tuple[Event, ...]:
        """Events of these kinds, of one operation or queue."""
        return tuple(e for e in self.events if e.kind in kinds and what in (None, e.what))

    def told(self, kind: str, what: str, fact: str) -> list[Any]:
        """One fact of each event of that kind and operation; a list of it counts as each of its items."""
        found: list[Any] = []
        for event in self.of(kind, what=what):
            value = event.facts[fact]
            found += value if isinstance(value, list) else [value]
        return found


class Operation:
    """A request under way: say `ok` with what the answer told, or leave with an error."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self.is_answered = False

    def ok(self, **facts: Any) -> None:
        """It was done, and this was told."""
        self._answer(OK, facts)

    def fail(self, **facts: Any) -> None:
        """It was certainly not done."""
        self._answer(FAIL, facts)

    def unknown(self, **facts: Any) -> None:
        """It may have been done."""
        self._answer(UNKNOWN, facts)

    def _answer(self, kind: str, facts: dict[str, Any]) -> None:
        assert not self.is_answered, "an operation has one answer"
        self.is_answered = True
        self._write(kind, **facts)


class Recorder:
    """Appends this process's events to a file of its own in `folder`; a forked child gets its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._descriptor = -1
        self._calls = count(1)
        folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Close the file; a later event opens another."""
        if self._pid == os.getpid():
            os.close(self._descriptor)
        self._pid = 0

    def note(
        self, kind: str, what: str, *, call: str = "", pid: int | None = None, **facts: Any
    ) -> None:
        """Write one event down; it has left this process when this returns. `pid`: of whom it tells."""
        if self._pid != os.getpid():
            self._open()
        row = {"kind": kind, "what": what, "at_ns": time.monotonic_ns(), "pid": pid or self._pid}
        line = json.dumps({**row, "call": call, "facts": facts}, default=str) + "\n"
        data = line.encode()
        written = os.write(self._descriptor, data)
        assert written == len(data), "the disk is full: the history would be torn"

    @contextmanager
    def asking(self, what: str, **facts: Any) -> Iterator[Operation]:
        """`with recorder.asking("enqueue", key="a") as asked:` ... `asked.ok(job=7)`.

        An error is noted and goes on: ours is a `fail` unless the engine was unavailable; anything else
        is `unknown`, and so is a block left without an answer.
        """
        call = self._next_call()

        def write(kind: str, **told: Any) -> None:
            self.note(kind, what, call=call, **{**facts, **told})

        write(INVOKE)
        asked = Operation(write)
        try:
            yield asked
        except BaseException as error:
            if not asked.is_answered:
                is_certain = isinstance(error, HeadraceError) and not isinstance(error, Unavailable)
                answer = asked.fail if is_certain else asked.unknown
                answer(error=f"{type(error).__name__}: {error}")
            raise
        if not asked.is_answered:
            asked.unknown()

    @contextmanager
    def running(self, queue: str, **facts: Any) -> Iterator[None]:
        """Around a handler's body: `start` before it, `end` after it unless it raised."""
        call = self._next_call()
        self.note(START, queue, call=call, **facts)
        try:
            yield
        except BaseException as error:
            self.note(END, queue, call=call, **facts, error=f"{type(error).__name__}: {error}")
            raise
        self.note(END, queue, call=call, **facts)

    def _next_call(self) -> str:
        return f"{os.getpid()}.{next(self._calls)}"

    def _open(self) -> None:
        pid = os.getpid()
        name = f"{pid}-{time.monotonic_ns()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._folder / name, flags, 0o644)
        self._pid = pid


def read_history(folder: Path) -> History:
    """Everything that recorders wrote into `folder`, by time. Raises: ValueError for a line that is none."""
    events: list[Event] = []
    torn = 0
    for file in sorted(folder.glob("*.jsonl")):
        *lines, rest = file.read_text().split("\n")
        torn += bool(rest)
        events += _parsed(file, lines)
    return History(tuple(sorted(events, key=lambda event: event.at_ns)), torn)


def _parsed(file: Path, lines: Iterable[str]) -> Iterator[Event]:
    for number, line in enumerate(lines, 1):
        try:
            yield Event(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}:{number} is no event: {error}") from error
