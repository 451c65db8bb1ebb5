"""A file lock that allows one agent per host name and outlives a dead agent.

The agent, its zygote and every slot hold the lock by inheritance. When another process gets it, no
handler of the former agent runs any more. The new agent can then return the leases at once instead
of waiting for their expiry. It waits for an agent that is ending because its supervisor was killed.
Hanging slots are killed after KILL_AFTER_S by the pids that the file records, with their start
times, because pids are reused. A child process of a handler may hold the lock for longer: the new
agent then continues after the lease time, with a warning.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from headrace.engines.children import end_group
from headrace.jobs.errors import AgentRuns
from headrace.kernel.logs import logger

KILL_AFTER_S: Final = 3.0
ENDING_S_MAX: Final = 15.0
"""Longest wait for an agent whose supervisor was killed: it gets 10 s for its running jobs."""
POLL_EVERY_S: Final = 0.02
_log: Final = logger(__name__)


class LockRecord(msgspec.Struct, kw_only=True):
    """The content of the file: the processes of the lock's holder, as (pid, start time)."""

    agent: tuple[int, int] = (0, 0)
    parent: tuple[int, int] = (0, 0)
    """Its supervisor; without it the agent ends, after its running jobs or a grace period."""
    host_ids: list[int] = []
    """Host rows that own its leases."""
    slots: list[tuple[int, int]] = []


class HostLock:
    """The lock of one host name in a data folder. Created by `take`."""

    def __init__(self, descriptor: int, former: LockRecord) -> None:
        self.descriptor = descriptor
        self.former = former
        """The record of the former agent."""
        self._record = LockRecord(
            agent=(os.getpid(), start_time(os.getpid())),
            parent=(os.getppid(), start_time(os.getppid())),
        )
        self._write()

    @classmethod
    async def take(cls, folder: Path, name: str, *, wait_max_s: float) -> HostLock:
        """Wait until no process of a former agent runs. Raises: AgentRuns."""
        path = folder / f"{file_name(name)}.lock"
        began_s = agent_ended_s = time.monotonic()
        descriptor = _open(path)
        has_killed = False
        while not _try_lock(descriptor):
            record = _read(descriptor)
            if record.agent[0] != os.getpid() and is_running(*record.agent):
                is_ending = record.parent != (0, 0) and not is_running(*record.parent)
                if not is_ending or time.monotonic() - began_s > ENDING_S_MAX:
                    os.close(descriptor)
                    raise AgentRuns(name, f"as process {record.agent[0]}")
                agent_ended_s = time.monotonic()
            waited_s = time.monotonic() - agent_ended_s
            if waited_s > KILL_AFTER_S and not has_killed:
                has_killed = True
                _kill(record.slots)
            if waited_s > wait_max_s:
                _log.warning("former_slots_not_gone", name=name, waited_s=round(waited_s, 1))
                return cls(_replaced(path, descriptor), record)
            await asyncio.sleep(POLL_EVERY_S)
        return cls(descriptor, _read(descriptor))

    def note_host(self, host_id: int) -> None:
        """Record that this host row owns leases too."""
        self._record.host_ids.append(host_id)
        self._write()

    def note_slots(self, pids: Iterable[int]) -> None:
        """Record the slots that run now."""
        self._record.slots = [(pid, start_time(pid)) for pid in pids]
        self._write()

    def release(self) -> None:
        """Release the lock after an orderly end: no lease and no slot is left."""
        self._record = LockRecord()
        self._write()
        os.close(self.descriptor)

    def _write(self) -> None:
        data = msgspec.json.encode(self._record)
        os.pwrite(self.descriptor, data, 0)
        os.ftruncate(self.descriptor, len(data))


def file_name(host: str) -> str:
    """A file name for a host name, without characters that file names must not have."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", host)[:64]
    return plain if plain == host else f"{plain}-{hashlib.sha256(host.encode()).hexdigest()[:8]}"


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    """Whether the process with this pid and start time runs."""
    return pid > 0 and started > 0 and start_time(pid) == started


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(descriptor: int) -> LockRecord:
    try:
        return msgspec.json.decode(os.pread(descriptor, 1 << 20, 0), type=LockRecord)
    except msgspec.DecodeError:
        return LockRecord()


def _kill(slots: Iterable[tuple[int, int]]) -> None:
    for pid, started in slots:
        if is_running(pid, started):
            _log.warning("former_slot_killed", pid=pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            end_group(pid)


def _replaced(path: Path, descriptor: int) -> int:
    """Replace the file by a new, locked one; the old file keeps its holders."""
    os.close(descriptor)
    path.unlink(missing_ok=True)
    fresh = _open(path)
    fcntl.flock(fresh, fcntl.LOCK_EX)
    return fresh
