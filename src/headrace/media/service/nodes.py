"""The nodes of the cluster, the owners of keys, planned changes, and the local node.

`LocalNode` is the node that uses this data folder. Only the filler writes to disks, so each method
sends it a command over its socket. For another machine, run the command there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.engines.blobs import Blobs, require_key
from headrace.kernel.errors import require_extra
from headrace.kernel.metrics import STALE_S
from headrace.media.cluster.membership import Member, Membership, MembershipStore, NodeUnknown
from headrace.media.cluster.peers import Peer
from headrace.media.errors import DiskUnknown, NodeNotHere, NoNodes
from headrace.media.hottest import ROWS_MAX, read_hottest
from headrace.media.partitions import Candidate, PartitionTable, partition_of
from headrace.media.simulate.cluster import Load, loads_of

SOCKET: Final = "filler.sock"
OBJECTS_MAX: Final = ROWS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One disk of a node. `id` is the one in its superblock; a refused disk has none.

    `queue` is the number of waiting fills. `is_copied`: blocks are copied instead of sent from the
    page cache, because the probe at the start failed. `rotten` counts the blocks that changed on
    the disk after they were verified, since it was opened.
    """

    id: str
    path: str
    size_bytes: int
    frames: int
    used: int
    state: str
    fault: str = ""
    queue: int = 0
    is_copied: bool = False
    rotten: int = 0


def is_denied(fault: str) -> bool:
    """Whether the fault of a disk is that its node's user may not use the folder."""
    return any(os.strerror(number) in fault for number in (errno.EACCES, errno.EPERM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of verifying blocks. Blocks that are neither were replaced meanwhile."""

    blocks: int
    right: int
    wrong: int
    unread: int


class Disks:
    """The disks of one running node."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    async def list(self) -> Sequence[Disk]:
        """All disks by path. Raises: NodeNotHere, FillerAway."""
        rows = msgspec.convert(await self._ask("disks"), list[Disk])
        return sorted(rows, key=lambda disk: disk.path)

    async def get(self, disk: str) -> Disk:
        """The disk of this id or path. Raises: DiskUnknown, NodeNotHere, FillerAway."""
        for one in await self.list():
            if disk in (one.id, one.path):
                return one
        raise DiskUnknown(f"no disk {disk!r} on this node: see `headrace media disks ls`")

    async def add(self, path: str, size_bytes: int) -> Disk:
        """Add a folder or block device, including blocks that it holds from an earlier use.

        Raises: NodeNotHere, FillerAway, DiskRefused, InvalidDiskSize.
        """
        return await self._change("add", path=path, size_bytes=size_bytes)

    async def drain(self, disk: str) -> Disk:
        """Stop placing blocks on `disk`; its blocks are still served. Raises: as `add`."""
        return await self._change("drain", id=disk)

    async def undrain(self, disk: str) -> Disk:
        """Resume placing blocks on `disk`. Raises: as `add`."""
        return await self._change("undrain", id=disk)

    async def retire(self, disk: str) -> Disk:
        """Take `disk` out of use, so that it can be removed. Its blocks become misses.

        Raises: as `add`.
        """
        return await self._change("retire", id=disk)

    async def verify(self, share: float = 1.0) -> Verified:
        """Compare `share` of all stored blocks with their checksums and drop wrong ones.

        Raises: NodeNotHere, FillerAway.
        """
        return msgspec.convert(await self._ask("verify", share=share), Verified)

    async def _change(self, command: str, **arguments: Any) -> Disk:
        return msgspec.convert(await self._ask(command, **arguments), Disk)

    async def _ask(self, command: str, **arguments: Any) -> Any:
        socket = self._folder / SOCKET if self._folder is not None else None
        if socket is None or not socket.exists():
            raise NodeNotHere(
                "no node with disks runs on this data folder, or it is still starting: set"
                " media.disks and start `headrace media serve`, run this where the node runs, or"
                " try again in some seconds"
            )
        require_extra("media", "xxhash")
        # Imported here, because only nodes with disks need xxhash, and every command imports this
        # module.
        from headrace.media.cache import control

        return await control(socket, command, **arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class HotObject:
    """An object and its rate of requests: a sample of the last minutes."""

    key: str
    requests_per_s: float


class HottestObjects:
    """The objects that clients request most from the node of this data folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    async def list(self, *, objects_max: int = 20) -> Sequence[HotObject]:
        """The most requested objects first, at most 100. Raises: NodeNotHere."""
        rows = None
        if self._folder is not None:
            rows = await asyncio.to_thread(read_hottest, self._folder, within_s=STALE_S)
        if rows is None:
            raise NodeNotHere(
                "no node runs on this data folder: start `headrace media serve`, or run this"
                " where the node runs"
            )
        return [
            HotObject(key=key, requests_per_s=round(per_s, 2)) for key, per_s in rows[:objects_max]
        ]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node as users see it. `share` is the part of the partitions that it serves first.

    `is_alive`: it answers a probe from this machine. `started_at` is the start of its ramp-up over
    five minutes, that of the first node if it joined a new cluster; None: it had none.
    """

    name: str
    address: str
    dc: str
    weight: float
    state: str
    is_alive: bool
    share: float
    started_at: datetime | None


class Nodes:
    """The members of the cluster."""

    def __init__(self, blobs: Blobs) -> None:
        self._members = MembershipStore(blobs)
        self._kept: tuple[tuple[Candidate, ...], int, PartitionTable] | None = None

    async def list(self) -> Sequence[NodeInfo]:
        """All nodes by name, each probed now. Raises: BlobsDown."""
        membership = await self._members.read()
        members = sorted(membership.members, key=lambda one: one.name)
        shares = await asyncio.to_thread((await self.table(membership)).shares)
        alive = await asyncio.gather(*map(answers, members))
        return [
            NodeInfo(
                name=member.name,
                address=member.address,
                dc=member.dc,
                weight=member.weight,
                state=member.state,
                is_alive=is_alive,
                share=round(shares.get(member.name, 0.0), 4),
                started_at=_moment(member.started_at_s),
            )
            for member, is_alive in zip(members, alive, strict=True)
        ]

    async def get(self, name: str) -> NodeInfo:
        """One node. Raises: NodeUnknown, BlobsDown."""
        for node in await self.list():
            if node.name == name:
                return node
        raise NodeUnknown(f"no media node {name!r}: see `headrace media nodes ls`")

    async def drain(self, name: str) -> NodeInfo:
        """Stop assigning partitions to `name`; it still serves. Raises: NodeUnknown, BlobsDown."""
        await self._members.drain(name)
        return await self.get(name)

    async def undrain(self, name: str) -> NodeInfo:
        """Assign partitions to `name` again. Raises: NodeUnknown, BlobsDown."""
        await self._members.undrain(name)
        return await self.get(name)

    async def set_weight(self, name: str, weight: float) -> NodeInfo:
        """Give `name` a share of partitions of `weight` times that of a node of weight 1.

        Raises: NodeUnknown, InvalidNode, BlobsDown.
        """
        await self._members.set_weight(name, weight)
        return await self.get(name)

    async def remove(self, name: str) -> None:
        """Remove a node. A node that still runs registers again at its next start.

        Raises: NodeUnknown, BlobsDown.
        """
        await self._members.remove(name)

    async def membership(self) -> Membership:
        """The membership document. Raises: BlobsDown."""
        return await self._members.read()

    async def table(self, membership: Membership) -> PartitionTable:
        """The current partition table, which is computed again only after a change of nodes."""
        candidates, replicas = membership.candidates(time.time()), membership.replicas
        if self._kept is None or self._kept[:2] != (candidates, replicas):
            table = await asyncio.to_thread(PartitionTable.build, candidates, replicas)
            self._kept = (candidates, replicas, table)
        return self._kept[2]

    async def owners(self, membership: Membership, key: str) -> Sequence[Member]:
        """The nodes that keep `key`, in the order of requests. Raises: NoNodes."""
        names = (await self.table(membership)).owners(partition_of(key))
        if not names:
            raise _no_nodes()
        known = {member.name: member for member in membership.members}
        return [known[name] for name in names]


async def answers(member: Member) -> bool:
    """Whether a node answers a probe from this machine."""
    return await Peer(member, None, timeout_s=1.0).is_alive()


def _no_nodes() -> NoNodes:
    return NoNodes("the cluster has no active node: see `headrace media nodes ls`")


def _moment(at_s: float) -> datetime | None:
    return datetime.fromtimestamp(at_s, UTC) if at_s else None


@dataclass(frozen=True, slots=True)
class Owner:
    """A node that keeps blocks of a key."""

    name: str
    address: str
    dc: str
    state: str


@dataclass(frozen=True, slots=True)
class Ownership:
    """The partition of a key; `owners` in the order of requests."""

    key: str
    partition: int
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Each node's share of all requests now and after a change.

    `filled_share` is the part of all cached blocks that new owners must read from the object store.
    """

    nodes: tuple[Load, ...]
    filled_share: float
    unowned_share: float


class Partitions:
    """The assignment of keys to nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def show(self, key: str) -> Ownership:
        """The owners of `key`, which need not be stored.

        Raises: InvalidBlobKey, NoNodes, BlobsDown.
        """
        owners = await self._nodes.owners(await self._nodes.membership(), require_key(key))
        seen = tuple(Owner(one.name, one.address, one.dc, str(one.state)) for one in owners)
        return Ownership(key, partition_of(key), seen)

    async def plan(
        self,
        *,
        lost: Sequence[str] = (),
        drained: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
    ) -> Plan:
        """The effect of losing or draining nodes or data centers, or of other weights.

        No changes are made. Raises: NodeUnknown, NoNodes, BlobsDown.
        """
        membership = await self._nodes.membership()
        now = list(membership.candidates(time.time()))
        if not now:
            raise _no_nodes()
        gone, away = _named(now, lost), _named(now, drained)
        heavier = {name: weight for name, weight in (weights or {}).items() if _named(now, [name])}
        kept = [
            Candidate(one.name, one.dc, heavier.get(one.name, one.weight))
            for one in now
            if one.name not in away
        ]
        before = after = await self._nodes.table(membership)
        if kept != now:
            after = await asyncio.to_thread(PartitionTable.build, kept, membership.replicas)
        return Plan(*await asyncio.to_thread(loads_of, now, before, after, gone))


def _named(candidates: Sequence[Candidate], names: Sequence[str]) -> frozenset[str]:
    """The nodes of these names; a data center means all its nodes. Raises: NodeUnknown."""
    found: set[str] = set()
    for name in names:
        meant = {one.name for one in candidates if name in (one.name, one.dc)}
        if not meant:
            raise NodeUnknown(
                f"no media node or data center {name!r} is active: see `headrace media nodes ls`"
            )
        found |= meant
    return frozenset(found)
