"""Mount guard: refuse a blob folder whose marker is missing."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.engines.sql import load_queries
from headrace.kernel.errors import Conflict, Unavailable
from headrace.kernel.logs import logger

if TYPE_CHECKING:
    from headrace.engines.postgres import Postgres

MARK_FILE: Final = ".headrace-store"
"""In the folder; no key has this name."""
RECORD_FILE: Final = "object-store"
"""In the data folder."""
MARK: Final = re.compile(r"[0-9a-f]{32}")
MARK_BYTES_MAX: Final = 64
DAMAGED: Final = "unknown (its record is damaged)"
"""The expectation of a damaged record: no folder matches until one is adopted."""
NO_TABLES: Final = "the database has no record of earlier use yet"
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOG: Final = logger(__name__)
SQL: Final = load_queries("headrace.engines")


class StoreEmpty(Conflict):
    """The folder to adopt is missing or empty, and another one was in use."""

    code = "blobs.store_empty"


class PostgresRecord:
    """The expected id, shared by all hosts of an installation, as a row of PostgreSQL."""

    def __init__(self, postgres: Callable[[], Postgres]) -> None:
        """`postgres` is called on first use."""
        self._postgres = postgres

    async def expected(self) -> str | None:
        """The expected id, or None. Raises: Unavailable, SchemaBehind."""
        mark: str | None = await self._postgres().value(SQL.expected_store)
        return mark

    async def expect_first(self, mark: str) -> str:
        """Expect `mark` unless an id is recorded; return the expected id. Raises: as `expected`."""
        await self._postgres().run(SQL.expect_first_store, mark=mark)
        return await self.expected() or mark

    async def expect(self, mark: str) -> None:
        """Replace the expected id by `mark`. Raises: as `expected`."""
        await self._postgres().run(SQL.expect_store, mark=mark)


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """Where the expected id is recorded."""

    file: Path
    shared: PostgresRecord | None = None
    may_create: bool = True
    """Whether this process may create the folder and its marker; a child process may not."""


class MountGuard:
    """Refuses a blob folder whose marker is missing or different.

    A disk that is not mounted leaves an empty folder, or none, in its place. Objects written there
    would be hidden once the disk is back. So the folder is created only at its first use and gets a
    marker: a file with a random id. The id is recorded in PostgreSQL, for a folder that several
    hosts mount, and in the data folder of this host, which is read first.

    Each put reads the marker through its open folder, and a miss reads it before it is reported, so
    a disk that disappears at run time is noticed too. A folder with objects but without any record
    gets a marker as it is, or is used without one if it is read-only.
    """

    def __init__(self, folder: Path, record: StoreRecord) -> None:
        self._folder = folder
        self._record = record
        self._mark: str | None = None
        self._has_tables = True
        self._may_create = record.may_create
        self._create_lock = threading.Lock()
        self.is_verified = False
        """Whether the last check of the folder succeeded."""

    async def verify(self) -> str | None:
        """Check the folder, or create it at its first use; return the fault. Raises: OSError."""
        mark, expected = await asyncio.to_thread(self._read_both)
        if mark is not None and mark == expected:
            return self._compare(mark, mark)
        shared, is_known = await self._read_shared()
        expected = shared or expected
        if expected is None:
            return await self._verify_first_use(mark, is_known=is_known)
        if expected != DAMAGED:
            # Also for a mismatch: child processes use only this record.
            await asyncio.to_thread(write_record, self._record.file, expected)
        if mark is None:
            # Another process at its first use creates the marker, then records its id.
            mark = await asyncio.to_thread(read_mark, self._folder)
        return self._compare(mark, expected)

    async def adopt(self, *, is_empty: bool = False) -> str:
        """Accept the folder as it is, creating it if missing; return its id.

        `is_empty` also accepts a missing or empty folder instead of one that was in use.
        Raises: StoreEmpty, OSError, Unavailable.
        """
        if not is_empty:
            await self._require_content()
        mark = await asyncio.to_thread(make_mark, self._folder)
        if self._record.shared is not None:
            await self._record.shared.expect(mark)
        await asyncio.to_thread(write_record, self._record.file, mark)
        self._compare(mark, mark)
        return mark

    async def _require_content(self) -> None:
        """Raises: StoreEmpty."""
        mark, expected = await asyncio.to_thread(self._read_both)
        if mark is not None or await asyncio.to_thread(_has_content, self._folder):
            return
        if self._record.shared is not None:
            expected = await self._record.shared.expected() or expected
        if expected is not None:
            raise StoreEmpty(
                f"{_fault(self._folder, None, expected)}, and it has no objects: its disk is"
                " probably not mounted. Mount it; if its objects are to be given up on every host,"
                " use `headrace blobs adopt --empty`"
            )

    def check(self, root: int) -> None:
        """Require that the open folder `root` is the verified one. Raises: OSError."""
        if self._mark is not None and _read_at(root) != self._mark:
            self.is_verified = False
            raise OSError(errno.ESTALE, "the folder has changed", str(self._folder))

    def fault(self) -> str | None:
        """The current fault of the folder, from local files alone, or None."""
        mark, expected = (
            (read_mark(self._folder), self._mark) if self.is_verified else self._read_both()
        )
        if mark is not None and mark == (expected or mark):
            return None
        if expected is None and _has_content(self._folder):
            return None
        self.is_verified = False
        return _fault(self._folder, mark, expected)

    async def _verify_first_use(self, mark: str | None, *, is_known: bool) -> str | None:
        """Use or create the folder while no id is recorded, or the record is unavailable."""
        has_content = await asyncio.to_thread(_has_content, self._folder)
        if not self._may_create or not is_known:
            is_usable = mark is not None or has_content
            if is_usable:
                return self._compare(mark, mark)
            if not self._has_tables:
                return f"{_seen(self._folder, None)}, and {NO_TABLES}"
            return _fault(self._folder, None, None)
        if mark is None:
            try:
                mark = await asyncio.to_thread(self._create_marker, had_objects=has_content)
            except OSError:
                if not has_content:
                    raise
                return self._compare(None, None)
        shared = self._record.shared
        expected = await shared.expect_first(mark) if shared is not None else mark
        await asyncio.to_thread(write_record, self._record.file, expected)
        return self._compare(mark, expected)

    def _create_marker(self, *, had_objects: bool) -> str:
        """Create the marker once for concurrent callers."""
        with self._create_lock:
            mark = read_mark(self._folder)
            if mark is None:
                mark = make_mark(self._folder)
                _LOG.info("object_store_marked", folder=str(self._folder), had_objects=had_objects)
            return mark

    async def _read_shared(self) -> tuple[str | None, bool]:
        """The id in the shared record, and whether the record could be read."""
        if self._record.shared is None:
            return None, True
        try:
            expected = await self._record.shared.expected()
        except (Unavailable, Conflict) as error:
            # By its code, as child processes need no driver of PostgreSQL.
            self._has_tables = error.code != "engines.schema_behind"
            return None, False
        self._has_tables = True
        return expected, True

    def _compare(self, mark: str | None, expected: str | None) -> str | None:
        if mark != expected:
            return _fault(self._folder, mark, expected)
        self._mark, self._may_create, self.is_verified = mark, False, True
        return None

    def _read_both(self) -> tuple[str | None, str | None]:
        return read_mark(self._folder), read_record(self._record.file) or self._mark


def read_mark(folder: Path) -> str | None:
    """The id in the marker of `folder`; None without a folder or marker. Raises: OSError."""
    try:
        root = os.open(folder, _FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _read_at(root)
    finally:
        os.close(root)


def make_mark(folder: Path) -> str:
    """Create `folder` and its marker where missing; return the id. Raises: OSError."""
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
                # Another process was first, or the marker is damaged.
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
    """The id in the data folder's record, DAMAGED without an id, None without a record.

    Raises: OSError.
    """
    try:
        text = file.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return text if MARK.fullmatch(text) else DAMAGED


def write_record(file: Path, mark: str) -> None:
    """Record `mark`; a failure is logged, and the next start repeats the check."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        if read_record(file) == mark:
            return
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_whole(os.open(draft, flags, 0o644), mark)
        draft.replace(file)
    except OSError as error:
        _LOG.warning("object_store_not_recorded", file=str(file), error=str(error))


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
        text = os.read(descriptor, MARK_BYTES_MAX).decode(errors="replace").strip()
        return text if MARK.fullmatch(text) else None
    finally:
        os.close(descriptor)


def _has_content(folder: Path) -> bool:
    """Whether the folder has entries besides hidden files and `lost+found`."""
    try:
        with os.scandir(folder) as entries:
            return any(not e.name.startswith(".") and e.name != "lost+found" for e in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def advice_of(fault: str) -> str:
    """What to do about a fault that `MountGuard` returned."""
    if fault.endswith(NO_TABLES):
        return "run `headrace migrate` once, which makes the record, and mount the disk"
    return (
        "mount its disk or restore the folder. Only if this folder is to replace it, with the"
        " objects that it has now: `headrace blobs adopt`"
    )


def _seen(folder: Path, mark: str | None) -> str:
    if mark is not None:
        return f"it holds store {mark}"
    return "it has no marker" if folder.is_dir() else "it does not exist"


def _fault(folder: Path, mark: str | None, expected: str | None) -> str:
    seen = _seen(folder, mark)
    if expected is None:
        return f"{seen}, and the record of earlier use cannot be read now"
    return f"{seen}, expected store {expected}"
