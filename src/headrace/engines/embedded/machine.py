"""Settings of the engines for this machine: memory within the cgroup's limit, and cores.

Small on purpose: the engines share the machine with everything else Headrace runs, so PostgreSQL gets an
eighth of the memory for its own buffers and counts on half of it being page cache. What a user sets with
ALTER SYSTEM wins over all of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 2**20
VALKEY_MEMORY_MIN_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use."""

    memory_bytes: int
    cores: int


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine as the kernel tells it, within our cgroup's limits (v2, or v1's memory)."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for limit in _cgroup_memory_limits(root) if limit > 0]
    return Machine(min([memory_bytes, *limits]), len(os.sched_getaffinity(0)))


def _cgroup_memory_limits(root: Path) -> list[int]:
    mount = root / "sys/fs/cgroup"
    files = [mount / "memory/memory.limit_in_bytes"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            group = mount / line[3:].strip("/")
            files += [folder / "memory.max" for folder in (group, *group.parents)]
    return [int(text) for text in map(_read, files) if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _clamp_mib(size_bytes: int, low_mib: int, high_mib: int) -> str:
    return f"{max(low_mib, min(high_mib, size_bytes // MIB))}MB"


def postgres_settings(machine: Machine, *, durable: bool) -> dict[str, str]:
    """PostgreSQL's settings for `machine`; without `durable` a power cut may destroy the data."""
    memory_bytes = machine.memory_bytes
    settings = {
        "max_connections": "100",
        "shared_buffers": _clamp_mib(memory_bytes // 8, 32, 1024),
        "effective_cache_size": _clamp_mib(memory_bytes // 2, 64, 65536),
        "work_mem": _clamp_mib(memory_bytes // 400, 4, 64),
        "maintenance_work_mem": _clamp_mib(memory_bytes // 32, 16, 512),
        "max_wal_size": _clamp_mib(memory_bytes // 4, 256, 2048),
        "checkpoint_timeout": "5min",
        "wal_compression": "off",  # this build has no lz4, and pglz costs more than it saves here
        # One long read on two cores of two holds up every hit and page: the more cores, the more it may have.
        "max_parallel_workers_per_gather": str(min(2, machine.cores // 4)),
        "random_page_cost": "1.1",
        "jit": "off",
        "huge_pages": "off",
        "autovacuum_naptime": "5s",
        "autovacuum_vacuum_cost_limit": "2000",
        "idle_in_transaction_session_timeout": "60s",
        "client_connection_check_interval": "5s",
        "synchronous_commit": "on",
        # Shared memory inside the folder: nothing of ours stays in /dev/shm after a kill. Most requests
        # are served from the preallocated part, which is no file at all.
        "dynamic_shared_memory_type": "mmap",
        "min_dynamic_shared_memory": "16MB",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] %q%d %a ",
        # The text of a failing statement may hold a user's data; the error alone is logged.
        "log_min_error_statement": "panic",
        "cluster_name": "headrace",
        "hba_file": "pg_hba.conf",
        "ident_file": "pg_ident.conf",
    }
    if not durable:
        # Commits still reach the kernel, so a killed process loses none: only a power cut does.
        settings |= {"fsync": "off", "full_page_writes": "off"}
    return settings


def valkey_settings(machine: Machine, *, durable: bool) -> dict[str, str]:
    """Valkey's settings for `machine`: a full memory refuses writes, and never drops what was kept."""
    return {
        "maxmemory": str(max(VALKEY_MEMORY_MIN_BYTES, machine.memory_bytes // 4)),
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec" if durable else "no",
        "aof-load-truncated": "yes",
        "save": "",
        # The feed's sets of authors: 4 to 8 bytes a member instead of 40 (its index: 46 bytes a post instead of 138).
        "set-max-intset-entries": "131072",
        # Its posts of one author: 32 bytes each instead of 79. Longer, a post of theirs takes too long to put.
        "zset-max-listpack-entries": "2048",
    }
