"""Objects in a local folder or an S3 store behind one interface, through obstore.

obstore's local put never syncs. A photo with a committed row must survive a power cut, so local
puts use `durable_files`. A key is a relative path of plain segments. The folder of an application
has a mount guard (`mount_guard`).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.store import LocalStore, from_url

from headrace.engines import stored_files
from headrace.engines.bucket_endpoint import find_endpoint
from headrace.engines.durable_files import Check, DurableWriter, write_durably
from headrace.engines.joined_objects import JoinedObjects, open_bucket, request_limit_s
from headrace.engines.mount_guard import MountGuard, StoreRecord, advice_of
from headrace.kernel.config import parse_count, parse_duration_s, parse_url, setting
from headrace.kernel.errors import Conflict, InvalidInput, NotFound, Unavailable
from headrace.kernel.logs import onward
from headrace.kernel.single_flight import SingleFlight

_SEGMENT: Final = re.compile(r"(?!\.)[A-Za-z0-9._@~-]{1,128}")
KEY_CHARACTERS_MAX: Final = 512
MIB: Final = 2**20
_STATUS: Final = re.compile(r"status code: (\d{3})")
_NO_OTHER: Final = re.compile(r"<Code>NoSuch(Bucket|Upload)</Code>")
"""Something else than the object is missing."""
_S3_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
LOCK_FILE: Final = ".headrace-lock"
"""Locked during a compare-and-set in a folder; no key has this name."""


class BlobMissing(NotFound):
    """No object is stored under the key."""

    code = "blobs.missing"


class InvalidBlobKey(InvalidInput):
    """The key is not a relative path of plain segments."""

    code = "blobs.invalid_key"


class BlobsDown(Unavailable):
    """The object store does not respond or refuses to store."""

    code = "blobs.unavailable"
    reason = ""
    """The cause in a few words, such as `403 AccessDenied`."""


class StoreMismatch(BlobsDown):
    """The folder of the object store is missing, unmounted or a different one."""

    code = "blobs.store_mismatch"
    public = "the object store is missing: check its disk with `headrace doctor`, then try again"

    def __init__(self, folder: Path, fault: str) -> None:
        self.fault = fault
        self.advice = advice_of(fault)
        super().__init__(
            f"the object store in folder {folder} is not the one in use ({fault}): {self.advice}",
            retry_after_s=5,
        )


class BlobChanged(Conflict):
    """The stored object has changed since it was read."""

    code = "blobs.changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobsConfig:
    """Section `blobs`."""

    url: str | None = setting(
        None,
        "URL of the object store: file:///folder or s3://bucket/prefix; unset: the data folder.",
        parse_url("file", "s3"),
        secret=True,
    )
    timeout_s: float = setting(
        "15s",
        "Longest wait for an S3 store with its retries, plus one second per MiB of data.",
        parse_duration_s,
    )
    put_threads: int = setting(
        "2", "Threads that write objects and sync them to disk, many at once.", parse_count
    )


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """The store's metadata of an object."""

    key: str
    size_bytes: int
    etag: str
    modified_at: datetime


def require_key(key: str) -> str:
    """Return `key` if it is a path such as `photos/ab/abcd.jpg`. Raises: InvalidBlobKey."""
    text = key if isinstance(key, str) and len(key) <= KEY_CHARACTERS_MAX else ""
    if not all(map(_SEGMENT.fullmatch, text.split("/"))):
        raise InvalidBlobKey(
            f"blob key {str(key)[:60]!r} is not valid: use segments of A-Z a-z 0-9 . _ @ ~ - joined"
            " by /, none empty or starting with a dot"
        )
    return key


class Blobs:
    """An object store; `folder` is set for a local one, so that files can be sent by sendfile.

    With a `record` the folder is verified on first use, and created only if no use is recorded.
    Without one it is created here if it is missing. Raises: InvalidConfig for a bucket's variables.
    """

    def __init__(
        self, url: str, config: BlobsConfig | None = None, *, record: StoreRecord | None = None
    ) -> None:
        self._url, parts = url, urlsplit(url)
        self._traced: tuple[tuple[tuple[str, str], ...], Any] | None = None
        self.folder: Path | None = None
        self.endpoint = None if parts.scheme == "file" else find_endpoint()
        self._guard: MountGuard | None = None
        self._check: Check | None = None
        self._verifying: SingleFlight[asyncio.AbstractEventLoop, None] = SingleFlight()
        self._puts: DurableWriter | None = None
        self._store: Any = None
        self._timeout_s: float | None = None
        if parts.scheme != "file":
            self._timeout_s = (config or BlobsConfig()).timeout_s
            self._store = from_url(url)
            return
        self.folder = Path(unquote(parts.path))
        if record is not None:
            self._guard = MountGuard(self.folder, record)
        else:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unusable(self.folder, error) from error
            self._store = LocalStore(self.folder)
        self._check = self._guard.check if self._guard is not None else None
        threads = max(1, (config or BlobsConfig()).put_threads)
        self._puts = DurableWriter(self.folder, threads, self._check)

    async def put(self, key: str, data: bytes) -> None:
        """Store `data` durably, replacing the object atomically. Raises: BlobsDown."""
        require_key(key)
        async with self._use(key, is_put=True, size_bytes=len(data)):
            if self._puts is None:
                await obstore.put_async(self._store, key, data, use_multipart=False)
            else:
                await self._puts.put(key, data)

    async def put_if(self, key: str, data: bytes, *, etag: str | None) -> None:
        """Store `data` durably if the object still has `etag` (None: if there is no object).

        Raises: BlobChanged, BlobsDown.
        """
        require_key(key)
        async with self._use(key, is_put=True, size_bytes=len(data)):
            try:
                if self.folder is not None:
                    await asyncio.to_thread(self._put_if, self.folder, key, data, etag)
                else:
                    mode: Any = "create" if etag is None else {"e_tag": etag}
                    await obstore.put_async(self._store, key, data, mode=mode, use_multipart=False)
            except (
                obstore.exceptions.AlreadyExistsError,
                obstore.exceptions.PreconditionError,
            ) as error:
                raise BlobChanged(f"object {key!r} has changed: read it again") from error

    def _put_if(self, folder: Path, key: str, data: bytes, etag: str | None) -> None:
        naming = self._locked_if(folder, key, etag)
        write_durably(folder, key, data, check=self._check, naming=naming)

    @contextmanager
    def _locked_if(self, folder: Path, key: str, etag: str | None) -> Iterator[None]:
        """Hold the folder's lock if the object has `etag`. Raises: PreconditionError."""
        with _open_lock(folder, self._check) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                found = obstore.head(self._store, key)["e_tag"]
            except FileNotFoundError:
                found = None
            if found != etag:
                raise obstore.exceptions.PreconditionError(key)
            yield

    async def join(
        self, key: str, parts: Sequence[str], *, size_bytes: int, sha256: str | None = None
    ) -> None:
        """Store the concatenation of the objects `parts` durably, replacing `key` atomically.

        Raises: BlobCorrupt if `sha256` is given and is not that of the bytes; BlobMissing,
        BlobsDown.
        """
        require_key(key)
        joined = JoinedObjects(self._store, parts, sha256)
        limit_s = 0.0
        if self._timeout_s is not None:
            limit_s = request_limit_s(size_bytes, self._timeout_s)
        async with self._use(key, size_bytes=2 * size_bytes + round(limit_s * MIB)):
            if self._timeout_s is not None:
                await joined.put_to_bucket(self._url, key, size_bytes, self._timeout_s)
            elif self.folder is not None:
                await asyncio.to_thread(joined.put_to_folder, self.folder, key, self._check)

    async def read(self, key: str, *, unless: str | None = None) -> tuple[bytes, str] | None:
        """All bytes and their etag, or None if the etag is `unless`.

        The etag is the store's own format, only for `put_if` and `unless`. Raises: BlobMissing,
        BlobsDown.
        """
        async with self._use(key) as limit:
            self._require_plain(key)
            try:
                options: Any = {"if_none_match": unless} if unless else {}
                result = await obstore.get_async(self._store, key, options=options)
            except obstore.exceptions.NotModifiedError:
                return None
            _allow(limit, result.meta["size"])
            return bytes(await result.bytes_async()), str(result.meta["e_tag"] or "")

    async def get(self, key: str) -> bytes:
        """All bytes of an object. Raises: BlobMissing, BlobsDown."""
        async with self._use(key) as limit:
            self._require_plain(key)
            result = await obstore.get_async(self._store, key)
            _allow(limit, result.meta["size"])
            return bytes(await result.bytes_async())

    async def read_part(
        self, key: str, start: int, length_bytes: int, **_: str
    ) -> tuple[BlobInfo, bytes]:
        """`length_bytes` bytes from `start`, with the metadata of the same version.

        The expected `etag` of other readers is accepted and not used: the caller compares.

        Raises: BlobMissing, BlobsDown.
        """
        async with self._use(key, size_bytes=length_bytes):
            self._require_plain(key)
            wanted: Any = {"range": (start, start + length_bytes)}
            result = await obstore.get_async(self._reader(), key, options=wanted)
            info = self._info(key, result.meta)
            return info, bytes(await result.bytes_async())

    async def info(self, key: str) -> BlobInfo:
        """Size, etag and time of an object. Raises: BlobMissing, BlobsDown."""
        async with self._use(key):
            self._require_plain(key)
            return self._info(key, await obstore.head_async(self._reader(), key))

    async def delete(self, key: str) -> None:
        """Delete the object; a missing object is no error. Raises: BlobsDown."""
        require_key(key)
        try:
            async with self._use(key):
                self.require_mounted()
                await obstore.delete_async(self._store, key)
        except BlobMissing:
            return

    async def clear(self, folder: str) -> None:
        """Delete every object of `folder`, and the folder itself. Raises: BlobsDown."""
        require_key(folder)
        async with self._use(folder):
            self.require_mounted()
        if self.folder is not None:
            await asyncio.to_thread(shutil.rmtree, self.folder / folder, ignore_errors=True)
            return
        async for info in self.list(folder):
            await self.delete(info.key)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        """Every object below `prefix`, in no defined order. Raises: BlobsDown.

        Omits files of a folder that no put creates, such as drafts and links.
        """
        async with self._use(prefix):
            self.require_mounted()
        batches: Any = aiter(obstore.list(self._store, prefix))
        while True:
            async with self._use(prefix):
                batch = await anext(batches, None)
            if batch is None:
                return
            for meta in batch:
                info = self._info(meta["path"], meta)
                if self._is_object(info.key):
                    yield info

    async def children(
        self, prefix: str, *, after: str = "", children_max: int
    ) -> Sequence[stored_files.Child]:
        """Direct children of the folder `prefix` with names behind `after`, by name.

        A bucket lists all of them for each page. Raises: InvalidBlobKey, BlobsDown.
        """
        is_name = _SEGMENT.fullmatch
        if prefix:
            require_key(prefix)
        async with self._use(prefix):
            self.require_mounted()
            if self.folder is not None:
                found = partial(stored_files.children_of, self.folder, prefix, after=after)
                return await asyncio.to_thread(found, children_max=children_max, is_name=is_name)
            listed: Any = await obstore.list_with_delimiter_async(self._store, prefix or None)
        find = stored_files.children_in
        return find(listed, after=after, children_max=children_max, is_name=is_name)

    def _require_plain(self, key: str) -> None:
        """Raises: InvalidBlobKey; FileNotFoundError for a missing file, a link or a device."""
        require_key(key)
        if self.folder is None:
            return
        try:
            is_plain = stored_files.is_plain_file(self.folder, key)
        except (FileNotFoundError, NotADirectoryError):
            is_plain = False
        if not is_plain:
            raise FileNotFoundError(key)

    def require_mounted(self) -> None:
        """Require that a folder exists and has the expected marker. Raises: BlobsDown."""
        if self.folder is None:
            return
        if self._guard is None:
            if not self.folder.is_dir():
                raise _unusable(self.folder, FileNotFoundError(errno.ENOENT, "it does not exist"))
            return
        try:
            fault = self._guard.fault()
        except OSError as error:
            raise _unusable(self.folder, error) from error
        if fault is not None:
            raise StoreMismatch(self.folder, fault)

    async def verify_store(self) -> None:
        """Check a folder against its record, or create and record it at first use.

        Raises: BlobsDown.
        """
        if self._guard is not None and not self._guard.is_verified:
            # Once for all first photos of a worker: each would take three statements.
            await self._verifying.call(
                asyncio.get_running_loop(), partial(self._verify, self._guard)
            )

    async def _verify(self, guard: MountGuard) -> None:
        assert self.folder is not None, "a mount guard belongs to a folder"
        try:
            fault = await guard.verify()
        except OSError as error:
            raise _unusable(self.folder, error) from error
        except (Unavailable, Conflict) as error:
            raise StoreMismatch(self.folder, f"it cannot be recorded: {error.text}") from error
        if fault is not None:
            raise StoreMismatch(self.folder, fault)
        self._store = LocalStore(self.folder)

    async def adopt(self, *, is_empty: bool = False) -> str | None:
        """Accept the folder as it is; return its id, None for a bucket.

        `is_empty`: also one without objects. Raises: StoreEmpty, BlobsDown, Unavailable.
        """
        if self._guard is None or self.folder is None:
            return None
        try:
            mark = await self._guard.adopt(is_empty=is_empty)
        except OSError as error:
            raise _unusable(self.folder, error) from error
        self._store = LocalStore(self.folder)
        return mark

    @asynccontextmanager
    async def _use(
        self, key: str, *, is_put: bool = False, size_bytes: int = 0
    ) -> AsyncIterator[asyncio.Timeout]:
        """One operation on an object, with a timeout for S3 and translated errors."""
        await self.verify_store()
        longest_s = None if self._timeout_s is None else self._timeout_s + size_bytes / MIB
        try:
            async with asyncio.timeout(longest_s) as limit:
                yield limit
        except FileNotFoundError as error:
            self.require_mounted()
            if is_put or _NO_OTHER.search(str(error)):
                raise _down(key, error) from error
            raise BlobMissing(f"no object {key!r} is stored") from error
        except TimeoutError as error:
            if longest_s is None:
                raise _down(key, error) from error
            raise BlobsDown(
                f"the object store did not respond within {longest_s:.0f} s for {key!r}: check it"
                " with `headrace doctor`, then try again; blobs.timeout is the limit",
                retry_after_s=5,
            ) from error
        except (OSError, obstore.exceptions.BaseError) as error:
            self.require_mounted()
            raise _down(key, error) from error

    def _reader(self) -> Any:
        """The store for one read; for a traced request an S3 client that sends `logs.onward`.

        Such a client takes milliseconds to create, so only traced requests use one.
        """
        fields = onward.get()
        if not fields or self.folder is not None:
            return self._store
        if self._traced is None or self._traced[0] != fields:
            self._traced = fields, open_bucket(self._url, default_headers=dict(fields))
        return self._traced[1]

    def _info(self, key: str, meta: Any) -> BlobInfo:
        modified_at = meta["last_modified"]
        etag = str(meta["e_tag"] or "").strip('"')
        if self.folder is not None:
            etag = stored_files.file_etag(
                (modified_at - stored_files.EPOCH) // timedelta(microseconds=1), meta["size"]
            )
        return BlobInfo(key, meta["size"], etag, modified_at)

    def _is_object(self, key: str) -> bool:
        try:
            self._require_plain(key)
        except (InvalidBlobKey, FileNotFoundError):
            return False
        return True

    async def open(self) -> None:
        """Check that the store can be listed. Raises: BlobsDown."""
        async for _ in self.list("headrace-probe"):
            break

    async def close(self) -> None:
        """Wait for open puts and stop the threads."""
        if self._puts is not None:
            await asyncio.to_thread(self._puts.close)


def _allow(limit: asyncio.Timeout, size_bytes: int) -> None:
    """Extend the timeout of an operation by the size of its data."""
    if (when := limit.when()) is not None:
        limit.reschedule(when + size_bytes / MIB)


def _open_lock(folder: Path, check: Check | None) -> BinaryIO:
    """Open the lock file of an existing `folder`. Raises: OSError."""
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if check is not None:
            check(root)
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        return os.fdopen(os.open(LOCK_FILE, flags, 0o666, dir_fd=root), "ab")
    finally:
        os.close(root)


def _unusable(folder: Path, error: OSError) -> BlobsDown:
    return BlobsDown(
        f"the object store in folder {folder} cannot be used ({error.strerror}): run as a"
        " user with write permission, or set blobs.url (HEADRACE_BLOBS_URL)",
        retry_after_s=5,
    )


def _down(key: str, error: Exception) -> BlobsDown:
    text = str(error)
    status, code = _STATUS.search(text), _S3_CODE.search(text)
    reason = " ".join(found[1] for found in (status, code) if found)
    reason = reason or getattr(error, "strerror", None) or type(error).__name__
    advice = "check its disk, address and credentials with `headrace doctor`"
    down = BlobsDown(f"the object store failed for {key!r} ({reason}): {advice}", retry_after_s=5)
    down.reason = reason
    return down
