"""Routes about partitions: who owns a key, what a change would do, what losses do to a made-up cluster."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from penstock.media.http.scopes import READ
from penstock.media.service import Media
from penstock.media.service.partitions import Ownership, Plan
from penstock.media.simulate.cluster import Cluster, Simulation, simulate

NODES_MAX: Final = 100
"""Of a simulated cluster over HTTP: its tables are computed in the API's process."""
Names = Annotated[list[str], msgspec.Meta(max_length=NODES_MAX)]


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes or centres that die, that are drained, and nodes with another weight."""

    lost: Names = []
    drained: Names = []
    weights: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}


class MadeUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster that is not there, and which of its nodes (c1-n1) or centres (c1) die."""

    centres: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 3
    nodes: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 4
    load_gbit: float = 120.0
    replicas: int = 2
    lost: Names = []


@get(
    "/v1/media/partitions/{key:path}",
    operation_id="getMediaOwners",
    summary="Show who owns a key",
    opt=READ,
)
async def get_owners(media: NamedDependency[Media], key: FromPath[str]) -> Ownership:
    """The partition of `key`, stored or not, and its owners in the order in which they are asked."""
    return await media.partitions.show(key.removeprefix("/"))


@post(
    "/v1/media/plan",
    operation_id="planMedia",
    summary="Show what a change of the cluster would do",
    opt=READ,
    status_code=200,
)
async def plan(media: NamedDependency[Media], data: JSONBody[Change]) -> Plan:
    """Each node's share of all requests now and after a change. Nothing is changed."""
    return await media.partitions.plan(lost=data.lost, drained=data.drained, weights=data.weights)


@post(
    "/v1/media/simulate",
    operation_id="simulateMedia",
    summary="Show what losses do to a made-up cluster",
    opt=READ,
    status_code=200,
)
async def simulate_losses(data: JSONBody[MadeUp]) -> Simulation:
    """The load of each node of a cluster that is not there: whole, with losses, and in a roll-out."""
    nodes = min(data.nodes, NODES_MAX // data.centres)
    cluster = Cluster(
        centres=data.centres, nodes=nodes, load_gbit=data.load_gbit, replicas=data.replicas
    )
    return await asyncio.to_thread(simulate, cluster, lost=data.lost)


ROUTES: Final[list[Any]] = [get_owners, plan, simulate_losses]
