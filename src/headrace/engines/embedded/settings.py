"""Settings of the engines for this machine, and the URLs of their unix sockets.

A socket address has at most 107 bytes (unix(7)). The servers bind a short relative path, because
they run inside the folder. Clients with a longer path use a descriptor of the folder.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from headrace.engines.endpoints import Endpoints

MIB: Final = 2**20
VALKEY_MEMORY_MIN_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and cores of this process."""

    memory_bytes: int
    cores: int


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine within the limits of this cgroup (v2, or memory of v1)."""
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
    """PostgreSQL's settings; without `durable` a power cut may destroy the data.

    Engines share the machine with the rest of Headrace, so PostgreSQL gets an eighth of the memory
    as buffers. Settings of ALTER SYSTEM take precedence.
    """
    memory_bytes = machine.memory_bytes
    settings = {
        "max_connections": "100",
        "shared_buffers": _clamp_mib(memory_bytes // 8, 32, 1024),
        "effective_cache_size": _clamp_mib(memory_bytes // 2, 64, 65536),
        "work_mem": _clamp_mib(memory_bytes // 400, 4, 64),
        "maintenance_work_mem": _clamp_mib(memory_bytes // 32, 16, 512),
        "max_wal_size": _clamp_mib(memory_bytes // 4, 256, 2048),
        "checkpoint_timeout": "5min",
        "wal_compression": "off",  # no lz4 in this build, and pglz costs more than it saves
        # A parallel query on all cores of a small machine would delay every other query.
        "max_parallel_workers_per_gather": str(min(2, machine.cores // 4)),
        "random_page_cost": "1.1",
        "jit": "off",
        "huge_pages": "off",
        "autovacuum_naptime": "5s",
        "autovacuum_vacuum_cost_limit": "2000",
        "idle_in_transaction_session_timeout": "60s",
        "client_connection_check_interval": "5s",
        "synchronous_commit": "on",
        # Shared memory as files of the folder: a kill leaves nothing in /dev/shm. Most requests
        # use the preallocated part, which is not a file.
        "dynamic_shared_memory_type": "mmap",
        "min_dynamic_shared_memory": "16MB",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_checkpoints": "off",
        "log_line_prefix": "%m [%p] %q%d %a ",
        # A failing statement may contain users' data, so only the error is logged.
        "log_min_error_statement": "panic",
        "cluster_name": "headrace",
        "hba_file": "pg_hba.conf",
        "ident_file": "pg_ident.conf",
    }
    if not durable:
        # Commits still reach the kernel, so only a power cut loses data.
        settings |= {"fsync": "off", "full_page_writes": "off"}
    return settings


def valkey_settings(machine: Machine, *, durable: bool) -> dict[str, str]:
    """Valkey's settings; full memory refuses writes and never evicts keys."""
    return {
        "maxmemory": str(max(VALKEY_MEMORY_MIN_BYTES, machine.memory_bytes // 4)),
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "appendfsync": "everysec" if durable else "no",
        "aof-load-truncated": "yes",
        "save": "",
        # The feed's sets of authors take 4 to 8 bytes per member instead of 40.
        "set-max-intset-entries": "131072",
        # The feed's posts of an author take 32 bytes instead of 79; longer lists slow down inserts.
        "zset-max-listpack-entries": "2048",
    }


ADDRESS_BYTES_MAX: Final = 107
POSTGRES_PORT: Final = 5432
POSTGRES_SOCKET: Final = f".s.PGSQL.{POSTGRES_PORT}"
VALKEY_SOCKET: Final = "valkey.sock"
_PLAIN: Final = re.compile(r"[A-Za-z0-9/._ +~=-]+")
_descriptors: Final[dict[str, int]] = {}
"""Open folders by path. Endpoints of every app with the same folder use the same descriptor."""


def reachable_folder(run: Path) -> str:
    """A path of `run` for socket addresses of this process, at most ADDRESS_BYTES_MAX long.

    A longer path, or one with characters that a URL of several hosts would split at, is opened
    (O_PATH) and reached through `/proc/self/fd/<n>/`. The descriptor stays open for the life of the
    process, because pools reconnect at any time.
    """
    text = str(run)
    if len(os.fsencode(run / POSTGRES_SOCKET)) <= ADDRESS_BYTES_MAX and _PLAIN.fullmatch(text):
        return text
    current = run.stat()
    known = _descriptors.get(text)
    if known is None or not os.path.samestat(os.fstat(known), current):
        # The old descriptor stays open: connections of the replaced folder may use it.
        known = _descriptors[text] = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{known}"


def endpoints_of(folder: Path) -> Endpoints:
    """The URLs, for this process, of the engines in the data folder `folder`."""
    run = reachable_folder(folder / "run")
    # Explicit port and TLS mode override PGPORT and PGSSLMODE of the environment.
    options = f"host={quote(run, safe='/')}&port={POSTGRES_PORT}&sslmode=disable"
    return Endpoints(
        postgres_url=f"postgresql://headrace@/headrace?{options}",
        valkey_url=f"unix://{quote(f'{run}/{VALKEY_SOCKET}', safe='/')}?db=0",
        blobs_url=(folder / "blobs").as_uri(),
    )
