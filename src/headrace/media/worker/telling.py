"""What a child process of a node tells its parent: that it is ready, and what its series came to.

The parent alone writes the role's file of series (docs/decisions/0004). Counters and histograms are told as growth, so
what a dead worker counted stays. Of gauges the newest value is told: the clients of all workers are added up, of any
other gauge the highest counts, since every worker sees the same peers and only the filler sees the disks.

One socket pair a child. Down it comes one line, its orders; up it go reports; its end is the other's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.kernel.logs import logger
from headrace.kernel.metrics import (
    REGISTRY,
    WRITE_EVERY_S,
    Delta,
    add_deltas,
    take_deltas,
)
from headrace.media.hottest import ASKED, Row, added_up, write_hottest

log = logger(__name__)
LINE_BYTES_MAX: Final = 2**20
SUMMED: Final = frozenset({"media_connections"})
GaugeKey = tuple[str, tuple[tuple[str, str], ...]]


class Orders(msgspec.Struct, kw_only=True):
    """What a child goes by. `settings` are those of the sections `blobs` and `media`, as they were written; the
    listeners are descriptors that it inherits; `store_record` is the file that says which folder of objects is meant."""

    settings: dict[str, str]
    blobs_url: str
    store_record: str = ""
    data_folder: str
    run_folder: str
    log_level: str
    boot: str = ""
    number: int = 0
    workers: int = 0
    listener: int | None = None
    tls_listener: int | None = None


class Report(msgspec.Struct, array_like=True):
    """One line of a child."""

    is_ready: bool
    grown: list[Delta]
    gauges: list[tuple[str, dict[str, str], float]]
    hottest: list[Row] = []
    """What clients ask it for most."""


class Teller:
    """The child's end. `run` ends when the parent is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._is_ready = False
        self._writer: asyncio.StreamWriter | None = None

    def read_orders(self) -> Orders:
        """What the parent wants done; blocks until it says so. Raises: EOFError, where it is gone."""
        with self._control.makefile("rb") as lines:
            line = lines.readline(LINE_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise EOFError("the parent of this process ended before it said what to do")
        return msgspec.json.decode(line, type=Orders)

    async def run(self, stop: asyncio.Event) -> None:
        """Report every two seconds until cancelled; set `stop` when the parent is gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._control)
        gone = asyncio.ensure_future(_wait_end(reader))
        try:
            while not gone.done():
                await self._tell()
                await asyncio.wait({gone}, timeout=WRITE_EVERY_S)
            stop.set()
        except OSError:
            stop.set()
        finally:
            gone.cancel()

    def tell_ready(self) -> None:
        """This child serves now."""
        self._is_ready = True
        if self._writer is not None:
            self._write()

    async def close(self) -> None:
        """Tell what is left to tell."""
        with suppress(OSError):
            await self._tell()
        if self._writer is not None:
            self._writer.close()

    async def _tell(self) -> None:
        self._write()
        if self._writer is not None:
            await self._writer.drain()

    def _write(self) -> None:
        report = Report(self._is_ready, take_deltas(), _gauges(), ASKED.top())
        if self._writer is not None:
            self._writer.write(msgspec.json.encode(report) + b"\n")


class Heard:
    """The parent's end of all children: adds up what they tell."""

    def __init__(self) -> None:
        self._hottest: dict[str, list[Row]] = {}
        self._gauges: dict[str, dict[GaugeKey, float]] = {}
        self._shown: dict[GaugeKey, float] = {}

    def take(self, child: str, report: Report) -> None:
        """`child` told this."""
        add_deltas(report.grown)
        self._hottest[child] = report.hottest
        self._gauges[child] = {
            (name, tuple(sorted(labels.items()))): value for name, labels, value in report.gauges
        }
        self._show()

    def forget(self, child: str) -> None:
        """`child` is gone, and with it its gauges."""
        self._hottest.pop(child, None)
        if self._gauges.pop(child, None) is not None:
            self._show()

    def hottest(self) -> list[Row]:
        """What clients ask all children for most."""
        return added_up(self._hottest.values())

    def _show(self) -> None:
        keys = {key for gauges in self._gauges.values() for key in gauges} | self._shown.keys()
        changes: list[Delta] = []
        for key in keys:
            name, labels = key
            values = [gauges[key] for gauges in self._gauges.values() if key in gauges]
            value = sum(values) if name in SUMMED else max(values, default=0.0)
            change = value - self._shown.get(key, 0.0)
            self._shown[key] = value
            if change:
                changes.append((name, "gauge", name, dict(labels), change))
        add_deltas(changes)


async def leave_hottest(folder: Path, rows: Callable[[], list[Row]]) -> None:
    """Leave what clients of this node ask for most in its folder, until cancelled."""
    while True:
        await asyncio.sleep(WRITE_EVERY_S)
        try:
            await asyncio.to_thread(write_hottest, folder, rows())
        except OSError as error:
            log.warning("hottest_not_written", error=str(error))


def _gauges() -> list[tuple[str, dict[str, str], float]]:
    return list(_gauge_samples(REGISTRY.collect()))


def _gauge_samples(families: Iterable[Any]) -> Iterable[tuple[str, dict[str, str], float]]:
    for family in families:
        if family.type == "gauge":
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value


async def _wait_end(reader: asyncio.StreamReader) -> None:
    """Wait until the other side closes or resets the connection."""
    with suppress(ConnectionError):
        await reader.read()
