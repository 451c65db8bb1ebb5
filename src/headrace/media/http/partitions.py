"""Routes about partitions: who owns a key, what a change would do, what losses do to a made-up cluster."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.media.errors import InvalidSimulation
from headrace.media.http.scopes import READ
from headrace.media.service import Media
from headrace.media.service.partitions import Ownership, Plan
from headrace.media.simulate.apart import SimulationBusy, simulate_apart
from headrace.media.simulate.cluster import Cluster, Simulation

NODES_MAX: Final = 100
SIMULATED_MAX: Final = 16
"""Nodes of a simulated cluster over HTTP: a table for each, some ten seconds of one core."""
Names = Annotated[list[str], msgspec.Meta(max_length=NODES_MAX)]


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes or centres that die, that are drained, and nodes with another weight."""

    lost: Names = []
    drained: Names = []
    weights: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}


class MadeUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster that is not there, and which of its nodes (c1-n1) or centres (c1) die."""

    centres: Annotated[int, msgspec.Meta(ge=1, le=SIMULATED_MAX)] = 3
    nodes: Annotated[int, msgspec.Meta(ge=1, le=SIMULATED_MAX)] = 4
    load_gbit: float = 120.0
    replicas: int = 0
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
async def simulate_losses(request: Request[Any, Any, Any], data: JSONBody[MadeUp]) -> Simulation:
    """The load of each node of a cluster that is not there: whole, with losses, and in a roll-out.

    At most 16 nodes in all and 30 seconds, one caller at a time, in a process of its own; ended when the caller leaves.
    """
    if data.centres * data.nodes > SIMULATED_MAX:
        raise InvalidSimulation(
            f"{data.centres} centres of {data.nodes} nodes: expected at most {SIMULATED_MAX} nodes in all here;"
            " `headrace media partitions simulate` takes more"
        )
    cluster = Cluster(
        centres=data.centres, nodes=data.nodes, load_gbit=data.load_gbit, replicas=data.replicas
    )
    working = asyncio.ensure_future(simulate_apart(cluster, lost=data.lost))
    leaving = asyncio.ensure_future(_wait_left(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise SimulationBusy("the caller left before it was computed", retry_after_s=1)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _wait_left(request: Request[Any, Any, Any]) -> None:
    """Return when the caller has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


ROUTES: Final[list[Any]] = [get_owners, plan, simulate_losses]
