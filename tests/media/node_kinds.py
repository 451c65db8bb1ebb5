"""The kinds of media nodes that give the same answers. A kind is a name and a start function.

`start(folder, **settings)` is an async context manager that yields a `Served`: a node whose every
answer comes by the kind's way once the object was read, and its store. Another data plane is one
more entry of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import pytest
from raw_clients import Served, serving
from tests.kit.certificates import client_context, self_signed_files
from tests.kit.storm import bucket as s3
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.media import partitions
from headrace.media.cache.layout import DATA_AT, PROBE_BLOCKS, SET_BYTES, WAYS
from headrace.media.cluster.membership import Member, MembershipStore
from headrace.media.model import BLOCK_BYTES, DiskConfig
from headrace.media.simulate import cluster as simulated

SETS = 8
"""Of 16 frames each: 32 MiB on a disk."""


@dataclass(frozen=True)
class Kind:
    """One kind of node, the Cache-Status of its answers, and the sources of its bytes."""

    name: str
    start: Callable[..., AbstractAsyncContextManager[Served]]
    cache_status: str
    sources: tuple[str, ...]
    is_tls: bool = False

    def __str__(self) -> str:
        return self.name


def disk_bytes(sets: int) -> int:
    """The minimum size of a disk with this many sets."""
    return 2 * DATA_AT + PROBE_BLOCKS * BLOCK_BYTES + sets * (WAYS * BLOCK_BYTES + SET_BYTES)


def disk_in(folder: Path, sets: int = SETS) -> tuple[DiskConfig, ...]:
    return (DiskConfig(folder, disk_bytes(sets)),)


@asynccontextmanager
async def store_in(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    blobs = Blobs((folder / "store").as_uri())
    try:
        yield blobs
    finally:
        await blobs.close()


@asynccontextmanager
async def start_files(folder: Path, **settings):
    """A node that sends the files of its store."""
    async with store_in(folder) as blobs, serving(blobs, run=folder / "run", **settings) as node:
        yield node


@asynccontextmanager
async def start_blocks(folder: Path, **settings):
    """A node that caches blocks on a disk."""
    settings = {"disks": disk_in(folder / "disk"), **settings}
    async with store_in(folder) as blobs, serving(blobs, run=folder / "run", **settings) as node:
        yield node


@asynccontextmanager
async def bucket_store(**env: str):
    """A remote store, and the bucket behind it; `env` replaces variables."""
    bucket = s3.Bucket()
    await bucket.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**bucket.env, **env}.items():
            patch.setenv(name, value)
        # A sum over all bytes of an object in every answer would be most of a test's time.
        patch.setattr(s3, "etag_of", lru_cache(maxsize=64)(s3.etag_of))
        blobs = Blobs("s3://m")
        try:
            yield blobs, bucket
        finally:
            await blobs.close()
            await bucket.stop()


@asynccontextmanager
async def start_bypass(folder: Path, **settings):
    """A node without disks in front of a remote store."""
    async with (
        bucket_store() as (blobs, bucket),
        serving(blobs, run=folder / "run", **settings) as node,
    ):
        node.bucket = bucket
        yield node


@contextmanager
def few_partitions(bits: int = 10):
    """Tables of all partitions take most of a cluster's start, and their number decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "PARTITION_BITS", bits)
        for module in (partitions, simulated):
            patch.setattr(module, "PARTITIONS", 1 << bits)
        yield


@asynccontextmanager
async def start_peer(folder: Path, **settings):
    """A drained node `a` of a cluster, for which node `b` keeps all blocks."""
    with few_partitions():
        async with store_in(folder) as blobs:
            member_store = MembershipStore(blobs)
            await member_store.register(Member(name="a", address="127.0.0.1:1"), replicas=1)
            await member_store.drain("a")
            own = {"node": "b", "disks": disk_in(folder / "disk-b"), "run": folder / "run-b"}
            async with serving(blobs, replicas=1, **own) as keeper:
                own = {"node": "a", "disks": disk_in(folder / "disk-a"), "run": folder / "run-a"}
                async with serving(blobs, replicas=1, **{**own, **settings}) as node:
                    node.fillers += keeper.fillers
                    await _wait_routed(node)
                    yield node


async def _wait_routed(node: Served) -> None:
    await node.blobs.put("routed.bin", b"x" * 99)
    url = node.media.objects.url("routed.bin", ttl_s=600).partition("/m/")[2]

    async def is_routed() -> bool:
        client = await node.connect()
        answer = await client.ask(url)
        client.drop()
        return answer.fields.get("cache-status") == PEER.cache_status

    await wait_true(is_routed, what="the other node keeps the keys")


def over_tls(start):
    """The same node over HTTPS."""

    @asynccontextmanager
    async def start_tls(folder: Path, **settings):
        folder.mkdir(parents=True, exist_ok=True)
        cert, key = self_signed_files(folder)
        settings |= {"listen_tls": ("127.0.0.1", 0), "tls_cert": cert, "tls_key": key}
        settings |= {"tls": client_context(cert)}
        async with start(folder, **settings) as node:
            yield node

    return start_tls


def in_python(start):
    """The same node without the native data plane."""
    return partial(start, data_plane="python")


FILES = Kind("files", start_files, "headrace; hit", ("memory", "disk"))
TLS = Kind("tls", over_tls(start_files), "headrace; hit", ("memory", "disk"), is_tls=True)
BLOCKS = Kind("blocks", start_blocks, "headrace; hit", ("memory", "disk", "origin"))
BYPASS = Kind("bypass", start_bypass, "headrace; fwd=bypass", ("origin",))
PEER = Kind("peer", start_peer, "headrace; fwd=miss; detail=peer", ("peer",))
PYTHON_FILES = replace(FILES, name="files, Python", start=in_python(start_files))
TLS_BLOCKS = replace(BLOCKS, name="tls blocks", start=over_tls(start_blocks), is_tls=True)
PYTHON_TLS = replace(TLS, name="tls, Python", start=in_python(TLS.start))
PYTHON_BLOCKS = replace(BLOCKS, name="blocks, Python", start=in_python(start_blocks))
KINDS = (FILES, PYTHON_FILES, TLS, TLS_BLOCKS, PYTHON_TLS, BLOCKS, PYTHON_BLOCKS, BYPASS, PEER)
