"""Routes about nodes, partitions and the disks of the node on the API's machine and data folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody, QueryParameter

from headrace.media.http.objects import READ, WRITE
from headrace.media.service import Media
from headrace.media.service.entry import EntryNode
from headrace.media.service.nodes import (
    OBJECTS_MAX,
    Disk,
    HotObject,
    NodeInfo,
    Ownership,
    Plan,
    Verified,
)

NODES_MAX: Final = 100
Names = Annotated[list[str], msgspec.Meta(max_length=NODES_MAX)]


class Weight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's share relative to a node of weight 1."""

    weight: float


@get("/v1/media/nodes", opt=READ)
async def list_media_nodes(media: NamedDependency[Media]) -> Sequence[NodeInfo]:
    """All nodes of the cluster by name, with address, data center, weight, state and share."""
    return await media.nodes.list()


@get("/v1/media/nodes/{node:str}", opt=READ)
async def get_media_node(media: NamedDependency[Media], node: FromPath[str]) -> NodeInfo:
    """One node of the cluster."""
    return await media.nodes.get(node)


@post("/v1/media/nodes/{node:str}/drain", opt=WRITE, status_code=200)
async def drain_media_node(media: NamedDependency[Media], node: FromPath[str]) -> NodeInfo:
    """Let other nodes serve the node's keys; it still answers requests. Idempotent."""
    return await media.nodes.drain(node)


@post("/v1/media/nodes/{node:str}/undrain", opt=WRITE, status_code=200)
async def undrain_media_node(media: NamedDependency[Media], node: FromPath[str]) -> NodeInfo:
    """Let the node serve its keys again. Idempotent."""
    return await media.nodes.undrain(node)


@put("/v1/media/nodes/{node:str}/weight", opt=WRITE)
async def set_media_node_weight(
    media: NamedDependency[Media], node: FromPath[str], data: JSONBody[Weight]
) -> NodeInfo:
    """Give the node a share of the keys of `weight` times that of a node of weight 1."""
    return await media.nodes.set_weight(node, data.weight)


@delete("/v1/media/nodes/{node:str}", opt=WRITE)
async def remove_media_node(media: NamedDependency[Media], node: FromPath[str]) -> None:
    """Remove a node. A node that still runs registers again at its next start."""
    await media.nodes.remove(node)


@get("/v1/media/entry", opt=READ)
async def list_media_entry(media: NamedDependency[Media]) -> Sequence[EntryNode]:
    """All nodes, each probed now, with its weight for load balancers; 0: no new clients."""
    return await media.entry.list()


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes or data centers that die or are drained, and nodes with another weight."""

    lost: Names = []
    drained: Names = []
    weights: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}


@get("/v1/media/partitions/{key:path}", opt=READ)
async def get_media_owners(media: NamedDependency[Media], key: FromPath[str]) -> Ownership:
    """The nodes that own `key`, in the order in which they are tried. It need not be stored."""
    return await media.partitions.show(key.removeprefix("/"))


@post("/v1/media/plan", opt=READ, status_code=200)
async def plan_media(media: NamedDependency[Media], data: JSONBody[Change]) -> Plan:
    """Each node's share of all requests now and after a change. No changes are made."""
    return await media.partitions.plan(lost=data.lost, drained=data.drained, weights=data.weights)


class DiskToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder or block device, and how much of it to use."""

    path: str
    size_bytes: Annotated[int, msgspec.Meta(gt=0)]


class ToVerify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of all blocks to verify, picked at random."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


@get("/v1/media/disks", opt=READ)
async def list_media_disks(media: NamedDependency[Media]) -> Sequence[Disk]:
    """All disks of the node on the API's machine, by path."""
    return await media.disks.list()


@post("/v1/media/disks", opt=WRITE, status_code=200)
async def add_media_disk(media: NamedDependency[Media], data: JSONBody[DiskToAdd]) -> Disk:
    """Add a disk while the node runs. The node keeps it for its next starts."""
    return await media.disks.add(data.path, data.size_bytes)


@post("/v1/media/disks/{disk:str}/drain", opt=WRITE, status_code=200)
async def drain_media_disk(media: NamedDependency[Media], disk: FromPath[str]) -> Disk:
    """Cache nothing more on the disk of this id. What it has is still served. Idempotent."""
    return await media.disks.drain(disk)


@post("/v1/media/disks/{disk:str}/undrain", opt=WRITE, status_code=200)
async def undrain_media_disk(media: NamedDependency[Media], disk: FromPath[str]) -> Disk:
    """Cache on the disk of this id again. Idempotent."""
    return await media.disks.undrain(disk)


@post("/v1/media/disks/{disk:str}/retire", opt=WRITE, status_code=200)
async def retire_media_disk(media: NamedDependency[Media], disk: FromPath[str]) -> Disk:
    """Take the disk of this id out of use, so that it can be removed. Its cached data is lost."""
    return await media.disks.retire(disk)


@post("/v1/media/verify", opt=WRITE, status_code=200)
async def verify_media(media: NamedDependency[Media], data: JSONBody[ToVerify]) -> Verified:
    """Compare a share of what the node has cached with its checksums, and drop what is wrong.

    The answer is sent when all are checked.
    """
    return await media.disks.verify(data.share)


@get("/v1/media/hottest", opt=READ)
async def list_hottest_media(
    media: NamedDependency[Media],
    limit: Annotated[int, QueryParameter(ge=1, le=OBJECTS_MAX)] = 20,
) -> Sequence[HotObject]:
    """The objects requested most from the node on the API's machine, in requests per second.

    The rates are sampled; the last minutes count most.
    """
    return await media.hottest.list(objects_max=limit)
