"""What a figure was measured on: machine, versions, commit, load. A figure without these is a
rumour.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SYNC_PROBES = 15


def read_machine_facts() -> dict[str, Any]:
    """Cores, CPU, memory, kernel, Python and the load before the run."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def sync_us(folder: Path) -> float:
    """Microseconds to write 8 KiB through to the disk of `folder`, the median: a commit's floor."""
    path = folder / "sync-probe"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    took_s = []
    try:
        for _ in range(SYNC_PROBES):
            os.pwrite(file, b"x" * 8192, 0)
            began_s = time.perf_counter()
            os.fdatasync(file)
            took_s.append(time.perf_counter() - began_s)
    finally:
        os.close(file)
        path.unlink()
    return statistics.median(took_s) * 1e6


def read_commit() -> str:
    """The commit of the code, marked where files other than records differ from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return f"{commit}+changes" if changed else commit


def now_text() -> str:
    """This moment in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def own_versions() -> dict[str, str]:
    """Versions of what runs in our own environment."""
    return {name: version(name) for name in ("headrace", "asyncpg", "uvloop", "msgspec")}


def versions_of(python: Path, packages: list[str]) -> dict[str, str]:
    """Versions of `packages` in the environment of `python`, without those that are missing."""
    code = (
        "import sys\nfrom importlib.metadata import version, PackageNotFoundError\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, version(n))\n"
        "    except PackageNotFoundError: pass\n"
    )
    out = subprocess.run(
        [str(python), "-c", code, *packages],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    ).stdout
    return dict(line.split() for line in out.splitlines())


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip()
