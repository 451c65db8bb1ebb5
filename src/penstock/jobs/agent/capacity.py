"""How many slots a host can hold: by its memory, measured and not guessed, by its cores, and by its load.

    memory:  (free within the cgroup's limit + sum of the slots' PSS - reserve) / mean PSS of a slot

PSS, since slots share most of their heap with the zygote: RSS would count it once a slot. Reading it costs 2 ms a slot of
100 MB, so a few slots a second are read in turns and the last reading stands for each. A new slot is small and grows
until it is recycled, so the mean is never taken as less than SLOT_BYTES_MIN.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.jobs.fleet.facts import LOAD_PER_CORE_MAX

SLOT_BYTES_MIN: Final = 16 * 2**20
_UNLIMITED_BYTES: Final = 2**60


@dataclass(frozen=True, slots=True)
class HostState:
    """What was measured."""

    free_bytes: int
    pss_bytes: Mapping[int, int]
    """By slot, of those read so far."""
    slots: int
    """That run now."""
    cores: int
    load_per_core: float


def slots_that_fit(
    state: HostState, *, reserve_bytes: int, slots_per_core: int, floats: int
) -> int:
    """How many slots this host can hold, at least one; load keeps it from more than `floats` new ones."""
    read = state.pss_bytes.values()
    mean_bytes = max(SLOT_BYTES_MIN, sum(read) // len(read) if read else 0)
    taken_bytes = sum(read)
    by_memory = (state.free_bytes + taken_bytes - reserve_bytes) // mean_bytes
    # Slots that were not read yet have taken their memory already.
    by_memory += max(0, state.slots - len(read))
    fit = min(by_memory, state.cores * slots_per_core)
    if state.load_per_core > LOAD_PER_CORE_MAX:
        fit = min(fit, max(state.slots, floats))
    return max(1, fit)


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that this process's group and machine can still give."""
    free = _meminfo_bytes(root, "MemAvailable")
    for folder, limit_name, used_name in _memory_groups(root):
        limit = _number(folder / limit_name)
        used = _number(folder / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
            # Page cache counts as used there and is given back when asked for.
            free = min(free, limit - used + _inactive_file_bytes(folder))
    return max(0, free)


def pss_bytes(pid: int) -> int | None:
    """A process's proportional share of memory; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    lines = (line.split() for line in text.splitlines() if line.startswith("Pss:"))
    return next((int(words[1]) * 1024 for words in lines), None)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load_per_core() -> float:
    """Load average of the last minute over the cores."""
    return os.getloadavg()[0] / cores()


def _memory_groups(root: Path) -> list[tuple[Path, str, str]]:
    """Folders of this process's memory groups from the inside out, with their files' names."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        found += [
            (each, limit, used)
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
