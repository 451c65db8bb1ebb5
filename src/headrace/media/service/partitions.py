"""Who owns a key, and what a change of the cluster would do to each node's load before it is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.engines.blobs import require_key
from headrace.media.cluster.membership import NodeUnknown
from headrace.media.errors import NoNodes
from headrace.media.partitions import Candidate, Table, partition_of
from headrace.media.service.nodes import Nodes
from headrace.media.simulate.loads import Load, Situation, loads_of


@dataclass(frozen=True, slots=True)
class Owner:
    """A node that keeps blocks of a key."""

    name: str
    address: str
    dc: str
    state: str


@dataclass(frozen=True, slots=True)
class Ownership:
    """Where a key belongs; `owners` in the order in which they are asked."""

    key: str
    partition: int
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Each node's part of all requests now and after a change.

    `filled_share`: of all blocks kept, those that their new owners have to read from the object store.
    """

    nodes: tuple[Load, ...]
    filled_share: float
    unowned_share: float


class Partitions:
    """The map from keys to nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def show(self, key: str) -> Ownership:
        """Who owns `key`, stored or not. Raises: InvalidBlobKey, NoNodes, BlobsDown."""
        require_key(key)
        membership = await self._nodes.membership()
        known = {member.name: member for member in membership.members}
        partition = partition_of(key)
        names = (await self._nodes.table(membership)).owners(partition)
        if not names:
            raise NoNodes(
                "the cluster has no node that takes partitions: see `headrace media nodes ls`"
            )
        owners = [known[name] for name in names]
        seen = tuple(Owner(one.name, one.address, one.dc, str(one.state)) for one in owners)
        return Ownership(key, partition, seen)

    async def plan(
        self,
        *,
        lost: Sequence[str] = (),
        drained: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
    ) -> Plan:
        """What it would do if nodes (or whole centres) in `lost` died, those in `drained` were drained,
        or others had another weight. Nothing is changed.

        Raises: NodeUnknown, NoNodes, BlobsDown.
        """
        membership = await self._nodes.membership()
        now = list(membership.candidates(time.time()))
        if not now:
            raise NoNodes(
                "the cluster has no node that takes partitions: see `headrace media nodes ls`"
            )
        gone, away = _named(now, lost), _named(now, drained)
        heavier = {name: weight for name, weight in (weights or {}).items() if _named(now, [name])}
        kept = [
            Candidate(one.name, one.dc, heavier.get(one.name, one.weight))
            for one in now
            if one.name not in away
        ]
        before = after = await self._nodes.table(membership)
        if kept != now:
            after = await asyncio.to_thread(Table.build, kept, membership.replicas)
        situation = Situation(tuple(now), before, after, gone, away)
        return Plan(*await asyncio.to_thread(loads_of, situation))


def _named(candidates: Sequence[Candidate], names: Sequence[str]) -> frozenset[str]:
    """The nodes that `names` mean: a node by its name, or all of a centre. Raises: NodeUnknown."""
    found: set[str] = set()
    for name in names:
        meant = {one.name for one in candidates if name in (one.name, one.dc)}
        if not meant:
            raise NodeUnknown(
                f"no media node or centre {name!r} takes partitions: see `headrace media nodes ls`"
            )
        found |= meant
    return frozenset(found)
