"""What the questions about media stand on.

A node of ours with tracks whose bytes can be checked, the generator as a process, and what a
server costs meanwhile.

Server on one core, generator on the other. Ours runs with everything on that a user would have on:
URLs signed and checked at each request, metrics, blocks with sums in a store of its own in front of
the object store. Before anything is counted every byte of every track was read and compared.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.children import BenchFault, Child, wait_for
from bench.harness import READY_S, Run
from bench.media_objects import Track, content, native_program, write_targets
from bench.systems import Cell
from bench.views_stage import free_port, pin
from headrace.engines.blobs import Blobs
from headrace.kernel.signing import load_or_create_secret
from headrace.media import Media, MediaConfig

SERVER_CORE, CLIENT_CORE = 0, 1
SIGNED_S = 6 * 3600.0
LISTENERS = 20_480
"""Distinct URLs of a main row: each listener has one of its own, as in production."""


@dataclass(frozen=True)
class Serving:
    """A server under load, and the requests of the generator."""

    child: Child
    port: int
    targets: Path
    tracks: Sequence[Track]

    def with_targets(self, targets: Path) -> Serving:
        """The same server with other requests."""
        return Serving(self.child, self.port, targets, self.tracks)


@dataclass(frozen=True)
class Pressed:
    """The report of a run of the generator, and CPU seconds of the server meanwhile."""

    report: dict[str, Any]
    cpu_s: float

    @property
    def rate_per_s(self) -> float:
        """Answers a second."""
        return float(self.report["done"] / self.report["seconds"])

    @property
    def cpu_s_a_gib(self) -> float:
        """CPU seconds of the server for each GiB."""
        return float(self.cpu_s / (self.report["bytes"] / 2**30))


def blobs_folder(cell: Cell) -> Path:
    """Where the object store of a cell is."""
    return cell.folder / "blobs"


def signed_targets(cell: Cell, tracks: Sequence[Track]) -> list[str]:
    """Path and query of each track, signed as an application signs them; no two are equal."""
    blobs = Blobs(blobs_folder(cell).as_uri())
    media = Media(blobs, MediaConfig(), secret=lambda: load_or_create_secret(cell.folder / "data"))
    urls = [media.objects.url(t.key, ttl_s=SIGNED_S + number) for number, t in enumerate(tracks)]
    return ["/m/" + url.partition("/m/")[2] for url in urls]


def listened(tracks: Sequence[Track], listeners: int) -> list[Track]:
    """The track of each listener: `tracks` in turns."""
    return [tracks[number % len(tracks)] for number in range(listeners)]


def listener_targets(cell: Cell, tracks: Sequence[Track], listeners: int = LISTENERS) -> Path:
    """A signed URL per listener, each with an expiry of its own, over the same tracks."""
    of_listeners = listened(tracks, listeners)
    file = cell.folder / f"listeners-{listeners}"
    return write_targets(file, of_listeners, signed_targets(cell, of_listeners))


def our_settings(cell: Cell, port: int, **more: str) -> dict[str, str]:
    """Of a node of ours in front of the object store of `cell`."""
    return {
        "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{port}",
        "HEADRACE_BLOBS_URL": blobs_folder(cell).as_uri(),
        "HEADRACE_MEDIA_SIGNED": "required",
        "HEADRACE_MEDIA_WORKERS": "1",
        **more,
    }


def disk_of(cell: Cell, size: str = "1GiB", name: str = "disk") -> str:
    """A folder that a node may use as a disk, as the setting requires."""
    folder = cell.folder / name
    folder.mkdir(exist_ok=True)
    return f"{folder}:{size}"


@asynccontextmanager
async def our_node(
    cell: Cell, tracks: Sequence[Track], *, core: int | None = SERVER_CORE, **settings: str
) -> AsyncIterator[Serving]:
    """`headrace media serve` while the block lasts, with `settings` beside the usual ones."""
    port = free_port()
    child = cell.role("media", "serve", **our_settings(cell, port, **settings))
    if core is not None:
        pin(child.pid, core)
    targets = write_targets(cell.folder / "targets", tracks, signed_targets(cell, tracks))
    async with served(child, port, targets, tracks) as serving:
        yield serving


@asynccontextmanager
async def served(
    child: Child, port: int, targets: Path, tracks: Sequence[Track]
) -> AsyncIterator[Serving]:
    """Wait until `child` answers; end it when the block ends."""
    try:
        await wait_for(lambda: answers(port), f"port {port}", READY_S, child)
        yield Serving(child, port, targets, tracks)
    finally:
        await child.end()


def answers(port: int) -> bool:
    """Whether a request is answered there, with whatever status."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        line.request("GET", "/bench-probe")
        line.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        line.close()
    return True


async def read_all(serving: Serving) -> None:
    """Read every track whole, so that it is warm, and compare every byte. Raises: BenchFault."""

    def read() -> None:
        line = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        rows = [row.split() for row in serving.targets.read_text().splitlines()]
        once = {number: (size, target) for number, size, target in rows}
        for number, (size, target) in once.items():
            line.request("GET", target)
            answer = line.getresponse()
            body = answer.read()
            if answer.status != 200 or body != content(int(number), int(size)):
                raise BenchFault(
                    f"track {number}: {answer.status}, {len(body)} bytes, not as it is"
                )
        line.close()

    await asyncio.to_thread(read)


def hot_times(run: Run) -> dict[str, float]:
    """How long a closed loop lasts."""
    return {"seconds": 1.5, "warm_s": 0.5} if run.quick else {"seconds": 5, "warm_s": 1}


def pinned(words: Sequence[str], core: int | None) -> list[str]:
    """The command line, kept on one core from its first instruction on, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if core is None or len(cores) < 2 or shutil.which("taskset") is None:
        return list(words)
    return ["taskset", "-c", str(cores[core % len(cores)]), *words]


@cache
def _preferred() -> list[str]:
    """The prefix of a process that runs before others of its core; none if that is not allowed."""
    prefix = ["chrt", "-f", "1"]
    if shutil.which(prefix[0]) is None:
        return []
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if tried.returncode == 0 else []


def generator(
    cell: Cell,
    serving: Serving,
    mode: str,
    *,
    core: int | None = CLIENT_CORE,
    is_preferred: bool = False,
    **options: float | str,
) -> Child:
    """Start the generator; `is_preferred` before other processes of its core, where allowed."""
    program = native_program("media_load", cell.folder.parent)
    words = [str(program), mode, str(serving.targets), f"port={serving.port}"]
    words += [f"{name}={value}" for name, value in options.items()]
    words = [*(_preferred() if is_preferred else []), *pinned(words, core)]
    return Child(words, folder=cell.folder, env={}, name=f"load-{mode}")


async def press(
    cell: Cell,
    serving: Serving,
    mode: str,
    *,
    seconds: float,
    meanwhile: Callable[[], object] | None = None,
    is_preferred: bool = False,
    **options: float | str,
) -> Pressed:
    """Run the generator to its end; CPU is counted from its warm-up on. Raises: BenchFault."""
    child = generator(cell, serving, mode, is_preferred=is_preferred, seconds=seconds, **options)
    try:
        await wait_for(lambda: "warm" in child.out, "the warm-up", 60, child)
        before_s = serving.child.cpu_s()
        if meanwhile is not None:
            meanwhile()
        out = await child.finish(seconds + 60)
        cpu_s = serving.child.cpu_s() - before_s
    finally:
        await child.end()
    return Pressed(json.loads(out.strip().splitlines()[-1]), cpu_s)
