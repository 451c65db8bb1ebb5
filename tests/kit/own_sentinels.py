"""Valkey servers with Sentinels, as most sites run them: a server and a Sentinel on each host.

    with sentinel_servers(folder, net) as servers:
        old = servers.primary()
        old.host.cut()
        servers.wait_primary(other_than=old)

On loopback (`net` None) the Sentinels use ports of their own. Only their timers are shorter than
in the docs.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from libvalkey import ReplyError
from tests.kit.hosts import Hosts
from tests.kit.processes import free_ports, wait_until
from tests.kit.stock_valkey import StockValkey, ask, program_of

NAME: Final = "main"
"""The name of the primary in all Sentinels."""
SENTINEL_PORT: Final = 26379
DOWN_AFTER_MS: Final = 2_000
QUICK: Final = ("info-period", "1000", "publish-period", "500")
"""How often Sentinels read the state of servers and find each other; 10 s and 2 s by default."""
SERVER: Final = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "maxmemory-policy": "noeviction",
    "set-max-intset-entries": "131072",
    "zset-max-listpack-entries": "2048",
    # As in docs/valkey-cluster.md: a primary that is cut off refuses writes.
    "min-replicas-to-write": "1",
    "min-replicas-max-lag": "2",
    "repl-diskless-sync-delay": "0",
}
SENTINEL: Final = """
port {port}
bind {ip}
dir {folder}
protected-mode no
{password}
sentinel monitor {name} {primary} {quorum}
sentinel down-after-milliseconds {name} {down_after_ms}
sentinel failover-timeout {name} 10000
{auth}
"""
HAPROXY: Final = """
defaults
  mode tcp
  timeout connect 2s
  timeout client 30m
  timeout server 30m
  timeout check 5s
listen valkey
  bind {address}:6379
  option tcp-check
  tcp-check connect
  tcp-check send PING\\r\\n
  tcp-check expect string +PONG
  tcp-check send info\\ replication\\r\\n
  tcp-check expect string role:master
  tcp-check send QUIT\\r\\n
  tcp-check expect string +OK
  default-server inter 1s fall 2 rise 2 on-marked-down shutdown-sessions
"""
"""As in docs/valkey-cluster.md."""


class Watched(StockValkey):
    """One server, and the Sentinel beside it."""

    def __init__(self, folder: Path, net: Hosts | None, password: str) -> None:
        auth = {"requirepass": password, "primaryauth": password} if password else {}
        super().__init__(folder, host=net.add(folder.name) if net else None, **{**SERVER, **auth})
        self.password = password
        self.sentinel_port = SENTINEL_PORT if net else free_ports(1)[0]

    @property
    def is_primary(self) -> bool:
        """Whether it serves as the primary."""
        role = self.command("ROLE")
        return isinstance(role, list) and role[0] == b"master"

    def command(self, *words: str | int) -> object:
        """See `StockValkey`."""
        return ask(self.ip, self.port, *words, password=self.password)

    def start_sentinel(self, primary: Watched, quorum: int) -> None:
        """Start the Sentinel, which finds the others through the primary."""
        file = self.folder / "sentinel.conf"
        text = SENTINEL.format(
            port=self.sentinel_port,
            ip=self.ip,
            folder=self.folder,
            name=NAME,
            primary=primary.address.replace(":", " "),
            quorum=quorum,
            down_after_ms=DOWN_AFTER_MS,
            password=f"requirepass {self.password}" if self.password else "",
            auth=f"sentinel auth-pass {NAME} {self.password}" if self.password else "",
        )
        file.write_text(text)
        self.run_sentinel()

    def run_sentinel(self) -> None:
        """Start the Sentinel with its own file."""
        words = (str(program_of("valkey9")), str(self.folder / "sentinel.conf"), "--sentinel")
        self.sentinel = self.run(*words, log=self.folder / "sentinel.log")
        wait_until(lambda: self.sentinel_says("PING") == b"PONG", what="the Sentinel answers")
        reply = self.sentinel_says("SENTINEL", "DEBUG", *QUICK)
        assert reply == b"OK", reply

    def sentinel_says(self, *words: str) -> object:
        """The reply of its Sentinel."""
        return ask(self.ip, self.sentinel_port, *words, timeout_s=1, password=self.password)

    def fail(self) -> None:
        """SIGKILL to the server and its Sentinel, as a host that loses power."""
        self.kill()
        self.sentinel.kill()
        self.sentinel.wait()

    def end(self) -> None:
        """See `StockValkey`."""
        super().end()
        sentinel = getattr(self, "sentinel", None)
        if sentinel is not None:
            sentinel.kill()
            sentinel.wait()


class SentinelServers:
    """The servers; `primaries` has the name that `OwnCluster` uses."""

    def __init__(self, folder: Path, net: Hosts | None, count: int, password: str) -> None:
        self._folder, self._net, self._password = folder, net, password
        self.servers = [Watched(folder / f"kv{n}", net, password) for n in range(count)]

    @property
    def url(self) -> str:
        """For clients: the Sentinels, not the servers."""
        seeds = ",".join(f"{one.ip}:{one.sentinel_port}" for one in self.servers)
        if self._password:
            text = self._password
            return f"valkey://:{text}@{seeds}/0?sentinel={NAME}&sentinel_password={text}"
        return f"valkey://{seeds}?sentinel={NAME}"

    def start(self) -> None:
        """Start all, and wait until each Sentinel has found all others."""
        first, *others = self.servers
        first.start()
        for other in others:
            other.start("--replicaof", first.ip, str(first.port))
        for server in self.servers:
            server.start_sentinel(first, len(self.servers) // 2 + 1)
        wait_until(self.is_whole, what="all Sentinels know all servers")

    def is_whole(self) -> bool:
        """Whether all Sentinels agree on one primary with all others as its replicas."""
        count = len(self.servers)
        states = [self._state(one) for one in self.servers]
        return (
            all(
                state.get("flags") == "master"
                and state["num-slaves"] == state["num-other-sentinels"] == str(count - 1)
                and state["ip"] == states[0]["ip"]
                for state in states
            )
            and self.replicas_of(self.primary()) == count - 1
        )

    def _state(self, server: Watched) -> dict[str, str]:
        found = server.sentinel_says("SENTINEL", "MASTER", NAME)
        if not isinstance(found, list):
            return {}
        words = [word.decode() for word in found]
        return dict(zip(words[::2], words[1::2], strict=True))

    def replicas_of(self, server: Watched) -> int:
        """How many replicas follow a server and have what it has."""
        info = server.command("INFO", "replication")
        return info.count(b"state=online") if isinstance(info, bytes) else 0

    def primary(self) -> Watched:
        """The primary, according to the first Sentinel that responds."""
        for asked in self.servers:
            found = asked.sentinel_says("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
            if isinstance(found, list):
                ip, port = found[0].decode(), int(found[1])
                return next(one for one in self.servers if (one.ip, one.port) == (ip, port))
        raise AssertionError("no Sentinel responds")

    def wait_primary(self, other_than: Watched) -> tuple[Watched, float]:
        """Wait for another primary; return it and the monotonic time at which it was found."""
        others = [one for one in self.servers if one is not other_than]
        wait_until(lambda: any(one.is_primary for one in others), what="a primary")
        found_s = time.monotonic()
        return next(one for one in others if one.is_primary), found_s

    def switch_over(self) -> None:
        """Request a failover without a failure."""
        reply = self.servers[0].sentinel_says("SENTINEL", "FAILOVER", NAME)
        assert not isinstance(reply, ReplyError), reply

    def start_haproxy(self) -> str:
        """Start HAProxy on a host of its own; return its URL when it leads to the primary alone."""
        assert self._net is not None
        host = self._net.add("proxy")
        rows = [f"  server {one.folder.name} {one.address} check" for one in self.servers]
        file = self._folder / "haproxy.cfg"
        file.write_text("\n".join([HAPROXY.format(address=host.address), *rows, ""]))
        proxy = StockValkey(self._folder / "proxy", host=host)
        words = (str(shutil.which("haproxy")), "-db", "-f", str(file))
        proxy.run(*words, log=self._folder / "haproxy.log")

        def leads_to_primaries() -> bool:
            # It regards all servers as healthy until their first checks.
            roles = [proxy.command("ROLE") for _ in range(6)]
            return all(isinstance(role, list) and role[0] == b"master" for role in roles)

        wait_until(leads_to_primaries, what="HAProxy leads to the primary")
        return proxy.url

    def end(self) -> None:
        """End what runs."""
        for server in self.servers:
            server.end()


@contextmanager
def sentinel_servers(
    folder: Path, net: Hosts | None = None, *, count: int = 3, password: str = ""
) -> Iterator[SentinelServers]:
    """Servers of which the first is the primary, and a Sentinel beside each."""
    servers = SentinelServers(folder, net, count, password)
    try:
        servers.start()
        yield servers
    finally:
        servers.end()
