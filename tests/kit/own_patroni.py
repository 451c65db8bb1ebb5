"""Three PostgreSQL servers under Patroni, each on a host of its own with a member of etcd.

    cluster = PatroniCluster(folder, net)
    await cluster.start()
    cluster.primary().host.kill()
    await cluster.wait_primary(other_than=...)

The configuration is what Patroni's documentation gives for synchronous replication; only its
timers are shorter. Patroni is that of this Python environment, not the machine's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
import httpx
import yaml
from tests.kit.hosts import Host, Hosts
from tests.kit.own_postgres import SERVERS, missing_server, run_statements
from tests.kit.waiting import wait_true

from headrace.engines import launcher
from headrace.engines.embedded.identity import Identity, choose_identity, give_folder
from headrace.engines.embedded.process import ENGINE_ENVIRONMENT

VERSION: Final = "15"
PATRONI: Final = Path(sys.executable).with_name("patroni")
REST_PORT, POSTGRES_PORT = 8008, 5432
TIMERS: Final = {"ttl": 10, "loop_wait": 1, "retry_timeout": 3}
"""Patroni's defaults are 30, 10 and 10: a dead primary is replaced up to 20 s later."""

HAPROXY: Final = """
defaults
  mode tcp
  timeout connect 2s
  timeout client 30m
  timeout server 30m
  timeout check 5s
listen postgres
  bind {address}:5432
  option httpchk OPTIONS /primary
  http-check expect status 200
  default-server inter 1s fall 2 rise 1 on-marked-down shutdown-sessions
"""
"""As in docs/postgres-failover.md."""


def missing_parts() -> str | None:
    """What the servers need and this machine lacks; None: nothing."""
    lacks = [name for name in ("etcd", "haproxy") if shutil.which(name) is None]
    if lacks:
        return f"no {', '.join(lacks)}: apt install etcd-server haproxy"
    return missing_server(VERSION)


@dataclass(slots=True)
class Member:
    """One host with PostgreSQL, Patroni and etcd."""

    name: str
    host: Host
    folder: Path
    identity: Identity
    processes: list[subprocess.Popen]

    @property
    def rest(self) -> str:
        """The URL of Patroni's REST API."""
        return f"http://{self.host.address}:{REST_PORT}"

    @contextmanager
    def frozen_postgres(self) -> Iterator[None]:
        """PostgreSQL of this host receives and confirms nothing inside the block."""
        pids = [pid for pid in self.host.pids() if _name(pid) == "postgres"]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    @property
    def demotions(self) -> int:
        """How often Patroni demoted this server because it did not reach etcd."""
        return (self.folder / "patroni.log").read_text().count("demoted self because DCS")

    @property
    def is_primary(self) -> bool:
        """Whether Patroni reports a running primary with its lock."""
        return self.answers("primary")

    def answers(self, check: str) -> bool:
        """Whether a health check of Patroni succeeds, as for HAProxy."""
        try:
            return httpx.get(f"{self.rest}/{check}", timeout=1, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def run(self, *command: str) -> None:
        """Start a program of this host, bound to the end of this process."""
        bound = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
        bound += [str(int(signal.SIGKILL)), self.identity.launch, "--"]
        with (self.folder / f"{Path(command[0]).name}.log").open("ab") as log:
            started = subprocess.Popen(
                [*self.host.inside, *bound, *command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env={**ENGINE_ENVIRONMENT, "HOME": str(self.folder)},
            )
        self.processes.append(started)

    def kill(self) -> None:
        """Kill PostgreSQL, Patroni and etcd of this host, as a power cut does."""
        self.host.kill()
        for process in self.processes:
            process.wait(10)
        self.processes.clear()


async def _leads_to_primaries(url: str) -> bool:
    """Whether a connection in turn for each server reaches a primary."""
    try:
        found = [await run_statements(url, "SELECT pg_is_in_recovery()") for _ in range(6)]
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    return not any(rows[0][0] for rows in found)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


class PatroniCluster:
    """Three members, of which Patroni keeps one as a synchronous standby."""

    def __init__(self, folder: Path, net: Hosts) -> None:
        self.folder, self._net = folder, net
        self.members: list[Member] = []

    @property
    def url(self) -> str:
        """All servers, of which clients use the writable one."""
        hosts = ",".join(f"{member.host.address}:{POSTGRES_PORT}" for member in self.members)
        return f"postgresql://headrace@{hosts}/postgres?target_session_attrs=read-write"

    async def start(self) -> None:
        """Start all and wait for a primary with a synchronous standby."""
        for number in range(3):
            folder = self.folder / f"db{number}"
            folder.mkdir(parents=True)
            (folder / "run").mkdir()
            identity = await choose_identity(folder, SERVERS["18"] / "postgres")
            member = Member(f"db{number}", self._net.add(f"db{number}"), folder, identity, [])
            self.members.append(member)
            for name in ("etcd", "data"):
                (folder / name).mkdir(mode=0o700)
                if identity.owner is not None:
                    give_folder(folder, folder / name, identity.owner)
                    os.chown(folder, *identity.owner)
        for member in self.members:
            (member.folder / "patroni.yml").write_text(yaml.safe_dump(self._settings(member)))
            self.start_member(member)
        await self.wait_primary()
        await wait_true(self.is_whole, what="two standbys, one of them synchronous")

    def start_member(self, member: Member) -> None:
        """Start etcd and Patroni of a host."""
        own = member.host.address
        peers = ",".join(f"{one.name}=http://{one.host.address}:2380" for one in self.members)
        member.run(
            str(shutil.which("etcd")),
            *("--name", member.name, "--data-dir", str(member.folder / "etcd")),
            *("--listen-client-urls", f"http://{own}:2379"),
            *("--advertise-client-urls", f"http://{own}:2379"),
            *("--listen-peer-urls", f"http://{own}:2380"),
            *("--initial-advertise-peer-urls", f"http://{own}:2380"),
            # Without it a member that was cut off forces an election when it returns.
            *("--initial-cluster", peers, "--pre-vote", "--unsafe-no-fsync"),
        )
        member.run(str(PATRONI), str(member.folder / "patroni.yml"))

    async def start_haproxy(self) -> str:
        """Start HAProxy on a host of its own; return its URL when it leads to the primary alone."""
        host = self._net.add("proxy")
        servers = [
            f"  server {one.name} {one.host.address}:{POSTGRES_PORT} check port {REST_PORT}"
            for one in self.members
        ]
        file = self.folder / "haproxy.cfg"
        file.write_text("\n".join([HAPROXY.format(address=host.address), *servers, ""]))
        bound = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
        bound += [str(int(signal.SIGKILL)), "same", "--"]
        with (self.folder / "haproxy.log").open("ab") as log:
            subprocess.Popen(
                [*host.inside, *bound, str(shutil.which("haproxy")), "-db", "-f", str(file)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        url = f"postgresql://headrace@{host.address}:{POSTGRES_PORT}/postgres"
        # It regards all servers as healthy until their first checks.
        await wait_true(lambda: _leads_to_primaries(url), what="HAProxy leads to the primary")
        return url

    def primary(self) -> Member:
        """The member that is the primary now."""
        [found] = [member for member in self.members if member.is_primary]
        return found

    def synchronous_standby(self) -> Member:
        """The member whose confirmation each commit waits for."""
        [found] = [member for member in self.members if member.answers("synchronous")]
        return found

    def is_whole(self) -> bool:
        """Whether all members run, and one of the standbys is synchronous."""
        for member in self.members:
            ended = [process.args for process in member.processes if process.poll() is not None]
            assert ended == [], f"{member.name}: {ended}"
        kinds = [[one.answers(kind) for one in self.members] for kind in ("replica", "synchronous")]
        return [sum(kind) for kind in kinds] == [2, 1]

    async def wait_primary(self, other_than: Member | None = None) -> tuple[Member, float]:
        """Wait for a primary; return it and the monotonic time at which it was found."""
        others = [member for member in self.members if member is not other_than]

        def found() -> Member | None:
            return next((member for member in others if member.is_primary), None)

        primary = await wait_true(found, what="a primary")
        return primary, time.monotonic()

    async def switch_over(self) -> Member:
        """Move the primary to the synchronous standby, as `patronictl switchover` does."""
        old, new = self.primary(), self.synchronous_standby()
        body = {"leader": old.name, "candidate": new.name}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.post(f"{old.rest}/switchover", json=body)
        assert answer.status_code == 200, answer.text
        return new

    def _settings(self, member: Member) -> dict[str, Any]:
        own = member.host.address
        etcd = ",".join(f"{one.host.address}:2379" for one in self.members)
        parameters = {
            "fsync": "off",
            "max_connections": 200,
            "wal_keep_size": "256MB",
            # The shutdown of a primary waits for standbys that it cannot reach; 60 s by default.
            "wal_sender_timeout": "20s",
            # The cleanup of another run may remove a segment of shared memory that is new.
            "dynamic_shared_memory_type": "mmap",
        }
        return {
            "scope": "site",
            "name": member.name,
            "restapi": {"listen": f"{own}:{REST_PORT}", "connect_address": f"{own}:{REST_PORT}"},
            "etcd3": {"hosts": etcd},
            "bootstrap": {
                "dcs": {
                    **TIMERS,
                    "synchronous_mode": True,
                    "synchronous_mode_strict": True,
                    "postgresql": {"use_pg_rewind": True, "parameters": parameters},
                },
                "initdb": [
                    {"encoding": "UTF8"},
                    {"locale": "C.UTF-8"},
                    "data-checksums",
                    "no-sync",
                ],
            },
            "postgresql": {
                "listen": f"{own}:{POSTGRES_PORT}",
                "connect_address": f"{own}:{POSTGRES_PORT}",
                "data_dir": str(member.folder / "data"),
                "bin_dir": str(SERVERS[VERSION]),
                "pgpass": str(member.folder / "pgpass"),
                "pg_hba": [
                    "local all all trust",
                    "host all all all trust",
                    "host replication all all trust",
                ],
                "parameters": {"unix_socket_directories": str(member.folder / "run")},
                "authentication": {
                    "superuser": {"username": "headrace"},
                    "replication": {"username": "replicator"},
                    "rewind": {"username": "headrace"},
                },
            },
        }
