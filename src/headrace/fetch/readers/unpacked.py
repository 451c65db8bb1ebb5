"""The bytes of a file, unpacked within bounds.

gzip expands up to 1,028 times (measured), so the bound that matters is on the unpacked bytes: reading
stops there, whatever the file says. The packed file was bounded when it was received.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any, Final

from headrace.fetch.readers.row import Truncated, broken, too_large

SNIFF_BYTES: Final = 64 * 1024


def open_unpacked(path: Path, *, bytes_max: int) -> io.BufferedReader:
    """The bytes of `path`, of what it packs if it is gzip. Reading raises as the file demands.

    Raises while read: Truncated, CatalogueBroken, CatalogueTooLarge.
    """
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    source: IO[bytes] = gzip.open(path, "rb") if is_packed else path.open("rb")  # type: ignore[assignment] # noqa: SIM115
    bounded: Any = _Bounded(source, bytes_max)
    return io.BufferedReader(bounded, SNIFF_BYTES)


class _Bounded(io.RawIOBase):
    """Bytes of `source`, at most `bytes_max`; faults of packing in our words."""

    def __init__(self, source: IO[bytes], bytes_max: int) -> None:
        self._source = source
        self._bytes_max = bytes_max
        self._bytes_read = 0
        self._is_cut = False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._source.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            block = self._read(len(buffer))
        except (gzip.BadGzipFile, zlib.error) as error:
            raise broken("gzip", detail=str(error)) from None
        self._bytes_read += len(block)
        if self._bytes_read > self._bytes_max:
            raise too_large(self._bytes_max)
        buffer[: len(block)] = block
        return len(block)

    def _read(self, size_bytes: int) -> bytes:
        """The next bytes, also the last ones before packed data breaks off. Raises: Truncated behind those."""
        blocks: list[bytes] = []
        while size_bytes and not self._is_cut:
            try:
                block = self._source.read1(size_bytes)  # type: ignore[attr-defined]
            except EOFError:
                self._is_cut = True
                break
            if not block:
                break
            blocks.append(block)
            size_bytes -= len(block)
        if self._is_cut and not blocks:
            raise Truncated("truncated_gzip")
        return b"".join(blocks)
