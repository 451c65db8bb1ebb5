"""The child process that decodes one spreadsheet: it receives a file and returns rows.

It runs by path in an isolated interpreter. Its arguments are limits: bytes of memory, seconds of
CPU time, and bytes after unpacking. The parent sends the file and shuts down its side of the
socket. The response is lines of JSON:

    {"sheet": name}     a visible sheet begins
    [line, [text, ...]] a row that is not empty
    {"fault": code}     the file cannot be read; the last line
    {"end": true}       the last line

The library needs a whole workbook in memory. A workbook over the memory limit kills this process.
"""

from __future__ import annotations

import codecs
import io
import json
import resource
import sys
import zipfile
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import IO, Any

from python_calamine import CalamineError, PasswordError, SheetVisibleEnum, load_workbook

from headrace.kernel.sandbox import drop_privileges, open_link

BLOCK_BYTES = 256 * 1024
EXACT_DIGITS = ".15g"  # the precision of spreadsheets


def main(limits: list[str]) -> None:
    """Receive one file, decode it and send its rows."""
    memory_bytes_max, cpu_s, unpacked_bytes_max = map(int, limits)
    link = open_link()
    # Load the codec of file names in ZIP archives while files can still be opened.
    codecs.lookup("cp437")
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    drop_privileges(memory_bytes_max)
    with link.makefile("rb") as source, link.makefile("wb", BLOCK_BYTES) as out:
        for answer in answers(source, unpacked_bytes_max):
            out.write(json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n")


def answers(source: IO[bytes], unpacked_bytes_max: int) -> Iterator[Any]:
    """The response for a file, as decoded JSON."""
    try:
        data = source.read()
        if data.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                unpacked = sum(part.file_size for part in archive.infolist())
                names = archive.namelist()
            if unpacked > unpacked_bytes_max:
                yield {"fault": "sheet_too_large"}
                return
            if not any(name.startswith("xl/") or name == "content.xml" for name in names):
                yield {"fault": "is_zip"}
                return
        yield from workbook_rows(data)
    except PasswordError:
        yield {"fault": "sheet_password"}
    except (CalamineError, zipfile.BadZipFile, ValueError, OverflowError):
        yield {"fault": "sheet_damaged"}
    except MemoryError:
        yield {"fault": "sheet_too_large"}
    else:
        yield {"end": True}


def workbook_rows(data: bytes) -> Iterator[Any]:
    """The rows of every visible sheet. Raises: any error of the library."""
    book = load_workbook(io.BytesIO(data))
    for sheet in book.sheets_metadata:
        if sheet.visible != SheetVisibleEnum.Visible:
            continue
        yield {"sheet": sheet.name}
        found = book.get_sheet_by_name(sheet.name)
        if found.start is None:
            continue
        headings, filled = merged(found)
        for index, cells in enumerate(found.iter_rows()):
            texts = [text_of(cell) for cell in cells]
            for column, kept in filled.get(index, ()):
                if 0 <= column < len(texts):
                    texts[column] = kept.setdefault("text", texts[column])
            if any(texts) and not (index in headings and sum(map(bool, texts)) == 1):
                yield [index + 1, texts]


def merged(sheet: Any) -> tuple[set[int], dict[int, list[tuple[int, dict[str, str]]]]]:
    """The rows of merged headings, and the columns of each row that repeat a merged cell.

    The cells of a vertical merge share one dictionary, which stores the text of the first cell.
    """
    headings: set[int] = set()
    filled: dict[int, list[tuple[int, dict[str, str]]]] = {}
    for (top, left), (bottom, right) in sheet.merged_cell_ranges or ():
        if right > left:
            headings.update(range(top, min(bottom, sheet.end[0]) + 1))
            continue
        kept: dict[str, str] = {}
        for row in range(top, min(bottom, sheet.end[0]) + 1):
            filled.setdefault(row, []).append((left - sheet.start[1], kept))
    return headings, filled


def text_of(cell: Any) -> str:
    """The text of a cell as a person would type it."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return format(Decimal(format(cell, EXACT_DIGITS)), "f")
    if isinstance(cell, datetime):
        midnight = cell.time() == time()
        return cell.date().isoformat() if midnight else cell.isoformat(timespec="seconds")
    if isinstance(cell, date | time):
        return cell.isoformat()
    return str(cell)


if __name__ == "__main__":
    main(sys.argv[1:])
