"""Fillers as child processes: `python filler_process.py SETTINGS_JSON`, optionally with a bug.

The process prints `ready`; SIGTERM ends it. `FillerChild` starts one over the folders of a node.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from headrace.engines.blobs import Blobs
from headrace.kernel.logs import configure_logs
from headrace.media.cache import Filler
from headrace.media.cache import disk as disk_module
from headrace.media.cache.disk import Disk
from headrace.media.cache.disk_files import write_whole
from headrace.media.cache.epochs import FillerEpochs
from headrace.media.cache.fills import Fills
from headrace.media.model import DiskConfig

if TYPE_CHECKING:
    from cache_lab import CacheNode


CRASH_POINTS = (
    "chosen",
    "hidden",
    "waited",
    "punched",
    "written",
    "fields_stored",
    "entry_summed",
    "verified",
    "shown",
)


class FillerChild:
    """One filler process, which is killed at the end if it still runs."""

    def __init__(self, node: CacheNode, *, bug: str = "", crash_at: str = "") -> None:
        settings = {
            "blobs": node.blobs.folder.as_uri(),
            "disks": [[str(disk.path), disk.size_bytes] for disk in node.disks],
            "run": str(node.run),
            "boot": node.boot,
            "bug": bug,
        }
        env = {**os.environ, **({"HEADRACE_CRASH_AT": crash_at} if crash_at else {})}
        node.run.mkdir(parents=True, exist_ok=True)
        self._dies = bool(crash_at)
        self._err = (node.folder / "filler.err").open("ab")
        self.process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                json.dumps(settings),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._err,
            env=env,
        )

    def __enter__(self) -> Self:
        line = self.process.stdout.readline()
        # The probe at the start passes some of the points, too.
        is_expected = line == b"ready\n" or (self._dies and self.process.wait() == -signal.SIGKILL)
        assert is_expected, f"the filler printed {line!r}: see filler.err"
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        self._err.close()

    def kill(self) -> None:
        """SIGKILL the filler and wait for its end."""
        self.process.kill()
        self.wait()

    def stop(self) -> int:
        """SIGTERM the filler and wait for its end."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        code = self.process.wait(timeout=90)
        self.process.stdout.close()
        self.process.stdin.close()
        return code


def plant(bug: str) -> None:
    """Break one of the rules."""

    async def do_not_wait(turns: FillerEpochs) -> bool:
        return True

    def overwrite(disk: Disk, frame: int, data: bytes) -> None:
        write_whole(disk.files.blocks, data.ljust(262144, b"\0"), disk.files.offset_of(frame))

    async def show_first(fills: Fills, disk: Disk, frame: int, key, data: bytes) -> bool:
        generation = disk.next_generation(frame)
        disk.table.hide(frame)
        await fills._epochs.wait_for_workers()
        disk.table.write_fields(frame, key, generation=generation, data=data)
        disk.table.show(frame, key)
        await disk.call(disk.write_block, frame, data)
        return True

    match bug:
        case "no wait":
            FillerEpochs.wait_for_workers = do_not_wait
        case "no punch":
            Disk.write_block = overwrite
        case "no punch, no probe":
            Disk.write_block = overwrite
            disk_module.keeps_sent_bytes = lambda *_: True
        case "tag first":
            Fills._put = show_first
        case _:
            assert not bug, bug


def end_with_parent() -> None:
    """Exit when the parent, which holds the other end of the standard input, has ended."""
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: os._exit(1))


async def main(settings: dict) -> None:
    """Fill until SIGTERM."""
    configure_logs("media-filler")
    plant(settings.get("bug", ""))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    filler = Filler(
        Blobs(settings["blobs"]),
        [DiskConfig(Path(path), size) for path, size in settings["disks"]],
        run=Path(settings["run"]),
        boot=settings["boot"],
        hash_key=b"k" * 32,
    )
    end_with_parent()
    await filler.run(stop, lambda: print("ready", flush=True))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
