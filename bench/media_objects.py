"""Tracks with bytes that prove themselves, the generator that checks them, and the machine's limit.

No server on this machine exceeds that limit. Byte i of track n is a function of both (`word` in
native/media_load.c is the same function). The two C programs are compiled on first use.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.children import BenchFault

NATIVE = Path(__file__).parent / "native"
TRACK_BYTES = 5 * 2**20
_MIXED = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


@dataclass(frozen=True)
class Track:
    """One stored object."""

    number: int
    key: str
    size_bytes: int = TRACK_BYTES


def content(number: int, size_bytes: int) -> bytes:
    """The bytes of track `number`."""
    with np.errstate(over="ignore"):
        words = np.arange(-(-size_bytes // 8), dtype=np.uint64)
        words = ((np.uint64(number) << np.uint64(40)) ^ words) * _MIXED[0]
        words = (words ^ (words >> np.uint64(29))) * _MIXED[1]
        words ^= words >> np.uint64(32)
    return words.astype("<u8").tobytes()[:size_bytes]


def make_tracks(
    folder: Path, count: int, *, size_bytes: int = TRACK_BYTES, first: int = 0
) -> list[Track]:
    """Write `count` tracks into the object store in `folder`, as plain files of their keys."""
    numbers = range(first, first + count)
    tracks = [Track(number, f"tracks/{number:05}.mp3", size_bytes) for number in numbers]
    (folder / "tracks").mkdir(parents=True, exist_ok=True)
    for track in tracks:
        (folder / track.key).write_bytes(content(track.number, track.size_bytes))
    return tracks


def write_targets(file: Path, tracks: Sequence[Track], targets: Sequence[str]) -> Path:
    """What the generator reads: number, size and target of each track."""
    rows = zip(tracks, targets, strict=True)
    file.write_text(
        "".join(f"{track.number} {track.size_bytes} {target}\n" for track, target in rows)
    )
    return file


def native_program(name: str, folder: Path) -> Path:
    """The C program `name`, compiled into `folder`. Raises: BenchFault without a compiler."""
    program = folder / name
    if program.exists():
        return program
    compiler = shutil.which("cc")
    if compiler is None:
        raise BenchFault("no C compiler is installed (Debian: apt-get install gcc libc6-dev)")
    source = NATIVE / f"{name}.c"
    libraries = ["-lm", "-l:libssl.so.3", "-l:libcrypto.so.3"]
    made = subprocess.run(
        [compiler, "-O2", "-Wall", "-Wextra", "-o", str(program), str(source), *libraries],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if made.returncode != 0:
        raise BenchFault(f"{source.name} was not compiled: {made.stderr[-1500:]}")
    return program
