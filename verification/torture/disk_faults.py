"""Faults of disks: full, slow, torn, rotten and forgetful."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.kit.processes import descendants
from tests.kit.storm.media_cluster import Node
from tests.kit.storm.storm import frozen, send_signal

from verification.torture.site import Site

_CLONE_NEWNS: Final = 0x00020000
DISK: Final = "400m"
PAGE_BYTES: Final = 4096
SLOW_SYNC_US: Final = 200_000


def private_mounts() -> str | None:
    """Give this process mounts of its own; return why that is impossible, or None."""
    if os.geteuid() != 0:
        return "mounts need root"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
    made = subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True)
    return None if made.returncode == 0 else f"no private mounts: {made.stderr.decode().strip()}"


def missing_mounts() -> str | None:
    """Why a small disk cannot be mounted here."""
    return None if os.geteuid() == 0 else "mounts need root"


def missing_strace() -> str | None:
    """Why system calls cannot be delayed here."""
    return None if shutil.which("strace") else "strace is not installed"


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A small file system in memory, mounted at `folder`."""
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=755", "torture", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def fill_disk(site: Site) -> None:
    """Fill the disk of engines, objects and media nodes for a while."""
    ballast = site.disk / "ballast"
    descriptor = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    try:
        until = asyncio.get_running_loop().time() + site.chance.uniform(0.5, 2.0)
        while asyncio.get_running_loop().time() < until:
            # What others freed meanwhile is taken, too.
            for size in (1 << 20, PAGE_BYTES):
                with suppress(OSError):
                    while os.write(descriptor, bytes(size)):
                        pass
            await site.pass_time(0.05)
    finally:
        os.close(descriptor)
        ballast.unlink()
    await site.revive_engines()


async def forget_writes(site: Site) -> float:
    """Kill PostgreSQL; its disk has lost all writes of some seconds, also those it confirmed.

    The disk kept the order of writes, so its content is that of an earlier moment.
    """
    folder, kept = site.disk / "data" / "postgres", site.disk / "kept"
    with frozen(site.engines.postgres_pid):
        await asyncio.to_thread(subprocess.run, ["cp", "-a", folder, kept], check=True)
    await site.pass_time(site.chance.uniform(0.5, 4.0))
    began_s = time.monotonic()
    pid = site.engines.postgres_pid
    with frozen(pid):
        for one in (*descendants(pid), pid):
            send_signal(one)
    shutil.rmtree(folder)
    kept.rename(folder)
    await site.engines.restart("postgres")
    site.doubt(began_s)
    return began_s


async def refuse_writes(site: Site) -> None:
    """The folder of objects is read-only for a while, for every file that is opened meanwhile."""
    folder = site.direct.blobs_url.removeprefix("file://")
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        await site.pass_time(site.chance.uniform(0.5, 2.0))
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


async def slow_disk(site: Site) -> None:
    """Each sync of the engines takes 0.2 s longer for a while."""
    pids = []
    for engine in (site.engines.postgres_pid, site.engines.valkey_pid):
        pids += [engine, *descendants(engine)]
    words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync"]
    words += ["-e", f"inject=fsync,fdatasync:delay_enter={SLOW_SYNC_US}"]
    tracer = subprocess.Popen(
        [*words, *(word for pid in pids for word in ("-p", str(pid)))],
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        await site.pass_time(site.chance.uniform(1.0, 2.0))
    finally:
        tracer.terminate()
        await asyncio.to_thread(tracer.wait, 30)


def cache_files(node: Node) -> list[Path]:
    """The files of a node's cache, without those that are empty."""
    found = (path for path in (node.folder / "disk").rglob("*") if path.is_file())
    return [path for path in found if path.stat().st_size > PAGE_BYTES]


async def rot_bits(site: Site) -> None:
    """Flip bits in the cache files of a running media node, on the disk and not in memory."""
    node = site.media.pick()
    for path in cache_files(node):
        with _pages(path) as change:
            for at in _used_pages(site, path, count=20):
                bit = 1 << site.chance.randrange(8)
                change(at, lambda page, bit=bit: _flipped(page, site.chance.randrange(512), bit))


async def tear_writes(site: Site) -> None:
    """Kill a media node, and leave pages of its files half written."""
    node = site.media.pick()
    node.kill()
    for path in cache_files(node):
        with _pages(path) as change:
            for at in _used_pages(site, path, count=3):
                change(at, lambda page: page[: PAGE_BYTES // 2] + bytes(PAGE_BYTES // 2))
    node.start()


def _flipped(page: bytes, at: int, bit: int) -> bytes:
    return page[:at] + bytes([page[at] ^ bit]) + page[at + 1 :]


@contextmanager
def _pages(path: Path) -> Iterator[Callable[[int, Callable[[bytes], bytes]], None]]:
    """Change pages of a file around the page cache, as a disk does: readers read them again."""
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    aligned = mmap.mmap(-1, PAGE_BYTES)

    def change(at: int, changed: Callable[[bytes], bytes]) -> None:
        if os.preadv(descriptor, [aligned], at) == PAGE_BYTES:
            aligned[:] = changed(aligned[:])
            os.pwrite(descriptor, aligned, at)

    try:
        yield change
    finally:
        os.close(descriptor)
        aligned.close()


def _used_pages(site: Site, path: Path, *, count: int) -> list[int]:
    """Offsets of pages that are not empty; fewer in an empty file."""
    pages = path.stat().st_size // PAGE_BYTES
    found = []
    with path.open("rb", buffering=0) as file:
        for _ in range(count * 10):
            at = site.chance.randrange(pages) * PAGE_BYTES
            file.seek(at)
            if len(found) < count and any(file.read(PAGE_BYTES)):
                found.append(at)
    return found
