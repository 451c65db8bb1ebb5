"""The cluster's nodes: who is there, what share each serves, and what an operator changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.engines.blobs import Blobs
from headrace.media.cluster.membership import Membership, NodeUnknown, Roster
from headrace.media.partitions import Candidate, Table


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One node as people see it. `share`: of the partitions, those that it serves first.

    `started_at`: when it began to take its share, by tenths over five minutes; None: it had all at once.
    """

    name: str
    address: str
    dc: str
    weight: float
    state: str
    share: float
    started_at: datetime | None


class Nodes:
    """Members of the cluster, out of the one membership object."""

    def __init__(self, blobs: Blobs) -> None:
        self._roster = Roster(blobs)
        self._kept: tuple[tuple[Candidate, ...], int, Table] | None = None

    async def list(self) -> Sequence[NodeSeen]:
        """Every node by name. Raises: BlobsDown."""
        membership = await self._roster.read()
        shares = await asyncio.to_thread((await self.table(membership)).shares)
        return [
            NodeSeen(
                name=member.name,
                address=member.address,
                dc=member.dc,
                weight=member.weight,
                state=member.state,
                share=round(shares.get(member.name, 0.0), 4),
                started_at=_moment(member.started_at_s),
            )
            for member in sorted(membership.members, key=lambda one: one.name)
        ]

    async def get(self, name: str) -> NodeSeen:
        """One node. Raises: NodeUnknown, BlobsDown."""
        for node in await self.list():
            if node.name == name:
                return node
        raise NodeUnknown(f"no media node {name!r}: see `headrace media nodes ls`")

    async def drain(self, name: str) -> NodeSeen:
        """Give `name` no partitions any more; it serves what comes to it. Raises: NodeUnknown, BlobsDown."""
        await self._roster.drain(name)
        return await self.get(name)

    async def undrain(self, name: str) -> NodeSeen:
        """Give `name` its partitions again. Raises: NodeUnknown, BlobsDown."""
        await self._roster.undrain(name)
        return await self.get(name)

    async def set_weight(self, name: str, weight: float) -> NodeSeen:
        """Let `name` have `weight` times the partitions of a node of weight 1.

        Raises: NodeUnknown, InvalidNode, BlobsDown.
        """
        await self._roster.set_weight(name, weight)
        return await self.get(name)

    async def remove(self, name: str) -> None:
        """Forget a node that is gone for good; one that still runs enters again with its next start.

        Raises: NodeUnknown, BlobsDown.
        """
        await self._roster.remove(name)

    async def membership(self) -> Membership:
        """The document itself. Raises: BlobsDown."""
        return await self._roster.read()

    async def table(self, membership: Membership) -> Table:
        """Who owns which partition now: 0.3 s of computing where the nodes are others than last time."""
        candidates, replicas = membership.candidates(time.time()), membership.replicas
        if self._kept is None or self._kept[:2] != (candidates, replicas):
            table = await asyncio.to_thread(Table.build, candidates, replicas)
            self._kept = (candidates, replicas, table)
        return self._kept[2]


def _moment(at_s: float) -> datetime | None:
    return datetime.fromtimestamp(at_s, UTC) if at_s else None
