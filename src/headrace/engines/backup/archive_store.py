"""The objects of an archive: a folder or bucket whose faults are reported in plain words.

An archive that this data folder has used, and that cannot be read or written now, is
`backup.unavailable`. A place where nothing was archived yet is `backup.none`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from headrace.engines.blobs import Blobs, BlobsConfig, BlobsDown, StoreMismatch
from headrace.engines.endpoints import masked_url
from headrace.engines.mount_guard import StoreRecord
from headrace.kernel.errors import NotFound, Unavailable

_OS_ERROR: Final = re.compile(r"os error (\d+)")
_FAULTS: Final = {
    errno.ENOSPC: (
        "has no space left",
        "free space on its disk, use a larger one, or shorten backup.keep",
    ),
    errno.EDQUOT: ("is over its quota", "raise the quota, or shorten backup.keep"),
    errno.EROFS: (
        "is on a disk that is mounted read-only",
        "find the reason with `dmesg`, then mount it writable",
    ),
    errno.EIO: (
        "is on a disk that fails",
        "replace the disk, and set backup.url to a folder on the new one",
    ),
}
_RIGHTS: Final = (errno.EACCES, errno.EPERM)


class ArchiveMissing(NotFound):
    """The backup URL has no archive, or no complete base backup yet."""

    code = "backup.none"


class ArchiveDown(Unavailable):
    """The archive in use cannot be read or written now."""

    code = "backup.unavailable"

    def __init__(self, fault: str, fix: str) -> None:
        super().__init__(f"{fault}: {fix}", retry_after_s=5)
        self.fault, self.fix = fault, fix


class ArchiveStore(Blobs):
    """The objects at `url`; with a `record`, guarded against a disk that is not mounted."""

    def __init__(self, url: str, record: StoreRecord | None) -> None:
        super().__init__(url, BlobsConfig(), record=record)
        self.name = masked_url(url)
        self._is_in_use = record is None or record.file.exists()

    @asynccontextmanager
    async def _use(
        self, key: str, *, is_put: bool = False, size_bytes: int = 0
    ) -> AsyncIterator[asyncio.Timeout]:
        try:
            async with super()._use(key, is_put=is_put, size_bytes=size_bytes) as limit:
                self._is_in_use = True
                yield limit
        except StoreMismatch as error:
            if not self._is_in_use:
                raise ArchiveMissing(
                    f"{self.name} has no archive: check backup.url and mount its disk; `headrace"
                    " up` begins a new archive"
                ) from error
            fault = f"the archive {self.name} is not the one in use ({error.fault})"
            raise ArchiveDown(fault, "mount its disk") from error
        except BlobsDown as error:
            fault, fix = fault_and_fix(error, self.name)
            raise ArchiveDown(f"the archive {self.name} {fault}", fix) from error


def fault_and_fix(error: BlobsDown, name: str) -> tuple[str, str]:
    """What is wrong with the archive `name`, and what to do."""
    cause = error.__cause__
    found = _OS_ERROR.search(str(cause))
    number = getattr(cause, "errno", None) or (int(found[1]) if found else None)
    if number in _FAULTS:
        return _FAULTS[number]
    if number in _RIGHTS:
        uid = os.geteuid()
        fix = f"run as the owner of its files, or give it to this user: `chown -R {uid} FOLDER`"
        return f"cannot be used by uid {uid} (permission denied)", fix
    if error.reason.startswith(("401", "403")):
        fix = f"they need the rights to get, put, delete and list below {name}"
        return f"refuses these keys ({error.reason})", fix
    if error.reason.startswith("404"):
        return f"has no such bucket ({error.reason})", "create the bucket, or correct backup.url"
    reason = error.reason or "no answer in time"
    return f"cannot be read or written ({reason})", "check its disk, address and credentials"
