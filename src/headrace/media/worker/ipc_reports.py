"""Reports of child processes to the supervisor: readiness and metrics.

Only the parent writes the role's metrics file (docs/decisions/0004). Counters and histograms are
reported as increments, so the counts of a dead worker remain. Gauges are reported as values:
clients of all workers are summed; of other gauges the highest value counts, since all workers see
the same peers and only the filler sees the disks.

Each child has a socket pair. The parent sends one message, the configuration; the child sends
reports (`kernel.ipc`). The end of one process is visible to the other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from headrace.kernel.ipc import MessageConnection, message_decoder, receive_message
from headrace.kernel.logs import logger
from headrace.kernel.metrics import (
    REGISTRY,
    WRITE_EVERY_S,
    Delta,
    add_deltas,
    take_deltas,
)
from headrace.kernel.resilience import wait_event
from headrace.media.hottest import HOTTEST, Row, merge_rows, write_hottest

log = logger(__name__)
TICKET_SEED_BYTES: Final = 32
SUMMED: Final = frozenset({"media_connections"})
GaugeKey = tuple[str, tuple[tuple[str, str], ...]]


class ChildConfig(msgspec.Struct, kw_only=True):
    """The configuration of a child. `settings` are those of the sections `blobs` and `media`.

    The listeners are inherited descriptors. `ticket_seed` of TLS exists only in memory, so session
    tickets end with the node. `store_record` is the file that identifies the folder of objects.
    """

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
    ticket_seed: bytes = b""


class Report(msgspec.Struct, array_like=True):
    """One message of a child."""

    is_ready: bool
    grown: list[Delta]
    gauges: list[tuple[str, dict[str, str], float]]
    hottest: list[Row] = []
    """Its most requested objects."""


decode_report: Final[Callable[[bytes], Report]] = message_decoder(Report)
_decode_config: Final[Callable[[bytes], ChildConfig]] = message_decoder(ChildConfig)


class ReportSender:
    """The child's side. `run` ends when the parent has ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._is_ready = False
        self._parent_ended = asyncio.Event()
        # The parent sends nothing after the configuration.
        self._link = MessageConnection(_decode_config, lambda _: None, self._parent_ended.set)

    def read_config(self) -> ChildConfig:
        """Wait for the configuration. Raises: EOFError if the parent has ended."""
        return _decode_config(receive_message(self._control))

    async def run(self, stop: asyncio.Event) -> None:
        """Report every two seconds until cancelled; set `stop` when the parent has ended."""
        await self._link.connect(self._control)
        while not self._parent_ended.is_set():
            self._send()
            await self._link.flush()
            await wait_event(self._parent_ended, WRITE_EVERY_S)
        stop.set()

    def report_ready(self) -> None:
        """Report that this child serves."""
        self._is_ready = True
        self._send()

    async def close(self) -> None:
        """Send a last report."""
        self._send()
        await self._link.flush()
        self._link.close()

    def _send(self) -> None:
        self._link.send(Report(self._is_ready, take_deltas(), _gauges(), HOTTEST.top()))


class ReportCollector:
    """The parent's side of all children: combines their reports."""

    def __init__(self) -> None:
        self._hottest: dict[str, list[Row]] = {}
        self._gauges: dict[str, dict[GaugeKey, float]] = {}
        self._shown: dict[GaugeKey, float] = {}

    def take(self, child: str, report: Report) -> None:
        """Add a report of `child`."""
        add_deltas(report.grown)
        self._hottest[child] = report.hottest
        self._gauges[child] = {
            (name, tuple(sorted(labels.items()))): value for name, labels, value in report.gauges
        }
        self._show()

    def forget(self, child: str) -> None:
        """Remove the gauges of a child that has ended."""
        self._hottest.pop(child, None)
        if self._gauges.pop(child, None) is not None:
            self._show()

    def hottest(self) -> list[Row]:
        """The objects that clients of all children request most."""
        return merge_rows(self._hottest.values())

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


async def keep_hottest_file(folder: Path, rows: Callable[[], list[Row]]) -> None:
    """Write the most requested objects to the node's folder until cancelled."""
    while True:
        await asyncio.sleep(WRITE_EVERY_S)
        try:
            await asyncio.to_thread(write_hottest, folder, rows())
        except OSError as error:
            log.warning("hottest_not_written", error=str(error))


def _gauges() -> list[tuple[str, dict[str, str], float]]:
    return [
        (sample.name, sample.labels, sample.value)
        for family in REGISTRY.collect()
        if family.type == "gauge"
        for sample in family.samples
    ]
