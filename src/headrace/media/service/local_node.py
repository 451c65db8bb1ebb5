"""The node that uses this data folder: its disks and its most requested objects.

Only the filler writes to disks, so each method sends it a command over its socket. For another
machine, run the command there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.kernel.errors import require_extra
from headrace.kernel.metrics import STALE_S
from headrace.media.errors import NodeNotHere
from headrace.media.hottest import ROWS_MAX, read_hottest

SOCKET: Final = "filler.sock"
OBJECTS_MAX: Final = ROWS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One disk of a node. `id` is the one in its superblock; a refused disk has none.

    `queue` is the number of waiting fills. `is_copied`: blocks are copied instead of sent from the
    page cache, because the probe at the start failed. `rotten` counts the blocks that changed on
    the disk after they were verified, since it was opened.
    """

    id: str
    path: str
    size_bytes: int
    frames: int
    used: int
    state: str
    fault: str = ""
    queue: int = 0
    is_copied: bool = False
    rotten: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of verifying blocks. Blocks that are neither were replaced meanwhile."""

    blocks: int
    right: int
    wrong: int
    unread: int


class Disks:
    """The disks of one running node."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    async def list(self) -> Sequence[Disk]:
        """All disks by path. Raises: NodeNotHere, FillerAway."""
        rows = msgspec.convert(await self._ask("disks"), list[Disk])
        return sorted(rows, key=lambda disk: disk.path)

    async def get(self, disk: str) -> Disk:
        """The disk of this id or path. Raises: DiskUnknown, NodeNotHere, FillerAway."""
        from headrace.media.errors import DiskUnknown

        for one in await self.list():
            if disk in (one.id, one.path):
                return one
        raise DiskUnknown(f"no disk {disk!r} on this node: see `headrace media disks ls`")

    async def add(self, path: str, size_bytes: int) -> Disk:
        """Add a folder or block device, including blocks that it holds from an earlier use.

        Raises: NodeNotHere, FillerAway, DiskRefused, DiskTooSmall.
        """
        return await self._change("add", path=path, size_bytes=size_bytes)

    async def drain(self, disk: str) -> Disk:
        """Stop placing blocks on `disk`; its blocks are still served. Raises: as `add`."""
        return await self._change("drain", id=disk)

    async def undrain(self, disk: str) -> Disk:
        """Resume placing blocks on `disk`. Raises: as `add`."""
        return await self._change("undrain", id=disk)

    async def retire(self, disk: str) -> Disk:
        """Take `disk` out of use, so that it can be removed. Its blocks become misses.

        Raises: as `add`.
        """
        return await self._change("retire", id=disk)

    async def verify(self, share: float = 1.0) -> Verified:
        """Compare `share` of all stored blocks with their checksums and drop wrong ones.

        Raises: NodeNotHere, FillerAway.
        """
        return msgspec.convert(await self._ask("verify", share=share), Verified)

    async def _change(self, command: str, **arguments: Any) -> Disk:
        return msgspec.convert(await self._ask(command, **arguments), Disk)

    async def _ask(self, command: str, **arguments: Any) -> Any:
        socket = self._folder / SOCKET if self._folder is not None else None
        if socket is None or not socket.exists():
            raise NodeNotHere(
                "no node with disks runs on this data folder: set media.disks and start"
                " `headrace media serve`, or run this where the node runs"
            )
        require_extra("media", "xxhash")
        # Imported here, because only nodes with disks need xxhash, and every command imports this
        # module.
        from headrace.media.cache import control

        return await control(socket, command, **arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class HotObject:
    """An object and its rate of requests: a sample of the last minutes."""

    key: str
    requests_per_s: float


class HottestObjects:
    """The objects that clients request most from the node of this data folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    async def list(self, *, objects_max: int = 20) -> Sequence[HotObject]:
        """The most requested objects first, at most 100. Raises: NodeNotHere."""
        rows = None
        if self._folder is not None:
            rows = await asyncio.to_thread(read_hottest, self._folder, within_s=STALE_S)
        if rows is None:
            raise NodeNotHere(
                "no node runs on this data folder: start `headrace media serve`, or run this"
                " where the node runs"
            )
        return [
            HotObject(key=key, requests_per_s=round(per_s, 2)) for key, per_s in rows[:objects_max]
        ]
