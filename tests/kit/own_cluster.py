"""A Valkey Cluster for one test: real primaries on loopback or on hosts, and replicas.

Nodes can be killed, emptied and started again, and hash slots moved under traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.kit.hosts import Host, Hosts
from tests.kit.processes import free_ports, wait_until
from tests.kit.stock_valkey import StockValkey

from headrace.engines.valkey import SLOTS, hash_slot


class Primary(StockValkey):
    """One node of a cluster with its folder and ports."""

    def __init__(self, folder: Path, host: Host | None = None) -> None:
        [self.bus_port] = free_ports(1)
        super().__init__(
            folder,
            host=host,
            **{
                "cluster-port": str(self.bus_port),
                "cluster-announce-ip": host.address if host else "",
                "cluster-enabled": "yes",
                "cluster-node-timeout": "1000",
                "cluster-require-full-coverage": "no",
                "appendonly": "yes",
                "appendfsync": "no",
                "save": "",
                "maxmemory-policy": "noeviction",
                "set-max-intset-entries": "131072",
                "zset-max-listpack-entries": "2048",
            },
        )
        self.ask = self.command

    @property
    def primary_address(self) -> str | None:
        """The node that it follows; None for a primary or without an answer."""
        found = self.ask("ROLE")
        if not isinstance(found, list) or found[0] != b"slave":
            return None
        return f"{found[1].decode()}:{found[2]}"

    @property
    def has_all(self) -> bool:
        """Whether it is a replica that received what its primary has."""
        found = self.ask("ROLE")
        return isinstance(found, list) and found[0] == b"slave" and found[3] == b"connected"

    def is_serving(self) -> bool:
        """Whether it serves the keys that it has."""
        info = self.ask("CLUSTER", "INFO")
        return isinstance(info, bytes) and b"cluster_state:ok" in info

    def empty(self) -> None:
        """Remove its data, while it is killed; it stays the node that it was."""
        for file in (self.folder / "appendonlydir").glob("*"):
            file.unlink()


class OwnCluster:
    """Some primaries, each with an equal part of the hash slots."""

    def __init__(self, folder: Path, primaries: int = 3, net: Hosts | None = None) -> None:
        self._folder, self._net = folder, net
        self.primaries = [self._make(f"n{number}") for number in range(primaries)]
        self.replicas: list[Primary] = []

    def _make(self, name: str) -> Primary:
        return Primary(self._folder / name, self._net.add(name) if self._net else None)

    @property
    def nodes(self) -> list[Primary]:
        """All of them."""
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        """Of the first one; clients find the others."""
        return f"valkey://{self.primaries[0].address}"

    def start(self) -> None:
        """Start all of them, and wait until each serves its part."""
        first, *others = self.primaries
        for number, primary in enumerate(self.primaries):
            primary.start()
            ends = [SLOTS * at // len(self.primaries) for at in (number, number + 1)]
            assert primary.ask("CLUSTER", "ADDSLOTSRANGE", ends[0], ends[1] - 1) == b"OK"
            assert primary.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1) == b"OK"
        for other in others:
            words = ("CLUSTER", "MEET", other.ip, other.port, other.bus_port)
            assert first.ask(*words) == b"OK"
        self.wait_serving()

    def wait_serving(self) -> None:
        """Wait until every primary reports a complete cluster."""
        for primary in self.primaries:
            wait_until(
                lambda primary=primary: primary.is_serving() and self._is_whole(primary),
                what=f"{primary.address} serves",
            )

    def _is_whole(self, primary: Primary) -> bool:
        info = primary.ask("CLUSTER", "INFO")
        return f"cluster_slots_ok:{SLOTS}".encode() in info if isinstance(info, bytes) else False

    def owner_of(self, key: str) -> Primary:
        """The primary of a key, according to the first node that responds."""
        slot = hash_slot(key)
        for asked in self.nodes:
            reported = asked.ask("CLUSTER", "SLOTS")
            for first, last, node, *_ in reported if isinstance(reported, list) else ():
                if first <= slot <= last:
                    return next(one for one in self.nodes if _is(one, node))
        raise AssertionError(f"nobody has {key}")

    def move(self, key: str, *, to: Primary) -> None:
        """Move the hash slot of a key atomically (Valkey 9); wait until all nodes agree."""
        slot, owner = hash_slot(key), self.owner_of(key)
        name = to.ask("CLUSTER", "MYID")
        words = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", name.decode())
        assert owner.ask(*words) == b"OK"
        wait_until(lambda: self._has(to, slot), what=f"{to.address} has slot {slot}")

    def harm(self, draw: Random, keys: Sequence[str]) -> None:
        """Move the hash slot of a key, or restart a primary; wait until all slots are served."""
        key = draw.choice(keys)
        owner = self.owner_of(key)
        if draw.random() < 0.6:
            self.move(key, to=draw.choice([one for one in self.primaries if one is not owner]))
        else:
            owner.kill()
            owner.start()
        self.wait_serving()

    def replica_of(self, primary: Primary) -> Primary:
        """The replica of a primary."""
        return next(one for one in self.nodes if one.primary_address == primary.address)

    def leads(self, node: Primary) -> bool:
        """Whether a node serves as a primary."""
        return node.primary_address is None and node.is_serving()

    def is_whole(self) -> bool:
        """Whether each primary serves and has a replica with what it has."""
        primaries = [one for one in self.nodes if one.primary_address is None]
        followed = [one.primary_address for one in self.nodes if one.has_all]
        return all(one.is_serving() for one in self.nodes) and sorted(followed) == sorted(
            one.address for one in primaries
        )

    def add_replica(self, of: Primary) -> Primary:
        """A replica that has what its primary has; it ends with the cluster."""
        replica = self._make(f"r{len(self.replicas)}")
        self.replicas.append(replica)
        replica.start()
        assert replica.ask("CLUSTER", "MEET", of.ip, of.port, of.bus_port) == b"OK"
        name = of.ask("CLUSTER", "MYID").decode()
        wait_until(
            lambda: replica.ask("CLUSTER", "REPLICATE", name) == b"OK",
            what="the replica follows its primary",
        )
        wait_until(
            lambda: b"master_link_status:up" in replica.ask("INFO", "replication"),
            what="it has what its primary has",
        )
        return replica

    def _has(self, primary: Primary, slot: int) -> bool:
        reported = primary.ask("CLUSTER", "SLOTS")
        return any(
            first <= slot <= last and _is(primary, node) for first, last, node, *_ in reported
        )

    def end(self) -> None:
        """End what runs."""
        for node in self.nodes:
            node.end()


def _is(node: Primary, reported: Sequence[object]) -> bool:
    """Whether CLUSTER SLOTS means this node; one on loopback need not know its address."""
    ip, port, *_ = reported
    return port == node.port and ip in (b"", node.ip.encode())


@contextmanager
def own_cluster(folder: Path, primaries: int = 3, net: Hosts | None = None) -> Iterator[OwnCluster]:
    """A cluster that serves, on loopback or with a host of `net` for each node."""
    cluster = OwnCluster(folder, primaries, net)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
