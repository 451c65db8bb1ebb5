"""A media cluster of real nodes over a small bucket, with constant traffic from checking clients.

The clients check every byte.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import msgspec
from little_bucket import LittleBucket
from tests.kit.processes import HeadraceProcess
from tests.kit.waiting import wait_true

from headrace.kernel.signing import derive_key
from headrace.media.cluster.hop import HOP_FIELD, KEY_USE, HopSigner, covered_by
from headrace.media.cluster.membership import MEMBERSHIP, Member, Membership
from headrace.media.model import BLOCK_BYTES
from headrace.media.partitions import PartitionTable, partition_of

SECRET = "the secret of a media cluster under test"
SIZE_BYTES = 2 * BLOCK_BYTES + 70_001
OBJECT_BLOCKS = 3


def content(key: str, version: int = 1) -> bytes:
    """The bytes of `key`.

    A function of key, version and place, so that no other bytes can pass for them.
    """
    return hashlib.shake_128(f"{key} {version}".encode()).digest(SIZE_BYTES)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Node:
    """One node: `headrace media serve` in its own data folder."""

    def __init__(self, name: str, folder: Path, bucket: LittleBucket, **settings: str) -> None:
        self.name, self.folder = name, folder
        self.host, self.port = "127.0.0.1", free_port()
        self.settings = settings
        self._bucket = bucket
        self.process: HeadraceProcess | None = None

    @property
    def member(self) -> Member:
        return Member(name=self.name, address=f"{self.host}:{self.port}")

    def url(self, key: str) -> str:
        return f"http://{self.host}:{self.port}/m/{key}"

    def start(self) -> None:
        disk = self.folder / "disk"
        disk.mkdir(parents=True, exist_ok=True)
        settings = {
            "NODE": self.name,
            "LISTEN": f"{self.host}:{self.port}",
            "DISKS": f"{disk}:64MiB",
            # The bucket is this process, which reads and checks for all clients: it may be slow.
            "WORKERS": "1",
            "REPLICAS": "2",
            "ORIGIN_TIMEOUT": "30s",
            "STOP_TIMEOUT": "2s",
            **self.settings,
        }
        env = {f"HEADRACE_MEDIA_{name}": value for name, value in settings.items()}
        env |= {"HEADRACE_DATA_FOLDER": str(self.folder / "data"), "HEADRACE_SECRET": SECRET}
        self.process = HeadraceProcess(
            ["media", "serve"], folder=self.folder, env={**env, **self._bucket.env}
        )

    async def wait_serving(self, client: httpx.AsyncClient) -> None:
        async def ask() -> bool:
            try:
                return (await client.get(f"http://{self.host}:{self.port}/healthz")).is_success
            except httpx.TransportError:
                return False

        await wait_true(ask, what=f"node {self.name} serves")

    def kill(self) -> None:
        """As a power cut: parent, workers and filler at once."""
        assert self.process is not None
        self.process.kill_all()
        self.process = None

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None


@dataclass
class Cluster:
    """Nodes over one bucket, and a client of them all."""

    bucket: LittleBucket
    nodes: list[Node]
    client: httpx.AsyncClient
    keys: list[str] = field(default_factory=list)

    @property
    def table(self) -> PartitionTable:
        """Who keeps what, from the document in the bucket."""
        data = self.bucket.objects[MEMBERSHIP.key]
        membership = MEMBERSHIP.decode(data)
        return PartitionTable.build(membership.candidates(time.time()), membership.replicas)

    def put(self, key: str, version: int = 1) -> None:
        self.bucket.objects[key] = content(key, version)
        if key not in self.keys:
            self.keys.append(key)

    async def get(self, node: Node, key: str, **fields: str) -> httpx.Response:
        return await self.client.get(node.url(key), headers=fields)

    async def wait_routing(self) -> None:
        """Return once every node sends what it does not keep to one that does."""
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

    def hop_headers(self, to: str, key: str, *, secret: str = SECRET) -> dict[str, str]:
        """What a node would send to `to` for the whole of `key`."""
        signer = HopSigner([derive_key(secret, KEY_USE)], "n0")
        value, _ = signer.sequence().sign(to, covered_by("GET", f"/m/{key}", {}), 0)
        return {HOP_FIELD: value}


@asynccontextmanager
async def running_cluster(folder: Path, *, count: int = 3, keys: int = 12, **settings: str):
    """`count` nodes that know each other and hold nothing yet, over `keys` objects."""
    bucket = LittleBucket()
    await bucket.start()
    nodes = [Node(f"n{i}", folder / f"n{i}", bucket, **settings) for i in range(count)]
    # Known before they start, so none has to ramp up.
    members = Membership(version=1, members=tuple(node.member for node in nodes))
    bucket.objects[MEMBERSHIP.key] = msgspec.json.encode(members)
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(
        timeout=60, limits=limits, trust_env=False, verify=False
    ) as client:
        cluster = Cluster(bucket, nodes, client)
        for number in range(keys):
            cluster.put(f"tracks/{number}.mp3")
        try:
            for node in nodes:
                node.start()
            for node in nodes:
                await node.wait_serving(client)
            await cluster.wait_routing()
            yield cluster
        finally:
            # All told at once, so that they end beside each other.
            for node in nodes:
                if node.process is not None:
                    node.process.signal(signal.SIGTERM)
            for node in nodes:
                node.end()
            await bucket.stop()


class Traffic:
    """Clients that read random ranges through random nodes of `through`, and check every byte."""

    def __init__(self, cluster: Cluster, *, seed: int = 1) -> None:
        self.cluster = cluster
        self.through = list(cluster.nodes)
        self.versions: dict[str, set[int]] = {}
        self.reads = 0
        self.slowest_s = 0.0
        self.faults: list[str] = []
        self._random = random.Random(seed)
        self._contents: dict[tuple[str, int], bytes] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._listen()) for _ in range(4)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_reads(self, count: int) -> None:
        """Return after `count` further answers."""
        wanted = self.reads + count
        await wait_true(lambda: self.reads >= wanted or self.faults, what="traffic")

    async def wait_answers(self, count: int) -> None:
        """Return after `count` further answers or faults."""
        wanted = self.reads + len(self.faults) + count
        await wait_true(
            lambda: self.reads + len(self.faults) >= wanted, what="traffic", deadline_s=120
        )

    async def _listen(self) -> None:
        while True:
            node, key = self._random.choice(self.through), self._random.choice(self.cluster.keys)
            start = self._random.randrange(SIZE_BYTES)
            last = min(SIZE_BYTES - 1, start + self._random.choice((0, 4000, 300_000)))
            began_s = time.monotonic()
            try:
                answer = await self.cluster.get(node, key, Range=f"bytes={start}-{last}")
            except httpx.HTTPError as error:
                self.faults.append(f"{node.name} {key}: {error!r}")
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            if answer.status_code != 206:
                self.faults.append(f"{node.name} {key}: {answer.status_code} {answer.text[:200]}")
            elif not self._is_right(key, start, last, answer.content):
                self.faults.append(f"{node.name} {key}: WRONG BYTES from {start}")
            self.reads += 1

    def _is_right(self, key: str, start: int, last: int, body: bytes) -> bool:
        for version in self.versions.get(key, {1}):
            if (key, version) not in self._contents:
                self._contents[key, version] = content(key, version)
            if self._contents[key, version][start : last + 1] == body:
                return True
        return False
