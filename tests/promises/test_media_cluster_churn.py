"""A cluster that is never left alone.

Members come and go, objects are replaced, processes are killed; no wrong byte.

Each client read must be the bytes of one version, one that was current within the time a shape is
kept.
"""

from __future__ import annotations

import random
import time
from functools import partial

import httpx
import pytest
from media_cluster import Cluster, Node, Traffic, content, running_cluster
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.media.cluster.membership import MembershipStore
from headrace.media.cluster.purge import Purges

pytestmark = pytest.mark.soak
CHURN_S = 60.0


class Churn:
    """One change after the other, at random, until its time is over."""

    def __init__(self, cluster: Cluster, traffic: Traffic, blobs: Blobs, seed: int) -> None:
        self.cluster, self.traffic = cluster, traffic
        self.member_store, self.purges = MembershipStore(blobs), Purges(blobs)
        self.random = random.Random(seed)
        self.done: list[str] = []

    async def run(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        changes = [self.weigh, self.drain, self.replace, self.replace, self.kill, self.grow]
        while time.monotonic() < ends_s and not self.wrong:
            change = self.random.choice(changes)
            await change()
            self.done.append(change.__name__)
            await self.traffic.wait_answers(20)

    @property
    def wrong(self) -> list[str]:
        return [fault for fault in self.traffic.faults if "WRONG" in fault]

    async def weigh(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        await self.member_store.set_weight(node.name, self.random.choice([0.2, 0.5, 1.0, 2.0]))

    async def drain(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        await self.member_store.drain(node.name)
        await self.traffic.wait_answers(40)
        await self.member_store.undrain(node.name)

    async def grow(self) -> None:
        """One known as a member that never answers, as an address that was given away."""
        ghost = self.cluster.nodes[0].member
        await self.member_store.register(
            type(ghost)(name="ghost", address="127.0.0.1:9"), replicas=2
        )
        await self.traffic.wait_answers(40)
        await self.member_store.remove("ghost")

    async def replace(self) -> None:
        key = self.random.choice(self.cluster.keys)
        versions = self.traffic.versions.setdefault(key, {1})
        versions.add(max(versions) + 1)
        self.cluster.put(key, max(versions))
        await self.purges.purge(key)

    async def kill(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        self.traffic.through = [one for one in self.cluster.nodes if one is not node]
        node.kill()
        await self.traffic.wait_answers(60)
        node.start()
        await node.wait_serving(self.cluster.client)
        self.traffic.through = list(self.cluster.nodes)


@pytest.mark.parametrize("seed", [1, 2])
async def test_never_a_wrong_byte_while_everything_changes(tmp_path, monkeypatch, seed):
    async with running_cluster(tmp_path, DISKS=f"{tmp_path / 'disk'}:24MiB") as cluster:
        for name, value in cluster.bucket.env.items():
            monkeypatch.setenv(name, value)
        blobs = Blobs(cluster.bucket.env["HEADRACE_BLOBS_URL"])
        async with Traffic(cluster, seed=seed) as traffic:
            churn = Churn(cluster, traffic, blobs, seed)
            await churn.run(CHURN_S)
            traffic.through = list(cluster.nodes)
        assert churn.wrong == []
        # A body whose object was replaced under it is cut, and those of a killed node's clients
        # are.
        cut = [fault for fault in traffic.faults if "Error" in fault]
        assert traffic.faults == cut, [fault for fault in traffic.faults if fault not in cut][:5]
        assert len(cut) <= 0.05 * traffic.reads
        await cluster.wait_routing()
        newest = {key: max(traffic.versions.get(key, {1})) for key in cluster.keys}
        for node in cluster.nodes:
            for key, version in newest.items():
                await wait_true(
                    partial(shows, cluster, node, key, version), what=f"{key} at {node.name}"
                )
        print(f"seed {seed}: {traffic.reads} reads, {len(cut)} cut, {churn.done}")


async def shows(cluster: Cluster, node: Node, key: str, version: int) -> bool:
    """Whether `node` gives the bytes of that version."""
    try:
        return (await cluster.get(node, key)).content == content(key, version)
    except httpx.ReadError:
        return False
