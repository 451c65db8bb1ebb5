"""The block cache of a node against a model: reads, fills, evictions, faults and restarts.

A seeded driver applies random steps to a running cache of two small disks. The model has the bytes
of every version, the states of the disks, and whether the origin is there. After each step: no
read returns a wrong byte, a stored block is served without a read of the origin, concurrent readers
share one read, errors occur only where the model has a reason, and the disks have the states that
the steps gave them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections import Counter

import pytest
from cache_lab import BLOCK_BYTES, CacheNode, block_data, disk_bytes, read_as_worker, shape_in
from tests.kit.waiting import wait_true

from headrace.kernel.errors import HeadraceError
from headrace.kernel.metrics import REGISTRY
from headrace.media.cache import control
from headrace.media.cache.linux import is_in_memory
from headrace.media.errors import ObjectUnknown, SourceCut, StoreUnavailable
from headrace.media.model import DiskConfig, Shape

NAMES = [f"{number}.mp3" for number in range(10)]
BLOCKS = 4
SIZE_BYTES = BLOCKS * BLOCK_BYTES - 999
WORKERS = 2
DAMAGES_MAX = 4
"""Fewer than retire a disk."""


def origin_reads() -> float:
    outcomes = ("stored", "pass", "failed")
    values = [REGISTRY.get_sample_value("media_fills_total", {"outcome": o}) for o in outcomes]
    return sum(value or 0 for value in values)


class Model:
    """What the origin has, and what was done to the disks."""

    def __init__(self) -> None:
        self.contents: dict[tuple[str, str], str] = {}
        """The label of the bytes, by name and ETag."""
        self.shapes: dict[str, Shape] = {}
        self.old_shapes: list[tuple[str, Shape]] = []
        self.generations: Counter[str] = Counter()
        self.is_origin_away = False
        self.is_damaged = False
        self.states: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def bytes_of(self, name: str, shape: Shape, number: int) -> bytes:
        length = min(BLOCK_BYTES, shape.size_bytes - number * BLOCK_BYTES)
        return block_data(self.contents[name, shape.etag], number, length)

    def errors(self, name: str, shape: Shape) -> tuple[type[HeadraceError], ...]:
        """The errors that a read of a block that is not stored may raise."""
        if self.is_origin_away:
            return (StoreUnavailable,)
        current = self.shapes.get(name)
        if current is None:
            return (ObjectUnknown, SourceCut)
        return () if current == shape else (SourceCut,)


class Driver:
    """Random steps on one running node."""

    def __init__(self, node: CacheNode, seed: int) -> None:
        self.node, self.blobs, self.dice = node, node.blobs, random.Random(seed)
        self.model, self.versions, self.log = Model(), Counter(), []
        self.damages = 0

    async def run(self, steps: int) -> None:
        weights = {
            self.read: 30, self.herd: 6, self.replace: 4, self.remove: 1, self.purge: 3,
            self.lose_or_find_origin: 3, self.damage: 2, self.verify: 2, self.restart: 2,
            self.bounce_filler: 2, self.reopen_worker: 1, self.drain_or_undrain: 3,
            self.retire_and_add: 1, self.fill_up_disk: 1, self.fail_disk: 1, self.hold_epoch: 3,
        }  # fmt: skip
        for name in NAMES:
            await self.put(name)
        for disk in self.node.filler._disks.opened:
            self.model.states[disk.id] = "in use"
        for _ in range(steps):
            [step] = self.dice.choices(list(weights), list(weights.values()))
            self.log.append(step.__name__)
            await step()
            await self.check_disks()
        await self.check_all()

    # The origin

    async def put(self, name: str) -> None:
        self.versions[name] += 1
        label = f"{name}#{self.versions[name]}"
        parts = [block_data(label, number) for number in range(BLOCKS)]
        await self.blobs.put(name, b"".join(parts)[:SIZE_BYTES])
        shape = await shape_in(self.blobs, name)
        self.model.contents[name, shape.etag] = label
        if name in self.model.shapes:
            self.model.old_shapes.append((name, self.model.shapes[name]))
        self.model.shapes[name] = shape

    async def replace(self) -> None:
        if not self.model.is_origin_away:
            await self.put(self.dice.choice(NAMES))

    async def remove(self) -> None:
        name = self.dice.choice(NAMES)
        if not self.model.is_origin_away and name in self.model.shapes:
            self.model.old_shapes.append((name, self.model.shapes.pop(name)))
            await self.blobs.delete(name)

    async def purge(self) -> None:
        name = self.dice.choice(NAMES)
        self.model.generations[name] += 1
        for _, shape in self.choices(name):
            key = self.node.store.key(name, shape, 0)
            assert not self.is_stored(self.node.store, key), "a purge hides every block"

    async def lose_or_find_origin(self) -> None:
        folder = self.blobs.folder
        away = folder.with_name("away")
        if self.model.is_origin_away:
            away.rename(folder)
        else:
            folder.rename(away)
        self.model.is_origin_away = not self.model.is_origin_away

    # Reads

    def choices(self, name: str) -> list[tuple[str, Shape]]:
        """The versions of an object, the newest first."""
        newest = [(name, self.model.shapes[name])] if name in self.model.shapes else []
        return newest + [one for one in reversed(self.model.old_shapes) if one[0] == name][:1]

    def choose(self) -> tuple[str, Shape, int]:
        """Popular names are chosen more often, former versions rarely."""
        name = NAMES[min(int(self.dice.expovariate(0.3)), len(NAMES) - 1)]
        choices = self.choices(name)
        found = choices[-1] if self.dice.random() < 0.1 else choices[0]
        return *found, self.dice.randrange(BLOCKS)

    @staticmethod
    def is_stored(store, key) -> bool:
        store.enter_epoch()
        try:
            return store.stored_frame(key) is not None
        finally:
            store.leave_epoch()

    async def read(self) -> None:
        await self.read_one(self.dice.choice(self.node.stores), *self.choose())

    async def read_one(self, store, name: str, shape: Shape, number: int) -> None:
        key = store.key(name, shape, number)
        was_stored, before = self.is_stored(store, key), origin_reads()
        try:
            data, how = await read_as_worker(store, key, is_copy=self.dice.random() < 0.1)
        except self.model.errors(name, shape):
            assert not was_stored or self.model.is_damaged, "a stored block is served"
            self.model.counts["error"] += 1
            return
        assert (data == self.model.bytes_of(name, shape, number)) is True, (name, number, how)
        assert not was_stored or self.model.is_damaged or origin_reads() == before
        self.model.counts[how] += 1

    async def herd(self) -> None:
        name, shape, number = self.choose()
        before, readers = origin_reads(), [self.dice.choice(self.node.stores) for _ in range(30)]
        keys = [store.key(name, shape, number) for store in readers]
        found = await asyncio.gather(
            *(store.block(key) for store, key in zip(readers, keys, strict=True)),
            return_exceptions=True,
        )
        errors = self.model.errors(name, shape)
        assert not [one for one in found if isinstance(one, BaseException)] or errors
        # A block may be evicted or refused by a full set between two of them.
        assert origin_reads() <= before + (1 if self.all_take_blocks() else 3)
        await self.read_one(readers[0], name, shape, number)

    def all_take_blocks(self) -> bool:
        return set(self.model.states.values()) == {"in use"}

    async def hold_epoch(self) -> None:
        """No frame changes while a worker may send it, and others get their bytes meanwhile."""
        holder = self.node.stores[1]
        blocks = [self.choose() for _ in range(8)]
        for one in blocks:
            await self.read_one(holder, *one)
        holder.enter_epoch()
        keys = [holder.key(*block) for block in blocks]
        frames = [(key, holder.find(key)) for key in keys]
        before = [(f, os.pread(f.fd, f.length, f.offset)) for _, f in frames if f is not None]
        for disk in self.node.filler._disks.in_service():
            disk.table.visited[:] = bytes(disk.frames)
        for _ in range(4):
            await self.read_one(self.node.stores[0], *self.choose())
        for frame, data in before:
            assert (os.pread(frame.fd, frame.length, frame.offset) == data) is True
        holder.leave_epoch()

    # Disks and processes

    def disks_in_service(self) -> list:
        return self.node.filler._disks.in_service()

    async def damage(self) -> None:
        """Change bytes of a stored block and drop them from memory."""
        self.damages += 1
        places = [(d, f) for d in self.disks_in_service() for f in range(d.frames)]
        used = [(disk, frame) for disk, frame in places if disk.table.entry(frame).tag]
        if not used or self.damages > DAMAGES_MAX:
            return
        disk, frame = self.dice.choice(used)
        blocks, at = disk.files.blocks, disk.files.offset_of(frame) + self.dice.randrange(1000)
        former = os.pread(blocks, 7, at)
        os.pwrite(blocks, bytes(byte ^ 1 for byte in former), at)
        os.fdatasync(blocks)
        os.posix_fadvise(blocks, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_in_memory(blocks, at // 4096 * 4096, 4096):
            os.pwrite(blocks, former, at)  # this file system keeps its pages
            return
        self.model.is_damaged = True

    async def verify(self) -> None:
        found = await control(self.node.socket, "verify")
        assert found["blocks"] == found["right"] + found["wrong"] + found["unread"]
        assert not found["wrong"] or self.model.is_damaged
        self.model.is_damaged = self.model.is_damaged and found["unread"] > 0

    def used(self) -> dict[str, int]:
        return {disk.id: disk.table.used() for disk in self.disks_in_service()}

    async def restart(self) -> None:
        """An orderly stop keeps every block."""
        await self.verify()
        before = self.used()
        await self.node.restart(boot=f"boot-{self.dice.random()}")
        assert self.used() == before
        for place, disk in enumerate(self.node.filler._disks.opened):
            if self.model.states[disk.id] == "full":
                self.model.states[disk.id] = "in use"
            assert disk.files.was_clean or disk.state.value == "out", place

    async def bounce_filler(self) -> None:
        """Workers continue with what is proved; a request waits for the next filler."""
        name, shape, number = self.choose()
        key = self.node.store.key(name, shape, number)
        await self.read_one(self.node.store, name, shape, number)
        was_stored = self.is_stored(self.node.store, key)
        await self.node.stop_filler()
        if was_stored and not self.model.is_damaged:
            data, how = await read_as_worker(self.node.store, key)
            assert ((data == self.model.bytes_of(name, shape, number)), how) == (True, "hit")
        reading = asyncio.create_task(self.read_one(self.node.stores[1], *self.choose()))
        await asyncio.sleep(0)
        await self.node.start(workers=WORKERS)
        await reading
        for disk_id, state in self.model.states.items():
            if state == "full":
                self.model.states[disk_id] = "in use"

    async def reopen_worker(self) -> None:
        await self.node.stores.pop().close()
        self.node.open_cache(WORKERS - 1, generation=self.model.generations.__getitem__)

    def choose_disk(self, *states: str):
        found = [d for d in self.disks_in_service() if self.model.states[d.id] in states]
        return self.dice.choice(found) if found else None

    async def drain_or_undrain(self) -> None:
        disk = self.choose_disk("in use", "draining", "full")
        if disk is None:
            return
        is_drain = self.model.states[disk.id] == "in use"
        row = await control(self.node.socket, "drain" if is_drain else "undrain", id=disk.id)
        self.model.states[disk.id] = row["state"]
        assert row["state"] == ("draining" if is_drain else "in use")
        if is_drain:
            before = disk.table.used()
            for _ in range(6):
                await self.read()
            assert disk.table.used() <= before, "a drained disk takes no blocks"

    async def retire_and_add(self) -> None:
        """Reads pass around the disk meanwhile; its blocks are still right when it is back."""
        disk = self.choose_disk("in use", "draining", "full")
        if disk is None:
            return
        row = await control(self.node.socket, "retire", id=disk.id)
        assert (row["state"], row["fault"]) == ("out", "retired")
        for _ in range(4):
            await self.read()
        await self.add(disk)

    async def add(self, disk) -> None:
        config: DiskConfig = disk.config
        given = {"path": str(config.path), "size_bytes": config.size_bytes}
        added = await control(self.node.socket, "add", **given)
        assert (added["id"], added["state"], added["fault"]) == (disk.id, "in use", "")
        self.model.states[disk.id] = "in use"

    async def fill_up_disk(self) -> None:
        """A disk without room serves its blocks and takes no more."""
        disk = self.choose_disk("in use")
        if disk is not None:
            self.node.filler._disks.fail(disk, OSError(errno.ENOSPC, "No space left on device"))
            self.model.states[disk.id] = "full"
            assert "No space left" in disk.fault

    async def fail_disk(self) -> None:
        """A fault that a worker met: the disk is out for all, until it is added again."""
        disk = self.choose_disk("in use", "draining", "full")
        if disk is None:
            return
        position = self.node.filler._disks.opened.index(disk)
        store = self.dice.choice(self.node.stores)
        store.enter_epoch()
        store.leave_epoch()
        store.report_fault(position, OSError(errno.EIO, "Input/output error"))
        await wait_true(lambda: disk.state.value == "out", what="the disk is out")
        for _ in range(4):
            await self.read()
        await wait_true(lambda: not self.node.filler._disks._tasks, what="it is closed")
        await self.add(disk)

    async def check_disks(self) -> None:
        rows = await control(self.node.socket, "disks")
        states = {row["id"]: row["state"] for row in rows}
        shown = {"full": "draining"}
        assert states == {id_: shown.get(state, state) for id_, state in self.model.states.items()}

    async def check_all(self) -> None:
        if self.model.is_origin_away:
            await self.lose_or_find_origin()
        for name, shape in self.model.shapes.items():
            for number in range(BLOCKS):
                for store in self.node.stores:
                    await self.read_one(store, name, shape, number)


async def drive(tmp_path, blobs, *, seed: int, steps: int) -> Counter[str]:
    disks = [DiskConfig(tmp_path / f"disk-{n}", disk_bytes(1)) for n in range(2)]
    node = CacheNode(tmp_path, blobs, disks)
    driver = Driver(node, seed)
    node.generation = driver.model.generations.__getitem__
    await node.start(workers=WORKERS)
    try:
        await driver.run(steps)
    except BaseException as error:
        error.add_note(f"seed {seed}, steps {driver.log}")
        raise
    finally:
        away = tmp_path / "away"
        if away.exists():
            away.rename(blobs.folder)
        await node.stop()
    return driver.model.counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_the_cache_is_as_its_model(tmp_path, blobs, seed):
    counts = await drive(tmp_path, blobs, seed=seed, steps=90)
    assert min(counts["hit"], counts["stored"] + counts["passed"]) > 10, counts


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
async def test_the_cache_is_as_its_model_for_long(tmp_path, blobs, seed):
    await drive(tmp_path, blobs, seed=seed, steps=1000)
