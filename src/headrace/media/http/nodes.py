"""Routes about the cluster's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.media.http.scopes import READ, WRITE
from headrace.media.service import Media
from headrace.media.service.nodes import NodeSeen


class Weight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's part against a node of weight 1."""

    weight: float


@get("/v1/media/nodes", operation_id="listMediaNodes", summary="List the cache nodes", opt=READ)
async def list_nodes(media: NamedDependency[Media]) -> Sequence[NodeSeen]:
    """Every node of the cluster by name: address, centre, weight, state, and its share of partitions."""
    return await media.nodes.list()


@get(
    "/v1/media/nodes/{node:str}",
    operation_id="getMediaNode",
    summary="Show a cache node",
    opt=READ,
)
async def get_node(media: NamedDependency[Media], node: FromPath[str]) -> NodeSeen:
    """One node of the cluster."""
    return await media.nodes.get(node)


@post(
    "/v1/media/nodes/{node:str}/drain",
    operation_id="drainMediaNode",
    summary="Give a node no partitions any more",
    opt=WRITE,
    status_code=200,
)
async def drain_node(media: NamedDependency[Media], node: FromPath[str]) -> NodeSeen:
    """Let the others serve what the node keeps; it goes on answering. May be repeated."""
    return await media.nodes.drain(node)


@post(
    "/v1/media/nodes/{node:str}/undrain",
    operation_id="undrainMediaNode",
    summary="Give a node its partitions again",
    opt=WRITE,
    status_code=200,
)
async def undrain_node(media: NamedDependency[Media], node: FromPath[str]) -> NodeSeen:
    """Let the node serve its keys again. May be repeated."""
    return await media.nodes.undrain(node)


@put(
    "/v1/media/nodes/{node:str}/weight",
    operation_id="setMediaNodeWeight",
    summary="Give a node more or fewer partitions",
    opt=WRITE,
)
async def put_weight(
    media: NamedDependency[Media], node: FromPath[str], data: JSONBody[Weight]
) -> NodeSeen:
    """Let the node have `weight` times the partitions of a node of weight 1."""
    return await media.nodes.set_weight(node, data.weight)


@delete(
    "/v1/media/nodes/{node:str}",
    operation_id="removeMediaNode",
    summary="Forget a node that is gone for good",
    opt=WRITE,
)
async def remove_node(media: NamedDependency[Media], node: FromPath[str]) -> None:
    """Forget a node; one that still runs enters again with its next start."""
    await media.nodes.remove(node)


ROUTES: Final[list[Any]] = [
    list_nodes,
    get_node,
    drain_node,
    undrain_node,
    put_weight,
    remove_node,
]
