"""A media cluster of real nodes over a bucket of this process; clients check every byte."""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self

import httpx
import msgspec
from tests.kit.processes import HeadraceProcess, free_ports
from tests.kit.storm.bucket import Bucket
from tests.kit.storm.storm import pause
from tests.kit.waiting import wait_true

from headrace.kernel.signing import derive_key
from headrace.media.cluster.hop import HOP_FIELD, KEY_USE, HopSigner, covered_by
from headrace.media.cluster.membership import MEMBERSHIP, Member, Membership
from headrace.media.model import BLOCK_BYTES
from headrace.media.partitions import PartitionTable, partition_of

SECRET = "the secret of a media cluster under test"
SIZE_BYTES = 2 * BLOCK_BYTES + 70_001
OBJECT_BLOCKS = 3


@lru_cache(maxsize=200)
def content(key: str, version: int = 1) -> bytes:
    """The bytes of `key`: a function of key, version and offset, so no others can pass."""
    return hashlib.shake_128(f"{key} {version}".encode()).digest(SIZE_BYTES)


class Node:
    """One node: `headrace media serve` in its own data folder."""

    def __init__(self, name: str, folder: Path, bucket: Bucket, **settings: str) -> None:
        self.name, self.folder, self.settings = name, folder, settings
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self._bucket = bucket
        self.process: HeadraceProcess | None = None
        self.code: Path | None = None
        """A folder with another version of the package; None: the present one."""

    @property
    def member(self) -> Member:
        return Member(name=self.name, address=self.address)

    def url(self, key: str) -> str:
        return f"http://{self.address}/m/{key}"

    def start(self) -> None:
        """Start it."""
        disk = self.folder / "disk"
        disk.mkdir(parents=True, exist_ok=True)
        settings = {
            "NODE": self.name,
            "LISTEN": self.address,
            "DISKS": f"{disk}:64MiB",
            # The bucket is this process, which reads and checks for all clients.
            "WORKERS": "1",
            "REPLICAS": "2",
            "ORIGIN_TIMEOUT": "30s",
            "STOP_TIMEOUT": "2s",
            **self.settings,
        }
        env = {f"HEADRACE_MEDIA_{name}": value for name, value in settings.items()}
        env |= {} if self.code is None else {"PYTHONPATH": str(self.code)}
        env |= {"HEADRACE_DATA_FOLDER": str(self.folder / "data"), "HEADRACE_SECRET": SECRET}
        self.process = HeadraceProcess(
            ["media", "serve"], folder=self.folder, env={**env, **self._bucket.env}
        )

    async def wait_serving(self, client: httpx.AsyncClient) -> None:
        """Wait until it serves."""

        async def ask() -> bool:
            try:
                return (await client.get(f"http://{self.address}/healthz")).is_success
            except httpx.TransportError:
                return False

        await wait_true(ask, what=f"node {self.name} serves")

    def kill(self) -> None:
        """As a power cut: parent, workers and filler at once."""
        assert self.process is not None
        self.process.kill_all()
        self.process = None

    def events(self, name: str) -> list[dict]:
        return self.process.events(name) if self.process else []


@dataclass
class Cluster:
    """Nodes over one bucket, and a client of them all."""

    bucket: Bucket
    nodes: list[Node]
    client: httpx.AsyncClient
    keys: list[str] = field(default_factory=list)

    @property
    def table(self) -> PartitionTable:
        """The owners of partitions, from the document in the bucket."""
        membership = MEMBERSHIP.decode(self.bucket.objects[MEMBERSHIP.key])
        return PartitionTable.build(membership.candidates(time.time()), membership.replicas)

    def owners(self, key: str) -> list[str]:
        """Names of the nodes that own a key."""
        return list(self.table.owners(partition_of(key)))

    def put(self, key: str, version: int = 1) -> None:
        self.bucket.objects[key] = content(key, version)

    async def get(self, node: Node, key: str, **fields: str) -> httpx.Response:
        return await self.client.get(node.url(key), headers=fields)

    async def wait_routing(self) -> None:
        """Wait until every node sends requests for keys of others to an owner."""
        table = self.table

        async def is_routing() -> bool:
            for node in self.nodes:
                for key in self.keys:
                    answer = await self.get(node, key, Range="bytes=0-0")
                    is_own = node.name in table.owners(partition_of(key))
                    if ("detail=peer" in answer.headers.get("cache-status", "")) == is_own:
                        return False
            return True

        await wait_true(is_routing, what="all nodes route")

    async def warm(self) -> None:
        for key in self.keys:
            for node in self.nodes:
                assert (await self.get(node, key)).content == content(key)

    def keys_of(self, owner: str, count: int, *, without: str = "") -> list[str]:
        """New objects whose first owner is the node `owner`, and that `without` does not own."""
        table = self.table
        names = [f"of/{number}.mp3" for number in range(2_000)]
        owners = {name: table.owners(partition_of(name)) for name in names}
        found = [key for key in names if owners[key][0] == owner and without not in owners[key]]
        for key in found[:count]:
            self.put(key)
        return found[:count]

    def hop_headers(self, to: str, key: str, *, secret: str = SECRET) -> dict[str, str]:
        """The fields that a node sends to `to` for the whole of `key`."""
        signer = HopSigner([derive_key(secret, KEY_USE)], "n0")
        value, _ = signer.sequence().sign(to, covered_by("GET", f"/m/{key}", {}), 0)
        return {HOP_FIELD: value}


@asynccontextmanager
async def running_cluster(
    folder: Path, *, keys: int = 12, bucket: Bucket | None = None, **settings: str
):
    """Three nodes that have each other's addresses and cache nothing yet."""
    bucket = bucket or Bucket()
    if not bucket.port:
        await bucket.start()
    nodes = [Node(f"n{i}", folder / f"n{i}", bucket, **settings) for i in range(3)]
    # Members before they start, so that none has to ramp up.
    members = Membership(version=1, members=tuple(node.member for node in nodes))
    bucket.objects[MEMBERSHIP.key] = msgspec.json.encode(members)
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(
        timeout=60, limits=limits, trust_env=False, verify=False
    ) as client:
        cluster = Cluster(bucket, nodes, client, [f"tracks/{n}.mp3" for n in range(keys)])
        for key in cluster.keys:
            cluster.put(key)
        try:
            for node in nodes:
                node.start()
            for node in nodes:
                await node.wait_serving(client)
            await cluster.wait_routing()
            yield cluster
        finally:
            running = [node.process for node in nodes if node.process is not None]
            for process in running:
                process.signal(signal.SIGTERM)
            for process in running:
                process.end()
            await bucket.stop()


class Traffic:
    """Clients that read random ranges through random nodes of `through`, and check every byte."""

    def __init__(self, cluster: Cluster, *, seed: int = 1) -> None:
        self.cluster = cluster
        self.through = list(cluster.nodes)
        self.versions: dict[str, set[int]] = {}
        self.reads = self.refused = self.unanswered = 0
        self.slowest_s = 0.0
        self.faults: list[str] = []
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read_on()) for _ in range(4)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_reads(self, count: int, *, is_strict: bool = True) -> None:
        """Wait for further answers; `is_strict` fails at the first fault."""
        wanted = self.reads + len(self.faults) + count

        def is_enough() -> bool:
            assert not (is_strict and self.faults), self.faults
            return self.reads + len(self.faults) >= wanted

        await wait_true(is_enough, what="traffic", deadline_s=120)

    async def _read_on(self) -> None:
        while True:
            node, key = self._random.choice(self.through), self._random.choice(self.cluster.keys)
            start = self._random.randrange(SIZE_BYTES)
            last = min(SIZE_BYTES - 1, start + self._random.choice((0, 4000, 300_000)))
            began_s = time.monotonic()
            try:
                answer = await self.cluster.get(node, key, Range=f"bytes={start}-{last}")
            except httpx.HTTPError as error:
                self.unanswered += 1
                self.faults.append(f"{node.name} {key}: {error!r}")
                await pause(asyncio.Event(), 0.01)
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            versions = self.versions.get(key, {1})
            if answer.status_code != 206:
                self.refused += 1
                self.faults.append(f"{node.name} {key}: {answer.status_code} {answer.text[:200]}")
            elif not any(answer.content == content(key, v)[start : last + 1] for v in versions):
                self.faults.append(f"{node.name} {key}: WRONG BYTES from {start}")
            self.reads += 1
