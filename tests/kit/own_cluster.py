"""A Valkey Cluster for one test: real primaries without replicas.

Primaries can be killed, emptied and started again, and hash slots moved under traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.kit.processes import free_ports, wait_until
from tests.kit.stock_valkey import StockValkey

from headrace.engines.valkey import SLOTS, hash_slot


class Primary(StockValkey):
    """One node of a cluster with its folder and ports."""

    def __init__(self, folder: Path) -> None:
        [self.bus_port] = free_ports(1)
        super().__init__(
            folder,
            **{
                "cluster-port": str(self.bus_port),
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
    def address(self) -> str:
        """The address in the form of the nodes."""
        return f"127.0.0.1:{self.port}"

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

    def __init__(self, folder: Path, primaries: int = 3) -> None:
        self.primaries = [Primary(folder / f"n{number}") for number in range(primaries)]
        self.replicas: list[Primary] = []

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
            words = ("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
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
        for primary in self.primaries:
            reported = primary.ask("CLUSTER", "SLOTS")
            for first, last, node, *_ in reported if isinstance(reported, list) else ():
                if first <= slot <= last:
                    return next(one for one in self.primaries if one.port == node[1])
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

    def add_replica(self, of: Primary, folder: Path) -> Primary:
        """A replica that has what its primary has; it ends with the cluster."""
        replica = Primary(folder)
        self.replicas.append(replica)
        replica.start()
        assert replica.ask("CLUSTER", "MEET", "127.0.0.1", of.port, of.bus_port) == b"OK"
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
            first <= slot <= last and node[1] == primary.port for first, last, node, *_ in reported
        )

    def end(self) -> None:
        """End what runs."""
        for node in (*self.primaries, *self.replicas):
            node.end()


@contextmanager
def own_cluster(folder: Path, primaries: int = 3) -> Iterator[OwnCluster]:
    """A cluster that serves."""
    cluster = OwnCluster(folder, primaries)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
