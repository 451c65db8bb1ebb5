"""A folder that was made once is never made anew: the mark in it, and what is expected to stand there.

A disk that is not mounted leaves an empty folder in its place, or none. Objects put there would be hidden once
the disk is back, and those on the disk look lost. So the folder is made at its first use alone, and gets a mark: a
file with a random id. The id is recorded where rows live (`SharedRecord`, for a folder that several hosts mount) and
in the data folder of this host, which is read first and needs no engine. From then on a folder is used only while its
mark says what was recorded. Each put reads the mark through the folder that it has open, a miss reads it before it is
believed, so a disk that goes while all runs is noticed too. A folder with objects and without any record is of an older version: it is
marked as it is, or used unmarked where nothing may be written.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from headrace.kernel.errors import Conflict, Unavailable
from headrace.kernel.logs import logger

MARK_FILE: Final = ".headrace-store"
"""In the folder; no key can name it."""
RECORD_FILE: Final = "object-store"
"""In the data folder."""
MARK: Final = re.compile(r"[0-9a-f]{32}")
MARK_BYTES_MAX: Final = 64
DAMAGED: Final = "unknown, since its record is damaged"
"""What a record expects that says no id: no folder is right by it until one is adopted."""
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
log = logger(__name__)


class SharedRecord(Protocol):
    """The record that all hosts of an installation share."""

    async def expected(self) -> str | None:
        """The id that is expected, if any is. Raises: Unavailable, SchemaBehind."""
        ...

    async def expect_first(self, mark: str) -> str:
        """Expect `mark` if nothing is expected yet; what is expected now. Raises: as `expected`."""
        ...

    async def expect(self, mark: str) -> None:
        """Expect `mark` from now on. Raises: as `expected`."""
        ...


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """Where it is recorded which store is expected."""

    file: Path
    shared: SharedRecord | None = None
    may_make: bool = True
    """Whether this process may make and mark the folder at its first use; a child leaves that to its parent."""


class MarkedFolder:
    """The folder of an object store, used only while it is the one that was recorded."""

    def __init__(self, folder: Path, record: StoreRecord) -> None:
        self._folder = folder
        self._record = record
        self._mark: str | None = None
        self._may_make = record.may_make
        self._making = threading.Lock()
        self.is_settled = False
        """Whether it was found to be the right one; a fault seen since takes that back."""

    async def settle(self) -> str | None:
        """See that it is the right one, make it at its first use; else what is wrong. Raises: OSError."""
        mark, expected = await asyncio.to_thread(self._look)
        if mark is not None and mark == expected:
            return self._judge(mark, mark)
        told, is_known = await self._ask_shared()
        expected = told or expected
        if expected is None:
            return await self._settle_first(mark, is_known=is_known)
        if expected != DAMAGED:
            # Also where it is another one: children of this process go by the record alone.
            await asyncio.to_thread(write_record, self._record.file, expected)
        return self._judge(mark, expected)

    async def adopt(self) -> str:
        """Make the folder if it is missing, and expect it as it is from now on; its id. Raises: OSError, Unavailable."""
        mark = await asyncio.to_thread(make_mark, self._folder)
        if self._record.shared is not None:
            await self._record.shared.expect(mark)
        await asyncio.to_thread(write_record, self._record.file, mark)
        self._judge(mark, mark)
        return mark

    def check(self, root: int) -> None:
        """Refuse a put into the open folder `root` if that is another than was settled. Raises: OSError."""
        if self._mark is not None and _read_at(root) != self._mark:
            self.is_settled = False
            raise OSError(errno.ESTALE, "the folder is another than before", str(self._folder))

    def lost(self) -> str | None:
        """What is wrong now, asked of nobody else: a miss in a folder that is not there is no miss."""
        mark, expected = (read_mark(self._folder), self._mark) if self.is_settled else self._look()
        if mark is not None and mark == (expected or mark):
            return None
        if expected is None and _has_content(self._folder):
            return None
        self.is_settled = False
        return _fault(self._folder, mark, expected)

    async def _settle_first(self, mark: str | None, *, is_known: bool) -> str | None:
        """Nothing is recorded, or nobody can say (`is_known`): go on with what is there, make it if nobody did."""
        has_content = await asyncio.to_thread(_has_content, self._folder)
        if not self._may_make or not is_known:
            is_usable = mark is not None or has_content
            return self._judge(mark, mark) if is_usable else _fault(self._folder, None, None)
        if mark is None:
            try:
                mark = await asyncio.to_thread(self._make_once, had_objects=has_content)
            except OSError:
                if not has_content:
                    raise
                return self._judge(None, None)
        shared = self._record.shared
        expected = await shared.expect_first(mark) if shared is not None else mark
        await asyncio.to_thread(write_record, self._record.file, expected)
        return self._judge(mark, expected)

    def _make_once(self, *, had_objects: bool) -> str:
        """For the first of those who use it at once, who also tells."""
        with self._making:
            mark = read_mark(self._folder)
            if mark is None:
                mark = make_mark(self._folder)
                log.info("object_store_marked", folder=str(self._folder), had_objects=had_objects)
            return mark

    async def _ask_shared(self) -> tuple[str | None, bool]:
        """What the shared record expects, and whether it could be asked."""
        if self._record.shared is None:
            return None, True
        try:
            return await self._record.shared.expected(), True
        except (Unavailable, Conflict):
            return None, False

    def _judge(self, mark: str | None, expected: str | None) -> str | None:
        if mark != expected:
            return _fault(self._folder, mark, expected)
        self._mark, self._may_make, self.is_settled = mark, False, True
        return None

    def _look(self) -> tuple[str | None, str | None]:
        return read_mark(self._folder), read_record(self._record.file) or self._mark


def read_mark(folder: Path) -> str | None:
    """The id in the mark of `folder`; None: no folder, or no mark in it. Raises: OSError."""
    try:
        root = os.open(folder, _FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _read_at(root)
    finally:
        os.close(root)


def make_mark(folder: Path) -> str:
    """Make `folder` if it is missing and mark it if it is not; the id in it. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    root = os.open(folder, _FOLDER)
    try:
        if (mark := _read_at(root)) is not None:
            return mark
        draft = f"{MARK_FILE}.{secrets.token_hex(4)}"
        mark = secrets.token_hex(16)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            _write_whole(os.open(draft, flags, 0o644, dir_fd=root), mark)
            try:
                os.link(draft, MARK_FILE, src_dir_fd=root, dst_dir_fd=root)
            except FileExistsError:
                # Of another process that was first, or half of one that no version of ours leaves.
                if _read_at(root) is None:
                    os.rename(draft, MARK_FILE, src_dir_fd=root, dst_dir_fd=root)
            except OSError:
                # A file system without hard links.
                os.rename(draft, MARK_FILE, src_dir_fd=root, dst_dir_fd=root)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=root)
        os.fsync(root)
        return _read_at(root) or mark
    finally:
        os.close(root)


def read_record(file: Path) -> str | None:
    """The id that the data folder's record expects, DAMAGED if it says none, None without a record. Raises: OSError."""
    try:
        said = file.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return said if MARK.fullmatch(said) else DAMAGED


def write_record(file: Path, mark: str) -> None:
    """Record `mark`; where the data folder cannot be written, the next start finds out anew."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        if read_record(file) == mark:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_whole(os.open(draft, flags, 0o644), mark)
        draft.replace(file)
    except OSError as error:
        log.warning("object_store_not_recorded", file=str(file), error=str(error))


def _write_whole(descriptor: int, mark: str) -> None:
    try:
        os.write(descriptor, f"{mark}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_at(root: int) -> str | None:
    try:
        descriptor = os.open(MARK_FILE, _READ, dir_fd=root)
    except FileNotFoundError:
        return None
    try:
        said = os.read(descriptor, MARK_BYTES_MAX).decode(errors="replace").strip()
        return said if MARK.fullmatch(said) else None
    finally:
        os.close(descriptor)


def _has_content(folder: Path) -> bool:
    """Whether anything stands in it that is not a mere trace of a disk or of us."""
    try:
        with os.scandir(folder) as entries:
            return any(not e.name.startswith(".") and e.name != "lost+found" for e in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _fault(folder: Path, mark: str | None, expected: str | None) -> str:
    if mark is not None:
        seen = f"it holds store {mark}"
    else:
        seen = "it has no mark" if folder.is_dir() else "it is not there"
    if expected is None:
        return f"{seen}, and whether it was used before cannot be asked now"
    return f"{seen}, expected is store {expected}"
