"""All disks of a node: which block belongs to which, and disks that come, fail and go while the node runs.

What a person changed is kept in `disks.json` of the run folder, by the disks' ids: disks added beside those of the settings,
disks drained and retired. A disk that fails is out at once, its keys belong to the others from then on, and what
it held is fetched again when it is asked for.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.kernel.logs import logger
from headrace.media.cache.disk import (
    NO_ROOM,
    ROTTEN_MAX,
    ROTTEN_WITHIN_S,
    Disk,
    DiskState,
    open_disk,
)
from headrace.media.cache.epochs import FillerTurns
from headrace.media.cache.filler_ipc import (
    NOBODY,
    Manifest,
    ManifestDisk,
    places_of,
    read_manifest,
    write_manifest,
)
from headrace.media.cache.frame_table import Hit
from headrace.media.cache.layout import SLOTS, BlockKey
from headrace.media.cache.metrics import DISKS, DISKS_MAX, FAULTS, QUEUE, ROTTEN
from headrace.media.errors import DiskRefused, DiskTooSmall, DiskUnknown
from headrace.media.model import DiskConfig

log = logger(__name__)
_STATE_FILE: Final = "disks.json"
RETIRED: Final = "retired"
_IDLE_PAUSE_S: Final = 0.01
_CLOSE_S: Final = 20.0


class Wishes(msgspec.Struct):
    """What people asked of disks; `states` by disk id."""

    added: dict[str, int] = {}
    states: dict[str, str] = {}
    faults: dict[str, str] = {}
    """Why the node itself retired a disk, by id."""


class Disks:
    """The disks of this node, each at its place for as long as the filler runs."""

    def __init__(self, run: Path, turns: FillerTurns, *, boot: str, hash_key: bytes) -> None:
        self.opened: list[Disk] = []
        self.refused: dict[Path, str] = {}
        """Disks that could not be opened, and why."""
        self._configured: set[Path] = set()
        self._run = run
        self._turns = turns
        self._boot = boot
        self._hash_key = hash_key
        self._wishes = _read_wishes(run)
        self._owners = bytes([NOBODY]) * SLOTS
        self._owners_before = b""
        self._writing: set[Disk] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, configs: Sequence[DiskConfig]) -> None:
        """Open all that can be opened; the others are listed with their fault. At most DISKS_MAX."""
        before = read_manifest(self._run)
        is_same_boot = before is not None and before.boot == self._boot
        named = self._configured = {config.path for config in configs}
        added = [DiskConfig(Path(path), size) for path, size in self._wishes.added.items()]
        configs = [*configs, *(disk for disk in added if disk.path not in named)][:DISKS_MAX]
        opening = [self._try_open(config, is_same_boot=is_same_boot) for config in configs]
        for config, opened in zip(configs, await asyncio.gather(*opening), strict=True):
            await self._enter(config, opened)
        self._publish()

    async def add(self, config: DiskConfig) -> Disk:
        """Open one more disk, or again one that is out. Raises: DiskRefused, DiskTooSmall."""
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
            self._wishes.states.pop(opened.id, None)
            self._wishes.faults.pop(opened.id, None)
        was_refused = config.path in self.refused
        entered = await self._enter(config, opened)
        if entered is None:
            why = self.refused[config.path]
            if not was_refused:
                del self.refused[config.path]  # told now, and never a disk of this node
            raise DiskRefused(why)
        self._wishes.added[str(config.path)] = config.size_bytes
        self._keep_wishes()
        self._publish()
        return entered

    async def set_draining(self, disk_id: str, *, is_draining: bool) -> Disk:
        """Place no more blocks there, or place blocks again. Raises: DiskUnknown, DiskRefused."""
        disk = self.by_id(disk_id)
        if disk.state is DiskState.OUT:
            raise DiskRefused(f"disk {disk.id} is out ({disk.fault}): add it again first")
        disk.state = DiskState.DRAINING if is_draining else DiskState.IN_USE
        disk.fault = "drained" if is_draining else ""
        self._wishes.states.pop(disk.id, None)
        if is_draining:
            self._wishes.states[disk.id] = disk.state.value
        self._keep_wishes()
        self._publish()
        return disk

    async def retire(self, disk_id: str) -> Disk:
        """Serve nothing from it any more and close it in order, so that it can be pulled. Raises: DiskUnknown."""
        disk = self.by_id(disk_id)
        self._wishes.states[disk.id] = DiskState.OUT.value
        self._wishes.faults.pop(disk.id, None)
        self._wishes.added.pop(str(disk.config.path), None)
        self._keep_wishes()
        was_out = disk.state is DiskState.OUT
        self._take_out(disk, RETIRED)
        if not was_out:
            await self._close_out(disk, is_clean=True)
        return disk

    def forget_refused(self, path: Path) -> bool:
        """Take a disk that could not be opened off the list; whether there was one. The settings may name it again."""
        if self.refused.pop(path, None) is None:
            return False
        if self._wishes.added.pop(str(path), None) is not None:
            self._keep_wishes()
        self._count()
        return True

    def listed(self) -> list[Disk]:
        """The disks that people are shown: none that came back later, nor a retired one that no setting names."""
        return [disk for place, disk in enumerate(self.opened) if self._is_listed(place, disk)]

    def _is_listed(self, place: int, disk: Disk) -> bool:
        if disk.state is not DiskState.OUT:
            return True
        if disk.fault == RETIRED and disk.config.path not in self._configured:
            return False
        return not any(
            disk.id == later.id or disk.config.path == later.config.path
            for later in self.opened[place + 1 :]
        )

    def fail(self, disk: Disk, error: OSError) -> None:
        """A disk could not be read or written: place no more there if it is full, else serve nothing from it."""
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
        FAULTS.inc()
        self._take_out(disk, reason)
        self._start(self._close_out(disk, is_clean=False))

    def _retire_rotting(self, disk: Disk) -> None:
        """Serve nothing more from a disk that changes its blocks, also after a restart, until a person adds it again."""
        reason = f"{ROTTEN_MAX} blocks changed on the disk within {ROTTEN_WITHIN_S / 3600:g} h: replace it"
        log.error("disk_rotting", disk=disk.id, path=str(disk.config.path), rotten=disk.rotten)
        FAULTS.inc()
        self._wishes.states[disk.id] = DiskState.OUT.value
        self._wishes.faults[disk.id] = reason
        self._take_out(disk, reason)
        self._start(self._close_out(disk, is_clean=False))
        try:
            self._keep_wishes()
        except OSError as error:
            log.warning("disk_wishes_not_written", error=str(error))

    def by_id(self, disk_id: str) -> Disk:
        """The disk of that id, or at that path; the newest where it came back. Raises: DiskUnknown."""
        for disk in reversed(self.opened):
            if disk_id in (disk.id, str(disk.config.path)):
                return disk
        raise DiskUnknown(
            f"no disk {disk_id!r}: ids and paths of this node are listed by `headrace media disks ls`"
        )

    def owner(self, key: BlockKey) -> Disk | None:
        """The disk that a block is put on; None: no disk is in use."""
        place = self._owners[key.place & (SLOTS - 1)]
        return self.opened[place] if place != NOBODY else None

    def find(self, key: BlockKey) -> tuple[Disk, Hit] | None:
        """Where a block is, proved or not."""
        slot = key.place & (SLOTS - 1)
        for owners in (self._owners, self._owners_before):
            if owners and owners[slot] != NOBODY:
                disk = self.opened[owners[slot]]
                hit = disk.table.find(key)
                if hit is not None:
                    return disk, hit
        return None

    def in_service(self) -> list[Disk]:
        """The disks that are read from."""
        return [disk for disk in self.opened if disk.state is not DiskState.OUT]

    def keep_up(self) -> None:
        """Bring the indexes on the disks up to date, each as fast as it can; take out one that hangs, rots or was cut."""
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
                self._start(self._write_index(disk))

    async def close(self) -> None:
        """Close every disk in order; a fault, or one that hangs, costs the blocks of that disk."""
        closing = [self._close_out(disk, is_clean=True) for disk in self.in_service()]
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*closing, *self._tasks)
        except TimeoutError:
            log.warning("disks_not_closed_clean", after_s=_CLOSE_S)

    async def _try_open(self, config: DiskConfig, *, is_same_boot: bool) -> Disk | str:
        """The disk, or why it cannot be used."""
        try:
            return await asyncio.to_thread(open_disk, config, self._run, is_same_boot=is_same_boot)
        except (DiskRefused, DiskTooSmall) as error:
            return error.text
        except OSError as error:
            return f"disk {config.path}: {error.strerror or error}"

    async def _enter(self, config: DiskConfig, disk: Disk | str) -> Disk | None:
        """Put an opened disk into the list, as people wished it to be used."""
        if isinstance(disk, str):
            self._refuse(config, disk)
            return None
        if any(other.id == disk.id for other in self.in_service()):
            disk.close()
            self._refuse(config, f"disk {config.path} is a copy of {disk.id}: empty one of both")
            return None
        wish = self._wishes.states.get(disk.id, DiskState.IN_USE.value)
        disk.state = DiskState(wish)
        retired = self._wishes.faults.get(disk.id, RETIRED)
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
            # A worker that has not seen the manifest yet must not find what others may overwrite later.
            disk.table.hide_all()
        disk.close()

    async def _write_index(self, disk: Disk) -> None:
        try:
            await disk.call(disk.write_index)
        except OSError as error:
            self.fail(disk, error)
        finally:
            self._writing.discard(disk)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _publish(self) -> None:
        """Tell the workers how the disks are now."""
        disks = tuple(_manifest_disk(disk) for disk in self.opened)
        self._owners, self._owners_before = places_of(disks)
        self._count()
        revision = self._turns.revision + 1
        manifest = Manifest(
            self._boot, revision, self._hash_key, disks, self._owners, self._owners_before
        )
        try:
            write_manifest(self._run, manifest)
        except OSError as error:
            # Workers go on with the one before: they may miss, and are told nothing wrong.
            log.exception("manifest_not_written", error=str(error))
            return
        self._turns.publish_revision(revision)

    def _count(self) -> None:
        counted = [disk.state.value for disk in self.listed() if disk.fault != RETIRED]
        counted += [DiskState.OUT.value] * len(self.refused)
        for state, child in DISKS.items():
            child.set(counted.count(state))

    def _keep_wishes(self) -> None:
        draft = self._run / f"{_STATE_FILE}.draft"
        draft.write_bytes(msgspec.json.encode(self._wishes))
        draft.replace(self._run / _STATE_FILE)


def _manifest_disk(disk: Disk) -> ManifestDisk:
    return ManifestDisk(
        id=disk.id,
        frames=disk.frames,
        state=disk.state.value,
        reader_path=str(disk.files.reader_path),
        reader_identity=disk.reader_identity,
        data_at=disk.files.data_at,
        table_path=str(disk.table_path),
        table_identity=disk.table_identity,
        is_copied=disk.is_copied,
    )


def _read_wishes(run: Path) -> Wishes:
    try:
        return msgspec.json.decode((run / _STATE_FILE).read_bytes(), type=Wishes)
    except FileNotFoundError:
        return Wishes()
    except msgspec.DecodeError as error:
        log.warning("disk_wishes_unreadable", error=str(error))
        return Wishes()
