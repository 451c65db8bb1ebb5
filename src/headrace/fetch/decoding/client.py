"""The parent side of the decoders: start child processes, send files, receive results.

**Photos.** The first photo starts the child, in a new interpreter and never by a fork. One photo is
decoded at a time; others wait in a queue. If the child dies or times out, a new child decodes the
photo once more: one crash may have another cause, two crashes are the fault of the photo. Randomly
chosen photos are skipped while others wait, unless all are to be decoded (`fetch.decode_share` 1).

**Spreadsheets.** Each one has a child of its own.
"""

from __future__ import annotations

import asyncio
import io
import random
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import msgspec

from headrace.fetch.images import PIXELS_MAX, ImageInfo, NotAPhoto, is_suspicious
from headrace.kernel import metrics
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.sandbox import Child, ChildGone, start_child

PHOTO_S_MAX: Final = 60.0
"""Wall-clock limit; on a busy machine 10 s of CPU time take longer than 10 s."""
LOT_LINE_MAX: Final = 2
"""A randomly chosen photo is skipped while this many photos are decoded or wait."""
DECODES: Final = metrics.counter(
    "fetch_decodes_total",
    "Photos decoded completely, by result.",
    result=("sound", "refused", "died"),
)
_PHOTO_CHILD: Final = Path(__file__).with_name("photo_child.py")
_HEAD: Final = struct.Struct("!4sI")
_HASH: Final = re.compile("[0-9a-f]{16}", re.ASCII)
_LOG: Final = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """The resource limits for decoding one photo."""

    memory_bytes_max: int = 2**30
    """50 megapixels need 200 MB; a progressive JPEG or an AVIF up to four times as much."""
    cpu_s_max: float = 10.0
    pixels_max: int = PIXELS_MAX
    frames_max: int = 300


class DecoderDown(Unavailable):
    """The process that decodes photos cannot be started; the photo is retried later."""

    code = "fetch.decoder_unavailable"


class Decoder:
    """Decodes suspicious photos and a random share of the others in a child process."""

    def __init__(
        self, share: float, limits: DecodeLimits | None = None, *, python: str = sys.executable
    ) -> None:
        self._share = share
        self._limits = limits or DecodeLimits()
        self._python = python
        self._child: Child | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._in_line = 0

    @property
    def child_pid(self) -> int | None:
        """The process id of the child; None before the first photo."""
        return None if self._child is None else self._child.pid

    async def check(self, data: bytes, image: ImageInfo) -> int | None:
        """Decode `data` if it is suspicious or randomly chosen; return its perceptual hash.

        Raises: NotAPhoto, DecoderDown.
        """
        if self._share < 1 and not is_suspicious(image, len(data)):
            is_drawn = self._share > 0 and random.random() < self._share
            if not is_drawn or self._in_line >= LOT_LINE_MAX:
                return None
        return await self.decode(data, image.format)

    async def decode(self, data: bytes, kind: str) -> int | None:
        """Decode `data` completely as the format `kind`; return its perceptual hash.

        None: it is a plain picture. Raises: NotAPhoto, DecoderDown.
        """
        self._in_line += 1
        loop = asyncio.get_running_loop()
        try:
            outcome, text = await loop.run_in_executor(self._thread, self._decode, data, kind)
        finally:
            self._in_line -= 1
        if outcome:
            raise NotAPhoto(outcome, f"the photo cannot be decoded: {text}")
        # The child may be under an attacker's control: any other text is no hash.
        return int.from_bytes(bytes.fromhex(text), signed=True) if _HASH.fullmatch(text) else None

    async def close(self) -> None:
        """Stop the child and the thread."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._drop()

    def _decode(self, data: bytes, kind: str) -> tuple[str, str]:
        how = ""
        for _ in range(2):
            try:
                head = _HEAD.pack(kind.encode().ljust(4), len(data))
                answer = self._running_child().request(head, data, timeout_s=PHOTO_S_MAX)
            except ChildGone as gone:
                self._drop()
                how = str(gone)
                _LOG.warning("decoder_died", kind=kind, size_bytes=len(data), how=how)
                metrics.bound(DECODES, "fetch_decodes_total", result="died").inc()
            else:
                outcome, _, text = answer.decode(errors="replace").partition("\t")
                result = "refused" if outcome else "sound"
                metrics.bound(DECODES, "fetch_decodes_total", result=result).inc()
                return outcome, text
        return "refused:undecodable", how

    def _running_child(self) -> Child:
        if self._child is None:
            try:
                self._child = Child(self._python, _PHOTO_CHILD, astuple(self._limits))
            except (OSError, ChildGone) as error:
                raise DecoderDown(
                    f"the process that decodes photos cannot be started ({error}): check free"
                    " memory, and that the extra `fetch` is installed",
                    retry_after_s=10,
                ) from error
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


SHEET_ROW_S_MAX: Final = 120.0
"""Longest wait for the next row; CPU time is limited in the child itself."""
ROW_BYTES_MAX: Final = 4 * 2**20
BLOCK_BYTES: Final = 256 * 1024
MEMORY_BYTES_MAX: Final = 2**30
CPU_S_MAX: Final = 120
UNPACKED_BYTES_MAX: Final = 2**30
_SHEET_CHILD: Final = Path(__file__).with_name("sheet_child.py")
_OVER_LIMIT: Final = frozenset({-signal.SIGABRT, -signal.SIGKILL, -signal.SIGXCPU, -signal.SIGSEGV})


class SheetUnreadable(Exception):
    """A workbook cannot be read.

    `code` is `sheet_damaged`, `sheet_password`, `sheet_too_large` or `is_zip`.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class SheetRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that is not empty: its line in the sheet, counted from 1, and its cells."""

    line: int
    cells: list[str]


class SheetName(msgspec.Struct, frozen=True):
    """The start of a visible sheet."""

    sheet: str


class _Ended(msgspec.Struct, frozen=True):
    """The end of the response; `fault` is the code of an error."""

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
    """Each visible sheet of the workbook in `stream`, followed by its rows. Blocks.

    The child ends with the iterator. Raises: SheetUnreadable, and any error of reading `stream`.
    """
    limits = memory_bytes_max, cpu_s_max, unpacked_bytes_max
    link, process = start_child(sys.executable, _SHEET_CHILD, limits)
    with link:
        try:
            link.settimeout(SHEET_ROW_S_MAX)
            yield from _exchange(link, stream, process)
        finally:
            process.kill()
            process.wait()


def _exchange(
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
    """Require that a response ended without a fault. Raises: SheetUnreadable, DecodeError."""
    ended = _decode_end(line)
    if ended.fault is not None:
        raise SheetUnreadable(ended.fault)


def _code_of(process: subprocess.Popen[bytes]) -> str:
    """The fault of a file whose child died: over a limit, or damaged."""
    try:
        is_over = process.wait(1) in _OVER_LIMIT
    except subprocess.TimeoutExpired:
        is_over = True
    return "sheet_too_large" if is_over else "sheet_damaged"
