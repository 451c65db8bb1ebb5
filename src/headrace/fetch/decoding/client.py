"""X"""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import msgspec

from headrace.fetch.images import PIXELS_MAX, ImageInfo, NotAPhoto, is_suspicious
from headrace.kernel import metrics
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger

PHOTO_S_MAX: Final = 60.0
"""By the clock, for a child that was stopped: on a busy machine 10 s of CPU take longer."""
START_S_MAX: Final = 30.0
LOT_LINE_MAX: Final = 2
"""A photo drawn by lot is passed over while so many are being decoded or wait for it."""
DECODES: Final = metrics.counter(
    "fetch_decodes_total",
    "Photos decoded whole, by what came of it.",
    result=("sound", "refused", "died"),
)
_PHOTO_CHILD: Final = Path(__file__).with_name("photo_child.py")
_HEAD: Final = struct.Struct("!4sI")
_LENGTH: Final = struct.Struct("!H")
_LOG: Final = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """What the decoding of one photo may take."""

    memory_bytes_max: int = 2**30
    """50 megapixels need 200 MB, a progressive JPEG or an AVIF of that size up to four times as much."""
    cpu_s_max: float = 10.0
    pixels_max: int = PIXELS_MAX
    frames_max: int = 300


class DecoderDown(Unavailable):
    """No process that decodes photos can be started; the photo is looked at again later."""

    code = "fetch.decoder_unavailable"


class _ChildGone(Exception):
    """The child ended or gave no answer; the text says how."""


class _Child:
    """One process; every call blocks."""

    def __init__(self, python: str, limits: DecodeLimits) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [python, "-I", "-B", str(_PHOTO_CHILD), *map(str, astuple(limits))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
            )
        try:
            self._receive_answer(time.monotonic() + START_S_MAX)
        except _ChildGone:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, data: bytes, kind: str) -> tuple[str, str]:
        """(outcome or nothing, text) about a photo. Raises: _ChildGone."""
        ends_s = time.monotonic() + PHOTO_S_MAX
        try:
            self._link.settimeout(PHOTO_S_MAX)
            self._link.sendall(_HEAD.pack(kind.encode().ljust(4), len(data)))
            self._link.sendall(data)
        except OSError as error:
            raise _ChildGone(self._how(error)) from error
        return self._receive_answer(ends_s)

    def end(self) -> None:
        """Kill it, if it still is."""
        self._link.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)

    def _receive_answer(self, ends_s: float) -> tuple[str, str]:
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, ends_s))
        outcome, _, text = self._receive(length, ends_s).decode(errors="replace").partition("\t")
        return outcome, text

    def _receive(self, length: int, ends_s: float) -> bytes:
        data = b""
        while len(data) < length:
            try:
                self._link.settimeout(max(0.001, ends_s - time.monotonic()))
                block = self._link.recv(length - len(data))
            except OSError as error:
                raise _ChildGone(self._how(error)) from error
            if not block:
                raise _ChildGone(self._how(None))
            data += block
        return data

    def _how(self, error: OSError | None) -> str:
        if isinstance(error, TimeoutError):
            return "its decoder gave no answer"
        try:
            return f"its decoder ended with {self._process.wait(1)}"
        except subprocess.TimeoutExpired:
            return "its decoder closed its socket"


class Decoder:
    """Decodes a share of the photos of a process, and all that are odd, in a child."""

    def __init__(
        self, share: float, limits: DecodeLimits | None = None, *, python: str = sys.executable
    ) -> None:
        self._share = share
        self._limits = limits or DecodeLimits()
        self._python = python
        self._child: _Child | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._in_line = 0

    @property
    def child_pid(self) -> int | None:
        """The process that decodes, once there is one."""
        return None if self._child is None else self._child.pid

    async def check(self, data: bytes, image: ImageInfo) -> None:
        """Decode `data` if it is odd or its lot is drawn. Raises: NotAPhoto, DecoderDown."""
        if not is_suspicious(image, len(data)):
            is_drawn = self._share > 0 and random.random() < self._share
            if not is_drawn or self._in_line >= LOT_LINE_MAX:
                return
        await self.decode(data, image.format)

    async def decode(self, data: bytes, kind: str) -> None:
        """Decode `data` whole; `kind` is the format that its header says. Raises: NotAPhoto, DecoderDown."""
        self._in_line += 1
        loop = asyncio.get_running_loop()
        try:
            outcome, text = await loop.run_in_executor(self._thread, self._ask, data, kind)
        finally:
            self._in_line -= 1
        if outcome:
            raise NotAPhoto(outcome, f"the photo cannot be decoded: {text}")

    async def close(self) -> None:
        """End the child and the thread."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._drop()

    def _ask(self, data: bytes, kind: str) -> tuple[str, str]:
        how = ""
        for _ in range(2):
            try:
                outcome, text = self._present().ask(data, kind)
            except _ChildGone as gone:
                self._drop()
                how = str(gone)
                _LOG.warning("decoder_died", kind=kind, size_bytes=len(data), how=how)
                metrics.bound(DECODES, "fetch_decodes_total", result="died").inc()
            else:
                result = "refused" if outcome else "sound"
                metrics.bound(DECODES, "fetch_decodes_total", result=result).inc()
                return outcome, text
        return "refused:undecodable", how

    def _present(self) -> _Child:
        if self._child is None:
            try:
                self._child = _Child(self._python, self._limits)
            except (OSError, _ChildGone) as error:
                raise DecoderDown(
                    f"no process that decodes photos can be started ({error}): is memory left, and is"
                    " the extra `fetch` installed?",
                    retry_after_s=10,
                ) from error
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


SHEET_ROW_S_MAX: Final = 120.0
"""Longest time without a further row; CPU time is bounded in the process itself."""
ROW_BYTES_MAX: Final = 4 * 2**20
BLOCK_BYTES: Final = 256 * 1024
MEMORY_BYTES_MAX: Final = 2**30
CPU_S_MAX: Final = 120
UNPACKED_BYTES_MAX: Final = 2**30
_SHEET_CHILD: Final = Path(__file__).with_name("sheet_child.py")
_OVER_LIMIT: Final = frozenset({-signal.SIGABRT, -signal.SIGKILL, -signal.SIGXCPU, -signal.SIGSEGV})


class SheetUnreadable(Exception):
    """A workbook cannot be read; `code` is `sheet_damaged`, `sheet_password`, `sheet_too_large` or `is_zip`."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class SheetRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that is not empty: its line in the sheet, from 1, and its cells."""

    line: int
    cells: list[str]


class SheetName(msgspec.Struct, frozen=True):
    """A visible sheet begins."""

    sheet: str


class _Ended(msgspec.Struct, frozen=True):
    """The last answer; `fault` says why there are no more rows."""

    fault: str | None = None
    end: bool = False


_decode_row: Final = msgspec.json.Decoder(SheetRow).decode
_decode_name: Final = msgspec.json.Decoder(SheetName).decode
_decode_end: Final = msgspec.json.Decoder(_Ended).decode


def sheet_rows(
    stream: io.BufferedReader,
    *,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    cpu_s_max: int = CPU_S_MAX,
    unpacked_bytes_max: int = UNPACKED_BYTES_MAX,
) -> Iterator[SheetName | SheetRow]:
    """Every visible sheet of the workbook in `stream`, each followed by its rows. Blocking.

    The process ends with the iterator. Raises: SheetUnreadable, and what reading `stream` raises.
    """
    limits = memory_bytes_max, cpu_s_max, unpacked_bytes_max
    link, theirs = socket.socketpair()
    with link:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_SHEET_CHILD), *map(str, limits)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
            )
        try:
            link.settimeout(SHEET_ROW_S_MAX)
            yield from _converse(link, stream, process)
        finally:
            process.kill()
            process.wait()


def _converse(
    link: socket.socket, stream: io.BufferedReader, process: subprocess.Popen[bytes]
) -> Iterator[SheetName | SheetRow]:
    try:
        while block := stream.read(BLOCK_BYTES):
            link.sendall(block)
        link.shutdown(socket.SHUT_WR)
        with link.makefile("rb", BLOCK_BYTES) as answers:
            while line := answers.readline(ROW_BYTES_MAX):
                if line.startswith(b"["):
                    yield _decode_row(line)
                elif line.startswith(b'{"sheet"'):
                    yield _decode_name(line)
                else:
                    _require_end(line)
                    return
    except TimeoutError:
        raise SheetUnreadable("sheet_too_large") from None
    except (OSError, msgspec.DecodeError):
        pass
    raise SheetUnreadable(_code_of(process))


def _require_end(line: bytes) -> None:
    """Raises: SheetUnreadable, msgspec.DecodeError."""
    ended = _decode_end(line)
    if ended.fault is not None:
        raise SheetUnreadable(ended.fault)


def _code_of(process: subprocess.Popen[bytes]) -> str:
    """Why a process answered no more: it died over a limit, or the file broke it."""
    try:
        is_over = process.wait(1) in _OVER_LIMIT
    except subprocess.TimeoutExpired:
        is_over = True
    return "sheet_too_large" if is_over else "sheet_damaged"
