"""Histories of a test run, recorded by clients and handlers and never by the code under test.

A client records `invoke` and the result: `ok`, `fail` (certainly without effect) or `unknown` (a
lost reply or a timeout). A handler records `start` and `end`. Each process appends to its own file,
one line per event in one write, before it uses the result, so that its events survive SIGKILL.
Times are CLOCK_MONOTONIC, which all processes of a machine share. `read_history` merges the files,
and `checkers` judges them. Jepsen uses the same shape of history.
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
"""Ends all open runs of process `pid`, which is about to be killed or was declared dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a history."""

    kind: str
    what: str
    """The operation, or the queue whose handler ran."""
    at_ns: int
    pid: int
    call: str = ""
    """The id that joins an `invoke` to its result, and a `start` to its `end`."""
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.at_ns / 1e9:.6f} pid={self.pid} {self.kind} {self.what} {facts}".rstrip()


@dataclass(frozen=True, slots=True)
class History:
    """Every event of a run, by time."""

    events: tuple[Event, ...]
    torn: int = 0
    """Incomplete lines of killed processes."""

    def of(self, *kinds: str, what: str | None = None) -> tuple[Event, ...]:
        """Events of these kinds, of one operation or queue."""
        return tuple(e for e in self.events if e.kind in kinds and what in (None, e.what))

    def reported(self, kind: str, what: str, fact: str) -> list[Any]:
        """One fact of each event of a kind and operation; a list counts as its items."""
        found: list[Any] = []
        for event in self.of(kind, what=what):
            value = event.facts[fact]
            found += value if isinstance(value, list) else [value]
        return found


class Operation:
    """A request in progress; record its result with `ok`, `fail` or `unknown`."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self.is_answered = False

    def ok(self, **facts: Any) -> None:
        """Record success with the facts of the result."""
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
    """Appends the events of this process to its own file in `folder`, also after a fork."""

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
        """Write one event to the file before returning; `pid` is the process it describes."""
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

        An error is recorded and raised: a HeadraceError is `fail` unless an engine was unavailable.
        Any other error, and a block without a result, is `unknown`.
        """
        call = self._next_call()

        def write(kind: str, **reported: Any) -> None:
            self.note(kind, what, call=call, **{**facts, **reported})

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
        """Record `start` before and `end` after a handler's body."""
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


class HistoryReader:
    """Reads a folder's events; a further `read` parses only what was appended meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed_bytes: dict[Path, int] = {}
        self._events: list[Event] = []

    def skip(self) -> None:
        """Forget the events so far; the next `read` returns only later ones."""
        self.read()
        self._events.clear()

    def read(self) -> History:
        """All events so far, by time. Raises: ValueError for a malformed line."""
        torn = 0
        for file in sorted(self._folder.glob("*.jsonl")):
            done = self._parsed_bytes.get(file, 0)
            with file.open("rb") as opened:
                opened.seek(done)
                whole, newline, rest = opened.read().rpartition(b"\n")
            torn += bool(rest)
            self._parsed_bytes[file] = done + len(whole) + len(newline)
            if newline:
                self._events += _parsed(file, whole.decode().split("\n"))
        self._events.sort(key=lambda event: event.at_ns)
        return History(tuple(self._events), torn)


def read_history(folder: Path) -> History:
    """All events in `folder`, by time. Raises: ValueError for a malformed line."""
    return HistoryReader(folder).read()


def _parsed(file: Path, lines: Iterable[str]) -> Iterator[Event]:
    for number, line in enumerate(lines, 1):
        try:
            yield Event(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}:{number} is not an event: {error}") from error
