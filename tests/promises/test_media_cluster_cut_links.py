"""Nodes in network namespaces, their links cut without a word.

Who is cut off is gone around, and comes back.

A cut link sends no reset and refuses nothing: packets are lost, as with a dead switch. Needs root
and `ip`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from little_bucket import LittleBucket
from media_cluster import Cluster, Node, Traffic, content

from headrace.media.cluster.membership import MEMBERSHIP, Membership
from headrace.media.partitions import partition_of

pytestmark = pytest.mark.soak
NET = "10.213.77"
CLONE_NEWNET = 0x40000000


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class FarNode(Node):
    """A node in a namespace of its own, reached over a bridge."""

    def __init__(self, number: int, folder: Path, bucket: LittleBucket, tag: str) -> None:
        super().__init__(f"n{number}", folder, bucket, LISTEN=f"{NET}.{10 + number}:8081")
        self.host, self.port = f"{NET}.{10 + number}", 8081
        self.space, self.link = f"{tag}n{number}", f"{tag}v{number}"

    def plug_in(self, bridge: str) -> None:
        run("ip", "netns", "add", self.space)
        run(
            "ip",
            "link",
            "add",
            self.link,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.space,
        )
        run("ip", "link", "set", self.link, "master", bridge, "up")
        for command in (
            ("addr", "add", f"{self.host}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", self.space, *command)

    def start(self) -> None:
        with inside(Path("/run/netns") / self.space):
            super().start()

    def cut(self, other: FarNode) -> None:
        """Lose every packet to and from `other`, and to nobody else."""
        for one, far in ((self, other), (other, self)):
            run("ip", "-n", one.space, "route", "add", "blackhole", f"{far.host}/32")

    def mend(self, other: FarNode) -> None:
        for one, far in ((self, other), (other, self)):
            run("ip", "-n", one.space, "route", "del", "blackhole", f"{far.host}/32")


@contextmanager
def inside(space: Path):
    """Processes started here begin in that namespace; this thread comes back."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(space, os.O_RDONLY)
    try:
        assert libc.setns(there, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(home, CLONE_NEWNET) == 0
    finally:
        os.close(home)
        os.close(there)


@contextmanager
def bridged(nodes: list[FarNode], bridge: str):
    """The nodes' links on one bridge, gone in the end."""
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "addr", "add", f"{NET}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network can be made here: needs root with CAP_NET_ADMIN")
    try:
        for node in nodes:
            node.plug_in(bridge)
        yield
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.space], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", node.link], check=False, capture_output=True)
        run("ip", "link", "del", bridge)


@pytest.fixture
async def cluster(tmp_path):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("namespaces need root and the command ip")
    bucket = LittleBucket()
    tag = f"ps{os.getpid() % 100_000}"
    nodes = [FarNode(i, tmp_path / f"n{i}", bucket, tag) for i in range(3)]
    with bridged(nodes, f"{tag}br"):
        bucket.host = f"{NET}.1"
        await bucket.start()
        members = Membership(version=1, members=tuple(node.member for node in nodes))
        bucket.objects[MEMBERSHIP.key] = msgspec.json.encode(members)
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            cluster = Cluster(bucket, nodes, client)
            for number in range(12):
                cluster.put(f"tracks/{number}.mp3")
            try:
                for node in nodes:
                    node.start()
                for node in nodes:
                    await node.wait_serving(client)
                await cluster.wait_routing()
                yield cluster
            finally:
                for node in nodes:
                    node.end()
                await bucket.stop()


async def test_a_node_whose_link_goes_down_is_gone_around_and_comes_back(cluster):
    gone, *left = cluster.nodes
    async with Traffic(cluster) as traffic:
        traffic.through = left
        await traffic.wait_reads(100)
        run("ip", "link", "set", gone.link, "down")
        await traffic.wait_reads(300)
        assert traffic.faults == []
        assert traffic.slowest_s < 15
        run("ip", "link", "set", gone.link, "up")
        await cluster.wait_routing()
        traffic.through = cluster.nodes
        await traffic.wait_reads(100)
    assert traffic.faults == []


async def test_two_nodes_that_do_not_reach_each_other_still_serve_everything(cluster):
    one, other, _ = cluster.nodes
    table = cluster.table
    async with Traffic(cluster) as traffic:
        await traffic.wait_reads(50)
        one.cut(other)
        await traffic.wait_reads(200)
        answers = await asyncio.gather(
            *(cluster.get(node, key) for node in (one, other) for key in cluster.keys)
        )
        assert [answer.content for answer in answers] == [content(k) for k in cluster.keys] * 2
        assert {"n0", "n1"} <= {
            name for k in cluster.keys for name in table.owners(partition_of(k))
        }
        one.mend(other)
        await cluster.wait_routing()
        await traffic.wait_reads(50)
    assert traffic.faults == []
    assert traffic.slowest_s < 15
