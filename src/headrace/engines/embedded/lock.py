"""One starter a data folder: a record lock on `<folder>/lock`, held for the starter's life.

An open-file-description lock (fcntl(2), F_OFD_SETLK): the kernel frees it however the process ends, no
engine inherits it since the descriptor closes on exec, and anyone may ask who holds it without taking it,
which flock(2) cannot do. The pid inside is for people and messages, never for decisions.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from headrace.engines.embedded.errors import FolderInUse

_FLOCK: Final = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class FolderLock:
    """The lock of one data folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock and write our pid into it. Raises: FolderInUse."""
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK))
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise FolderInUse(
                f"data folder {self._folder} is in use by process {holder_pid(self._folder)}: stop that"
                " one first, or choose another folder"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a live process holds the lock of `folder`; takes nothing."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def holder_pid(folder: Path) -> str:
    """The pid that the last starter wrote, as text."""
    try:
        return (folder / "lock").read_text().strip() or "unknown"
    except OSError:
        return "unknown"


def _request(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)
