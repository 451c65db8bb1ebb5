"""Spreadsheets decoded in a process that may break, as photos are: a workbook is a stranger's file.

The reader of workbooks needs a whole one in memory, so memory, CPU time and the size after unpacking are bounded
in that process (`sheet_child`); what it dies of is a fault of the file alone. It lives for one file.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

ANSWER_S_MAX: Final = 120.0
"""Longest time without a further row; CPU time is bounded in the process itself."""
ROW_BYTES_MAX: Final = 4 * 2**20
BLOCK_BYTES: Final = 256 * 1024
MEMORY_BYTES_MAX: Final = 2**30
CPU_S_MAX: Final = 120
UNPACKED_BYTES_MAX: Final = 2**30
_CHILD: Final = Path(__file__).with_name("sheet_child.py")
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
                [sys.executable, "-I", "-B", str(_CHILD), *map(str, limits)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
            )
        try:
            link.settimeout(ANSWER_S_MAX)
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
