"""What a person may ask of the filler, over its socket: one function a command, arguments and answers as JSON values."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.media.model import DiskConfig
from headrace.media.store.disk import Disk, DiskState
from headrace.media.store.disks import RETIRED, Disks
from headrace.media.store.errors import CommandUnknown
from headrace.media.store.filling import Fills
from headrace.media.store.scrub import Tally, check_frames
from headrace.media.store.turns import FillerTurns


class Commands:
    """The commands of one filler."""

    def __init__(
        self, disks: Disks, fills: Fills, turns: FillerTurns, on_added: Callable[[Disk], None]
    ) -> None:
        self._disks = disks
        self._fills = fills
        self._turns = turns
        self._on_added = on_added
        self._known: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "disks": self.disks,
            "add": self.add,
            "drain": self.drain,
            "undrain": self.undrain,
            "retire": self.retire,
            "verify": self.verify,
            "stats": self.stats,
        }

    async def run(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do it. Raises: CommandUnknown, and what the command raises."""
        command = self._known.get(name)
        if command is None:
            raise CommandUnknown(
                f"command {name!r} is not known: use one of {', '.join(sorted(self._known))}"
            )
        try:
            work = command(**arguments)
        except TypeError as error:
            raise CommandUnknown(f"command {name}: {error}") from error
        return await work

    async def disks(self) -> list[dict[str, Any]]:
        """Every disk, also those that could not be opened."""
        rows = [await self._describe(disk) for disk in self._disks.listed()]
        return [*rows, *(_refused(path, why) for path, why in self._disks.refused.items())]

    async def add(self, path: str, size_bytes: int) -> dict[str, Any]:
        """Use one more disk, now and after restarts."""
        disk = await self._disks.add(DiskConfig(Path(path), size_bytes))
        self._on_added(disk)
        return await self._describe(disk)

    async def drain(self, id: str) -> dict[str, Any]:  # noqa: A002 - the argument's name on the wire
        """Place no more blocks on a disk; what it has is served."""
        return await self._describe(await self._disks.set_draining(id, is_draining=True))

    async def undrain(self, id: str) -> dict[str, Any]:  # noqa: A002
        """Place blocks on it again."""
        return await self._describe(await self._disks.set_draining(id, is_draining=False))

    async def retire(self, id: str) -> dict[str, Any]:  # noqa: A002
        """Serve nothing from a disk any more and close it, so that it can be pulled; forget one that was refused."""
        if self._disks.forget_refused(Path(id)):
            return _refused(Path(id), RETIRED)
        return await self._describe(await self._disks.retire(id))

    async def verify(self, share: float = 1.0) -> dict[str, Any]:
        """Compare that share of all frames with their sums, at full speed."""
        tally = Tally()
        await asyncio.gather(
            *(self._verify(disk, share, tally) for disk in self._disks.in_service())
        )
        return dataclasses.asdict(tally)

    async def stats(self) -> dict[str, int]:
        """Disks that are read from, workers that live, blocks being filled."""
        return {
            "disks": len(self._disks.in_service()),
            "workers": self._turns.workers(),
            "filling": self._fills.count,
        }

    async def _verify(self, disk: Disk, share: float, tally: Tally) -> None:
        count = min(disk.frames, max(1, round(disk.frames * share)))
        frames = (
            range(disk.frames) if count == disk.frames else random.sample(range(disk.frames), count)
        )
        try:
            await check_frames(disk, frames, tally)
        except OSError as error:
            self._disks.fail(disk, error)

    async def _describe(self, disk: Disk) -> dict[str, Any]:
        is_out = disk.state is DiskState.OUT
        return {
            "id": disk.id,
            "path": str(disk.config.path),
            "size_bytes": disk.config.size_bytes,
            "frames": disk.frames,
            "used": 0 if is_out else disk.table.used(),
            "state": disk.state.value,
            "fault": disk.fault,
            "is_copied": disk.is_copied,
            "queue": disk.writes_waiting,
            "rotten": disk.rotten,
        }


def _refused(path: Path, why: str) -> dict[str, Any]:
    """The row of a disk that could not be opened."""
    return {
        "id": "", "path": str(path), "size_bytes": 0, "frames": 0, "used": 0, "queue": 0, "rotten": 0,
        "state": DiskState.OUT.value, "fault": why, "is_copied": False,
    }  # fmt: skip
