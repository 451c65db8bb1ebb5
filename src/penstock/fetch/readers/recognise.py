"""Which format a file is, from its first 64 KiB, and its bytes unpacked within bounds.

gzip expands up to 1,028 times (measured), so the bound that matters is on the unpacked bytes: reading
stops there, whatever the file says. The packed file was bounded when it was received.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from xml.parsers import expat

from penstock.fetch.model import CatalogueTooLarge, NotACatalogue
from penstock.fetch.readers import delimited, yml
from penstock.fetch.readers.row import RawRow, Truncated, broken

SNIFF_BYTES: Final = 64 * 1024
_BOMS: Final = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_ACCEPTED: Final = "accepted are CSV and TSV with a header line (id, name, price, photos ...) and Yandex YML, gzip or not"
_MAGICS: Final = (
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive or an XLSX sheet"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG", "a PNG image"),
    (b"\xd0\xcf\x11\xe0", "an old Office file"),
)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A recognised file: `format` is csv, tsv or yml; `rows` can be read once."""

    format: str
    rows: Iterator[RawRow]


class _Bounded(io.RawIOBase):
    """Bytes of `source`, at most `bytes_max`; faults of packing in our words."""

    def __init__(self, source: IO[bytes], bytes_max: int) -> None:
        self._source = source
        self._bytes_max = bytes_max
        self._bytes_read = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._source.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            block = self._source.read(len(buffer))
        except EOFError:
            raise Truncated("the gzip data ends too early") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise broken(
                "gzip", f"the gzip data is damaged ({error}): pack the file again"
            ) from None
        self._bytes_read += len(block)
        if self._bytes_read > self._bytes_max:
            raise CatalogueTooLarge(
                f"the catalogue is over {self._bytes_max:,} bytes unpacked: split it, or raise"
                " fetch.catalogue_max"
            )
        buffer[: len(block)] = block
        return len(block)


def open_catalogue(path: Path, *, bytes_max: int) -> Catalogue:
    """Recognise the file at `path` and start reading it. Blocking: call it in a thread.

    Raises: NotACatalogue, CatalogueBroken, CatalogueTooLarge.
    """
    # Opening a FIFO would wait for a writer, for ever where there is none.
    if path.exists() and not path.is_file():
        raise NotACatalogue(f"{path.name} is no regular file; {_ACCEPTED}")
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    source: IO[bytes] = gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[assignment] # noqa: SIM115
    stream: Any = io.BufferedReader(_Bounded(source, bytes_max), SNIFF_BYTES)
    try:
        head = stream.peek(SNIFF_BYTES)
    except Truncated as cut:
        stream.close()
        raise NotACatalogue(f"the file cannot be unpacked: {cut.where}; {_ACCEPTED}") from None
    try:
        return _recognise(stream, head)
    except BaseException:
        stream.close()
        raise


def _recognise(stream: io.BufferedReader, head: bytes) -> Catalogue:
    if not head.strip():
        raise NotACatalogue(f"the file is empty; {_ACCEPTED}")
    for magic, name in _MAGICS:
        if head.startswith(magic):
            raise NotACatalogue(f"the file is {name}; {_ACCEPTED}")
    encoding = next((name for bom, name in _BOMS if head.startswith(bom)), "utf-8")
    if encoding != "utf-16" and b"\x00" in head:
        raise NotACatalogue(f"the file is binary data; {_ACCEPTED}")
    text = head.decode(encoding, errors="replace").lstrip()
    if text.startswith("<"):
        return _recognise_xml(stream, head)
    if text.startswith(("{", "[")):
        raise NotACatalogue(f"the file is JSON; {_ACCEPTED}")
    header = delimited.find_header(text)
    if header is None:
        first = text.splitlines()[0][:80]
        raise NotACatalogue(
            f"the file is text whose first line {first!r} names no column id with another known one;"
            f" {_ACCEPTED}"
        )
    return Catalogue(
        "tsv" if header == "\t" else "csv", delimited.read_rows(stream, encoding, header)
    )


def _recognise_xml(stream: io.BufferedReader, head: bytes) -> Catalogue:
    root: list[str] = []
    parser = expat.ParserCreate()
    parser.StartElementHandler = lambda name, _attributes: root.append(name)
    parser.StartDoctypeDeclHandler = yml.refuse_declarations
    try:
        parser.Parse(head, False)
    except (expat.ExpatError, ValueError, LookupError) as error:
        if not root:
            raise NotACatalogue(
                f"the file looks like XML and cannot be read ({error}); {_ACCEPTED}"
            ) from None
    if not root or root[0] != "yml_catalog":
        raise NotACatalogue(
            f"the file is XML with the root <{root[0][:40] if root else '?'}>; {_ACCEPTED}"
        )
    return Catalogue("yml", yml.read_offers(stream))
