"""The capacity of a host in slots, from its measured memory and its cores; and its CPU pressure.

    memory:  (free within the cgroup's limit + sum of the slots' PSS - reserve) / mean PSS of a slot

PSS, because slots share most of their heap with the zygote, which RSS would count once per slot.
Reading it is slow, so a few slots are read per second, in turns, and each keeps its last reading.
A new slot is small and grows until it is recycled, so the mean is at least SLOT_BYTES_MIN.

Cores are those of the CPU set, or the CPU quota of the control group if that is less. Pressure
stall information (PSI) of the group, else of the machine, measures how long processes wait for a
core. It counts only while the slots use at least half of the cores, because slots that wait for
the network do not cause it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

SLOT_BYTES_MIN: Final = 16 * 2**20
_UNLIMITED_BYTES: Final = 2**60


def slots_that_fit(
    free_bytes: int, pss_bytes: Collection[int], *, slots: int, slots_max: int, reserve_bytes: int
) -> int:
    """The number of slots that this host can hold, from one to `slots_max`.

    `slots` run now; `pss_bytes` has the readings of those read so far.
    """
    taken_bytes = sum(pss_bytes)
    mean_bytes = max(SLOT_BYTES_MIN, taken_bytes // len(pss_bytes) if pss_bytes else 0)
    by_memory = (free_bytes + taken_bytes - reserve_bytes) // mean_bytes
    # Slots without a reading have taken their memory already.
    by_memory += max(0, slots - len(pss_bytes))
    return max(1, min(by_memory, slots_max))


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that is available within this process's control group and machine."""
    free = _meminfo_bytes(root, "MemAvailable")
    for folder, limit_name, used_name in _memory_groups(root):
        limit = _number(folder / limit_name)
        used = _number(folder / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
            # Page cache counts as used there, but is reclaimed on demand.
            free = min(free, limit - used + _inactive_file_bytes(folder))
    return max(0, free)


def pss_bytes(pid: int) -> int | None:
    """A process's proportional share of memory; None if it has exited."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    lines = (line.split() for line in text.splitlines() if line.startswith("Pss:"))
    return next((int(words[1]) * 1024 for words in lines), None)


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may use, by its CPU set and the quotas of its control groups."""
    quotas = [
        quota
        for folder, is_unified in _groups(root, "cpu")
        if (quota := _cpu_quota(folder, is_unified=is_unified)) is not None
    ]
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *quotas])))


def cpu_pressure(root: Path = Path("/")) -> float:
    """Share of the last minute in which some process of the group, or machine, waited for a core.

    0 if the kernel does not measure it.
    """
    files = [folder / "cpu.pressure" for folder, is_unified in _groups(root, "cpu") if is_unified]
    for file in (*files[:1], root / "proc/pressure/cpu"):
        try:
            line = next(line for line in file.read_text().splitlines() if line.startswith("some"))
            return float(dict(word.split("=") for word in line.split()[1:])["avg60"]) / 100
        except (OSError, StopIteration, KeyError, ValueError):
            continue
    return 0.0


class SlotCpu:
    """The number of cores that the slots used since the last call."""

    def __init__(self) -> None:
        self._used_s: dict[int, float] = {}
        self._read_s = time.monotonic()

    def cores_used(self, pids: Iterable[int]) -> float:
        """CPU time of the processes divided by the time since the last call."""
        now_s, read_s = time.monotonic(), self._read_s
        used_s = {pid: seconds for pid in pids if (seconds := _cpu_s(pid)) is not None}
        grown_s = sum(seconds - self._used_s.get(pid, 0.0) for pid, seconds in used_s.items())
        self._used_s, self._read_s = used_s, now_s
        return grown_s / max(now_s - read_s, 0.001)


def _cpu_s(pid: int) -> float | None:
    """CPU time of a process; None if it has exited."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def load_per_core() -> float:
    """Load average of the last minute per core."""
    return os.getloadavg()[0] / cores()


def _memory_groups(root: Path) -> list[tuple[Path, str, str]]:
    """Folders of this process's memory groups, innermost first, with their file names."""
    unified = ("memory.max", "memory.current")
    former = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return [
        (folder, *(unified if is_unified else former))
        for folder, is_unified in _groups(root, "memory")
    ]


def _cpu_quota(folder: Path, *, is_unified: bool) -> float | None:
    """Cores that a control group may use; None: unlimited."""
    try:
        if is_unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):
        # No such file, or `max`.
        return None


def _groups(root: Path, controller: str) -> list[tuple[Path, bool]]:
    """Folders of this process's control groups, innermost first, and whether each is unified."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / path.strip("/")
        found += [
            (each, not controllers)
            for each in (folder, *folder.parents)
            if base in (each, *each.parents)
        ]
    return found


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    names = ("inactive_file", "total_inactive_file")
    found = [int(line.split()[1]) for line in lines if line.split()[0] in names]
    return max(found, default=0)


def _meminfo_bytes(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
