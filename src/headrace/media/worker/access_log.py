"""The access log of a worker: one line for each answer of both data planes.

Lines wait in bounded buffers, one here and one in the native plane (`native/access_log.h`). A
thread writes them, so a slow disk delays no client: lines beyond a buffer are dropped and counted.
All workers append to one file, in whole lines. The file is opened again when its path names another
file, so it is rotated by renaming, without a signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import counter
from headrace.media.model import MediaConfig
from headrace.media.requests import Request

WRITE_EVERY_S: Final = 0.1
CLOSE_S: Final = 2.0
BUFFER_BYTES: Final = 2 * 2**20
TEXT_CHARACTERS_MAX: Final = 1024
"""The characters of a target or a field that are kept, as in `native/access_log.h`."""
DROPPED: Final = counter(
    "media_access_log_dropped_total",
    "Lines of the access log that were lost because its file or pipe was too slow or failed.",
)
_SIGNATURE: Final = re.compile(r"(?<=[?&])s=[^&]*")
_UNSAFE: Final = re.compile(r"[^ !#-\[\]-~]")
_often: Final = SparseLogger(logger(__name__))


class LogEntry(NamedTuple):
    """An answer of the Python plane that has not ended."""

    client: str
    request: Request | None
    status: int
    cache: str
    began_s: float
    """Of the event loop's clock."""
    unix_s: float
    head_end: int
    """The connection's count of sent bytes at the end of the head."""


class AccessLog:
    """Formats lines, and writes them in a thread until `close`."""

    def __init__(self, config: MediaConfig) -> None:
        """Open the file. Raises: OSError."""
        self._is_json = config.access_log == "json"
        self._path = Path(config.access_log_path) if config.access_log_path else None
        self._file = -1
        self._native: tuple[Any, int] | None = None
        self._lines: list[bytes] = []
        self._lines_bytes = self._dropped = 0
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._open()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def open_native(self, library: Any) -> int:
        """A log for the native plane, as an address that is valid until `close`."""
        if self._native is None:
            self._native = library, library.access_log_open(self._is_json)
        return self._native[1]

    def end_native(self, entry: int, sent_bytes: int) -> None:
        """Write the line of an answer that the native plane began."""
        assert self._native is not None, "it made the entry"
        self._native[0].access_log_end(self._native[1], entry, sent_bytes)

    def end(self, entry: LogEntry, sent_bytes: int, now_s: float) -> None:
        """Write the line of an answer; `sent_bytes` is the connection's count."""
        body_bytes = max(0, sent_bytes - entry.head_end)
        make = _json_line if self._is_json else _combined_line
        line = make(entry, body_bytes, now_s - entry.began_s).encode("ascii")
        with self._lock:
            if self._lines_bytes + len(line) > BUFFER_BYTES:
                self._dropped += 1
                return
            self._lines.append(line)
            self._lines_bytes += len(line)

    def close(self) -> None:
        """Write what is left and close. The native plane has ended."""
        self._is_closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            return  # A pipe that nobody reads must not hold up the stop.
        if self._native is not None:
            self._native[0].access_log_close(self._native[1])
        if self._path is not None and self._file >= 0:
            os.close(self._file)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(WRITE_EVERY_S)
            with self._lock:
                lines, self._lines, self._lines_bytes = self._lines, [], 0
                dropped, self._dropped = self._dropped, 0
            if dropped:
                DROPPED.inc(dropped)
            self._write(b"".join(lines))
            self._write(self._take_native())

    def _take_native(self) -> bytes:
        if self._native is None:
            return b""
        library, log = self._native
        count, dropped = ctypes.c_int64(), ctypes.c_int64()
        at = library.access_log_take(log, ctypes.byref(count), ctypes.byref(dropped))
        if dropped.value:
            DROPPED.inc(dropped.value)
        return ctypes.string_at(at, count.value)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            if data:
                self._open()
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            DROPPED.inc(bytes(left).count(b"\n"))
            _often.warning("access_log_not_written", path=str(self._path), error=error.strerror)

    def _open(self) -> None:
        """Open the file, again if its path names another one now. Raises: OSError."""
        if self._path is None:
            self._file = sys.stdout.fileno()
            return
        if self._file >= 0:
            own = os.fstat(self._file)
            try:
                found = self._path.stat()
            except FileNotFoundError:
                found = None
            if found is not None and (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
                return
            os.close(self._file)
            self._file = -1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o640)


def _without_signature(text: str) -> str:
    path, mark, query = text[:TEXT_CHARACTERS_MAX].partition("?")
    return path + _SIGNATURE.sub("s=*", mark + query) if mark else path


def _json_line(entry: LogEntry, body_bytes: int, spent_s: float) -> str:
    request, milliseconds = entry.request, int(entry.unix_s * 1000)
    fields = request.fields if request is not None else {}
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    values = {
        "time": f"{moment}.{milliseconds % 1000:03d}Z",
        "client": entry.client or "-",
        "method": request.method if request is not None else "",
        "path": _without_signature(request.target) if request is not None else "",
        "status": entry.status,
        "bytes": body_bytes,
        "range": fields.get("range", "")[:TEXT_CHARACTERS_MAX],
        "referer": _without_signature(fields.get("referer", "")),
        "user_agent": fields.get("user-agent", "")[:TEXT_CHARACTERS_MAX],
        "duration_s": round(spent_s, 6),
        "cache": entry.cache,
        "plane": "python",
    }
    return json.dumps(values, separators=(",", ":")) + "\n"


def _combined_line(entry: LogEntry, body_bytes: int, _: float) -> str:
    request = entry.request
    fields = request.fields if request is not None else {}
    line = "-"
    if request is not None:
        version = "1.0" if request.is_http_1_0 else "1.1"
        line = f"{request.method} {_escaped(_without_signature(request.target))} HTTP/{version}"
    moment = time.strftime("%d/%b/%Y:%H:%M:%S +0000", time.gmtime(entry.unix_s))
    referer = _escaped(_without_signature(fields.get("referer", ""))) or "-"
    agent = _escaped(fields.get("user-agent", "")[:TEXT_CHARACTERS_MAX]) or "-"
    return (
        f'{entry.client or "-"} - - [{moment}] "{line}" {entry.status} {body_bytes} "{referer}"'
        f' "{agent}"\n'
    )


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
