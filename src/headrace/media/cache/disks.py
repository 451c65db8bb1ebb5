"""All disks of a node: assign blocks to disks, and handle added, failed and retired disks.

Changes made by operators are stored in `disks.json` of the run folder, by disk id: disks added
beside the configured ones, drained and retired disks. A disk that fails is taken out of use at
once. Its keys move to the other disks, and its blocks are fetched again on request.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.kernel.logs import logger
from headrace.kernel.resilience import BackgroundTasks
from headrace.media.cache.disk import (
    NO_ROOM,
    ROTTEN_MAX,
    ROTTEN_WITHIN_S,
    Disk,
    open_disk,
)
from headrace.media.cache.epochs import FillerEpochs
from headrace.media.cache.filler_ipc import (
    NO_DISK,
    DiskState,
    Manifest,
    ManifestDisk,
    read_manifest,
    slot_maps,
    write_manifest,
)
from headrace.media.cache.frame_table import Hit
from headrace.media.cache.layout import SLOTS, BlockKey
from headrace.media.cache.metrics import DISKS, DISKS_MAX, FAULTS, QUEUE, ROTTEN
from headrace.media.errors import DiskRefused, DiskUnknown, InvalidDiskSize
from headrace.media.model import DiskConfig

log = logger(__name__)
_STATE_FILE: Final = "disks.json"
RETIRED: Final = "retired"
_IDLE_PAUSE_S: Final = 0.01
_CLOSE_S: Final = 20.0


class DiskOverrides(msgspec.Struct):
    """Changes made by operators; `states` by disk id."""

    added: dict[str, int] = {}
    states: dict[str, DiskState] = {}
    faults: dict[str, str] = {}
    """Why the node itself retired a disk, by id."""


class Disks:
    """The disks of this node. Each keeps its position for as long as the filler runs."""

    def __init__(self, run: Path, epochs: FillerEpochs, *, boot: str, hash_key: bytes) -> None:
        self.opened: list[Disk] = []
        self.refused: dict[Path, str] = {}
        """Disks that could not be opened, with the reason."""
        self._configured: set[Path] = set()
        self._run = run
        self._epochs = epochs
        self._boot = boot
        self._hash_key = hash_key
        self._overrides = _read_overrides(run)
        self._owners = bytes([NO_DISK]) * SLOTS
        self._owners_before = b""
        self._writing: set[Disk] = set()
        self._tasks = BackgroundTasks()

    async def open(self, configs: Sequence[DiskConfig]) -> None:
        """Open all configured disks, at most DISKS_MAX.

        Disks that cannot be opened are listed as refused.
        """
        before = read_manifest(self._run)
        is_same_boot = before is not None and before.boot == self._boot
        named = self._configured = {config.path for config in configs}
        added = [DiskConfig(Path(path), size) for path, size in self._overrides.added.items()]
        configs = [*configs, *(disk for disk in added if disk.path not in named)][:DISKS_MAX]
        opening = [self._try_open(config, is_same_boot=is_same_boot) for config in configs]
        for config, opened in zip(configs, await asyncio.gather(*opening), strict=True):
            await self._enter(config, opened)
        self._publish()

    async def add(self, config: DiskConfig) -> Disk:
        """Open an additional disk, or reopen one that is out of use.

        Raises: DiskRefused, InvalidDiskSize.
        """
        for disk in self.opened:
            if disk.config.path == config.path and disk.state is not DiskState.OUT:
                raise DiskRefused(
                    f"disk {config.path} is in use already, as {disk.id}: name another"
                )
        if len(self.opened) >= DISKS_MAX:
            raise DiskRefused(
                f"a node has at most {DISKS_MAX} disks: retire one and restart the node"
            )
        opened = await self._try_open(config, is_same_boot=False)
        if isinstance(opened, Disk):
            self._overrides.states.pop(opened.id, None)
            self._overrides.faults.pop(opened.id, None)
        was_refused = config.path in self.refused
        entered = await self._enter(config, opened)
        if entered is None:
            why = self.refused[config.path]
            if not was_refused:
                del self.refused[config.path]  # reported now; not a disk of this node
            raise DiskRefused(why)
        self._overrides.added[str(config.path)] = config.size_bytes
        self._save_overrides()
        self._publish()
        return entered

    async def set_draining(self, disk_id: str, *, is_draining: bool) -> Disk:
        """Stop or resume placing blocks on a disk. Raises: DiskUnknown, DiskRefused."""
        disk = self.by_id(disk_id)
        if disk.state is DiskState.OUT:
            raise DiskRefused(f"disk {disk.id} is out ({disk.fault}): add it again first")
        disk.state = DiskState.DRAINING if is_draining else DiskState.IN_USE
        disk.fault = "drained" if is_draining else ""
        self._overrides.states.pop(disk.id, None)
        if is_draining:
            self._overrides.states[disk.id] = disk.state
        self._save_overrides()
        self._publish()
        return disk

    async def retire(self, disk_id: str) -> Disk:
        """Stop serving from a disk and close it in order, so that it can be removed.

        Raises: DiskUnknown.
        """
        disk = self.by_id(disk_id)
        self._overrides.states[disk.id] = DiskState.OUT
        self._overrides.faults.pop(disk.id, None)
        self._overrides.added.pop(str(disk.config.path), None)
        self._save_overrides()
        was_out = disk.state is DiskState.OUT
        self._take_out(disk, RETIRED)
        if not was_out:
            await self._close_out(disk, is_clean=True)
        return disk

    def forget_refused(self, path: Path) -> bool:
        """Remove a disk that could not be opened from the list. Return whether it was listed."""
        if self.refused.pop(path, None) is None:
            return False
        if self._overrides.added.pop(str(path), None) is not None:
            self._save_overrides()
        self._count()
        return True

    def listed(self) -> list[Disk]:
        """The disks to show: without reopened ones' old entries and retired ones that are not
        configured.
        """
        return [
            disk for position, disk in enumerate(self.opened) if self._is_listed(position, disk)
        ]

    def _is_listed(self, position: int, disk: Disk) -> bool:
        if disk.state is not DiskState.OUT:
            return True
        if disk.fault == RETIRED and disk.config.path not in self._configured:
            return False
        return not any(
            disk.id == later.id or disk.config.path == later.config.path
            for later in self.opened[position + 1 :]
        )

    def fail(self, disk: Disk, error: OSError) -> None:
        """Handle an I/O error: stop placing blocks if the disk is full, otherwise take it out of
        use.
        """
        reason = f"{error.strerror or error} (errno {error.errno})"
        if error.errno in NO_ROOM:
            if disk.state is DiskState.IN_USE:
                log.error("disk_full", disk=disk.id, path=str(disk.config.path), fault=reason)
                disk.state, disk.fault = DiskState.DRAINING, reason
                self._publish()
            return
        if disk.state is DiskState.OUT:
            return
        log.error("disk_failed", disk=disk.id, path=str(disk.config.path), fault=reason)
        self._drop(disk, reason)

    def _drop(self, disk: Disk, reason: str) -> None:
        FAULTS.inc()
        self._take_out(disk, reason)
        self._tasks.start(self._close_out(disk, is_clean=False))

    def _retire_rotting(self, disk: Disk) -> None:
        """Retire a disk that corrupts blocks, also after a restart, until an operator adds it
        again.
        """
        reason = (
            f"{ROTTEN_MAX} blocks changed within {ROTTEN_WITHIN_S / 3600:g} h: replace the disk"
        )
        log.error(
            "disk_corrupts_blocks", disk=disk.id, path=str(disk.config.path), rotten=disk.rotten
        )
        self._overrides.states[disk.id] = DiskState.OUT
        self._overrides.faults[disk.id] = reason
        self._drop(disk, reason)
        try:
            self._save_overrides()
        except OSError as error:
            log.warning("disk_overrides_not_written", error=str(error))

    def by_id(self, disk_id: str) -> Disk:
        """The newest disk with this id or path. Raises: DiskUnknown."""
        for disk in reversed(self.opened):
            if disk_id in (disk.id, str(disk.config.path)):
                return disk
        raise DiskUnknown(f"no disk {disk_id!r}: list ids and paths with `headrace media disks ls`")

    def owner(self, key: BlockKey) -> Disk | None:
        """The disk to place a block on; None: no disk is in use."""
        position = self._owners[key.hash_bits & (SLOTS - 1)]
        return self.opened[position] if position != NO_DISK else None

    def find(self, key: BlockKey) -> tuple[Disk, Hit] | None:
        """The location of a block, verified or not."""
        slot = key.hash_bits & (SLOTS - 1)
        for owners in (self._owners, self._owners_before):
            if owners and owners[slot] != NO_DISK:
                disk = self.opened[owners[slot]]
                hit = disk.table.find(key)
                if hit is not None:
                    return disk, hit
        return None

    def in_service(self) -> list[Disk]:
        """The disks that blocks are read from."""
        return [disk for disk in self.opened if disk.state is not DiskState.OUT]

    def keep_up(self) -> None:
        """Start writing outdated indexes;

        take disks out of use that hang, corrupt blocks or were truncated.
        """
        for position, disk in enumerate(self.opened):
            QUEUE[position].set(disk.writes_waiting)
            ROTTEN[position].set(disk.rotten)
            if disk.state is DiskState.OUT:
                continue
            if disk.is_rotting:
                self._retire_rotting(disk)
                continue
            if disk.is_hung:
                self.fail(disk, OSError(errno.ETIMEDOUT, "it does not answer"))
                continue
            try:
                disk.files.require_whole()
            except OSError as error:
                self.fail(disk, error)
                continue
            if disk.is_changed and disk not in self._writing:
                self._writing.add(disk)
                self._tasks.start(self._write_index(disk))

    async def close(self) -> None:
        """Close every disk in order. A fault or a timeout costs the blocks of that disk."""
        closing = [self._close_out(disk, is_clean=True) for disk in self.in_service()]
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*closing, *self._tasks)
        except TimeoutError:
            log.warning("disks_not_closed_clean", after_s=_CLOSE_S)

    async def _try_open(self, config: DiskConfig, *, is_same_boot: bool) -> Disk | str:
        """Open a disk, or return why it cannot be used."""
        try:
            return await asyncio.to_thread(open_disk, config, self._run, is_same_boot=is_same_boot)
        except (DiskRefused, InvalidDiskSize) as error:
            return error.text
        except OSError as error:
            return f"disk {config.path}: {error.strerror or error}"

    async def _enter(self, config: DiskConfig, disk: Disk | str) -> Disk | None:
        """Add an opened disk in the state that operators chose."""
        if isinstance(disk, str):
            self._refuse(config, disk)
            return None
        if any(other.id == disk.id for other in self.in_service()):
            disk.close()
            self._refuse(config, f"disk {config.path} is a copy of {disk.id}: empty one of them")
            return None
        disk.state = self._overrides.states.get(disk.id, DiskState.IN_USE)
        retired = self._overrides.faults.get(disk.id, RETIRED)
        disk.fault = {DiskState.DRAINING: "drained", DiskState.OUT: retired}.get(disk.state, "")
        self.refused.pop(config.path, None)
        self.opened.append(disk)
        log.info(
            "disk_opened",
            disk=disk.id,
            path=str(config.path),
            frames=disk.frames,
            was_clean=disk.files.was_clean,
            is_copied=disk.is_copied,
        )
        if disk.state is DiskState.OUT:
            await asyncio.to_thread(disk.close_clean)
            disk.close()
        return disk

    def _refuse(self, config: DiskConfig, why: str) -> None:
        log.error("disk_refused", path=str(config.path), why=why)
        self.refused[config.path] = why

    def _take_out(self, disk: Disk, why: str) -> None:
        disk.state, disk.fault = DiskState.OUT, why
        self._publish()

    async def _close_out(self, disk: Disk, *, is_clean: bool) -> None:
        while disk.busy or disk.writes_waiting:  # noqa: ASYNC110 - once, at a disk's end
            await asyncio.sleep(_IDLE_PAUSE_S)
        try:
            if is_clean:
                await disk.call(disk.close_clean)
        except OSError as error:
            log.warning("disk_not_closed_clean", disk=disk.id, error=str(error))
        if disk.state is DiskState.OUT:
            # A worker that has not seen the manifest yet must not find blocks that may be
            # overwritten.
            disk.table.hide_all()
        disk.close()

    async def _write_index(self, disk: Disk) -> None:
        try:
            await disk.call(disk.write_index)
        except OSError as error:
            self.fail(disk, error)
        finally:
            self._writing.discard(disk)

    def _publish(self) -> None:
        """Publish the state of the disks to the workers."""
        disks = tuple(_manifest_disk(disk) for disk in self.opened)
        self._owners, self._owners_before = slot_maps(disks)
        self._count()
        revision = self._epochs.revision + 1
        manifest = Manifest(
            self._boot, revision, self._hash_key, disks, self._owners, self._owners_before
        )
        try:
            write_manifest(self._run, manifest)
        except OSError as error:
            # Workers keep the previous manifest: more misses, but no wrong bytes.
            log.exception("manifest_not_written", error=str(error))
            return
        self._epochs.publish_revision(revision)

    def _count(self) -> None:
        counted = [disk.state for disk in self.listed() if disk.fault != RETIRED]
        counted += [DiskState.OUT] * len(self.refused)
        for state, child in DISKS.items():
            child.set(counted.count(state))

    def _save_overrides(self) -> None:
        draft = self._run / f"{_STATE_FILE}.draft"
        draft.write_bytes(msgspec.json.encode(self._overrides))
        draft.replace(self._run / _STATE_FILE)


def _manifest_disk(disk: Disk) -> ManifestDisk:
    return ManifestDisk(
        id=disk.id,
        frames=disk.frames,
        state=disk.state,
        reader_path=str(disk.files.reader_path),
        reader_identity=disk.reader_identity,
        data_at=disk.files.data_at,
        table_path=str(disk.table_path),
        table_identity=disk.table_identity,
        is_copied=disk.is_copied,
    )


def _read_overrides(run: Path) -> DiskOverrides:
    try:
        return msgspec.json.decode((run / _STATE_FILE).read_bytes(), type=DiskOverrides)
    except FileNotFoundError:
        return DiskOverrides()
    except msgspec.DecodeError as error:
        log.warning("disk_overrides_unreadable", error=str(error))
        return DiskOverrides()
