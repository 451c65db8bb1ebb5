"""A worker's part in the cluster: follow the shared documents, probe peers, update the router.

Each worker of a node has one. They share only the copies of the documents in the node's folder.
After a change of members a new partition table is built in steps of 2 ms, and the old one serves
until it is complete. Nodes with different tables at that moment send one more request to each
other; bytes stay correct, because every node answers the requests of its peers.

A second live node with the same name is detected, since both would replace each other's entry
repeatedly. The address in the entry gets an authenticated request. Only a node with this cluster's
secret and that name can sign the reply; another server at the address or another node of the
cluster cannot.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from headrace.engines.blobs import Blobs
from headrace.kernel.config import parse_listen
from headrace.kernel.errors import Conflict, HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import bound, gauge
from headrace.kernel.resilience import BackgroundTasks, wait_event
from headrace.kernel.signing import Key
from headrace.media.cluster.cluster_config import PREFIX, DocumentPoller, FollowedDocument
from headrace.media.cluster.hop import (
    NOTHING,
    REPLY_FIELD,
    HopGate,
    HopGuard,
    HopSigner,
    PeerLost,
    PeerRequest,
    target_of,
)
from headrace.media.cluster.membership import (
    MEMBERSHIP,
    Member,
    Membership,
    MembershipStore,
    member_of,
)
from headrace.media.cluster.peers import PROBE_EVERY_S, Peer
from headrace.media.cluster.purge import PURGES, Generations, Purges
from headrace.media.cluster.routing import Router
from headrace.media.cluster.upstream import Upstream, follow_purges
from headrace.media.hottest import HOTTEST, Row
from headrace.media.model import MediaConfig
from headrace.media.partitions import Candidate, build_in_steps
from headrace.media.sources import OriginSource, Source

log = logger(__name__)
ANSWER_TIMEOUT_S: Final = 3.0
_NOWHERE: Final = f"{PREFIX}no-such-document"
_WILD: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class NodeNameTaken(Conflict):
    """Another running node has this node's name."""

    code = "media.node_name_taken"


async def require_unique_name(
    entered: Member, own: Member, signer: HopSigner, listen: tuple[str, int]
) -> None:
    """Raise NodeNameTaken if `entered`, the entry of this name, belongs to another live node."""
    if entered.address == own.address or await asyncio.to_thread(is_local, entered.address, listen):
        return
    if await _answers(entered, signer):
        raise NodeNameTaken(
            f"node {own.name} runs at {entered.address}, so {own.address} is not registered:"
            " give each node its own media.node, or stop the other one and run"
            f" `headrace media nodes rm {own.name}`"
        )


def is_local(address: str, listen: tuple[str, int]) -> bool:
    """Whether `address` leads to this node, which listens at `listen`."""
    host, port = parse_listen(address)
    if port != listen[1]:
        return False
    if listen[0] not in _WILD:
        return host == listen[0]
    try:
        family, _, _, _, at = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(at)
    except OSError:
        return False
    return True


async def _answers(entered: Member, signer: HopSigner) -> bool:
    peer = Peer(entered, signer, timeout_s=ANSWER_TIMEOUT_S)
    try:
        answer = await peer.request(PeerRequest("HEAD", target_of(_NOWHERE)))
    except PeerLost:
        return False
    finally:
        peer.close()
    # A reply of 503 is not signed; the request is repeated before the name is taken over.
    proof = answer.fields.get(REPLY_FIELD, "")
    return answer.status == 503 or signer.is_authentic(answer.mac, proof, NOTHING)


LOOK_EVERY_S: Final = 0.25
BUILD_PAUSE_S: Final = 0.005
"""Pause after each step of a table that replaces another one: requests are answered in it."""
COPIED_MAX: Final = 64
"""Objects of other nodes that one process copies at most."""
REGISTER_TIMEOUT_S: Final = 10.0
REGISTER_RETRY_S: Final = 2.0
DUPLICATE_RETRY_S: Final = 5.0
HOP_MARGIN_S: Final = 2.0
"""Time limit of a request to a peer beyond the origin's, since the peer may have to read the
origin.
"""
PEERS: Final = gauge(
    "media_peers", "Other nodes of the cluster, by whether they are used.", state=("in", "out")
)


class Cluster:
    """A worker's part in the cluster. Owns its tasks: call `start`, then `close`."""

    def __init__(
        self,
        config: MediaConfig,
        blobs: Blobs,
        *,
        own: Source,
        keys: Sequence[Key],
        folder: Path,
        generations: Generations,
        also: Sequence[FollowedDocument[Any]] = (),
        upstream: Upstream | None = None,
    ) -> None:
        name = config.node or ""
        self._config = config
        self._blobs = blobs
        self._upstream = upstream
        self._signer = HopSigner(keys, name)
        self.members = FollowedDocument(MEMBERSHIP)
        self.router = Router(
            own,
            OriginSource(upstream or blobs, timeout_s=config.origin_timeout_s),
            generations,
            name=name,
            dc=config.dc,
            signer=self._signer,
            on_peer_out=self._probe_soon,
        )
        self.gate = HopGate(
            HopGuard(keys, name) if name else None,
            generations,
            refresh_purges=self._refresh_purges,
        )
        self._polling = DocumentPoller(blobs, folder, [self.members, generations, *also])
        self._built_of: tuple[int, tuple[Candidate, ...]] | None = None
        self._has_table = asyncio.Event()
        self._peers: dict[str, Peer] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()
        self._member: Member | None = None
        self._listen = config.listen
        self._registering: asyncio.Task[None] | None = None
        self._often = SparseLogger(log)

    async def start(self, listen: tuple[str, int] | None = None) -> None:
        """Follow the cluster, and register this node if `media.node` is set.

        `listen` is its address.

        Waits in the background while the object store is unavailable. Raises: InvalidNode, OSError
        (the folder).
        """
        if self._config.node:
            self._listen = listen or self._config.listen
            self._member = member_of(self._config, self._listen)
        await self._polling.start()
        if self._upstream is not None:
            purges = Purges(self._blobs)
            self._tasks.start(follow_purges(self._upstream, purges, lambda: self._polling.leads))
        if self._member is not None:
            self._register_soon(self._member)
            self._tasks.start(self._update())

    async def wait_for_table(self, *, within_s: float) -> None:
        """Wait for the first table, without which this node would fetch the keys of all others."""
        if self._member is not None:
            await wait_event(self._has_table, within_s)

    async def close(self) -> None:
        """End all tasks and connections."""
        await self._tasks.cancel()
        await self.router.repairs.cancel()
        for peer in self._peers.values():
            peer.close()
        await self._polling.close()

    def _register_soon(self, member: Member) -> None:
        """Register this node in the background, in the one process that polls the object store."""
        is_under_way = self._registering is not None and not self._registering.done()
        if self._polling.leads and not is_under_way:
            self._registering = self._tasks.start(self._register(member))

    async def _register(self, member: Member) -> None:
        """Register this node; retry while the store is unavailable or another node has its name."""
        member_store = MembershipStore(self._blobs)
        while True:
            try:
                async with asyncio.timeout(REGISTER_TIMEOUT_S):
                    entered = (await member_store.read()).member(member.name)
                    if entered is not None:
                        await require_unique_name(entered, member, self._signer, self._listen)
                    await member_store.register(member, replicas=self._config.replicas)
                    await self._polling.refresh(MEMBERSHIP.name)
            except NodeNameTaken as error:
                self._often.error("node_name_taken", node=member.name, reason=error.text)
                await asyncio.sleep(DUPLICATE_RETRY_S)
            except (HeadraceError, TimeoutError) as error:
                log.warning("node_not_registered", node=member.name, reason=str(error))
                await asyncio.sleep(REGISTER_RETRY_S)
            else:
                return

    async def _update(self) -> None:
        """Keep peers and partition table up to date with the membership."""
        while True:
            try:
                if self._config.copy_rate:
                    self.router.copied = copied_keys(
                        HOTTEST.top(COPIED_MAX), self._config.copy_rate, self.router.copied
                    )
                membership = self.members.value
                self._update_entry(membership)
                self._update_peers(membership)
                candidates = membership.candidates(time.time())
                if self._built_of != (membership.replicas, candidates):
                    pause_s = BUILD_PAUSE_S if self._has_table.is_set() else 0
                    for table in build_in_steps(candidates, membership.replicas):
                        self.router.table = table or self.router.table
                        await asyncio.sleep(pause_s)
                    self._built_of = (membership.replicas, candidates)
                    self._has_table.set()
                    log.info("table_built", version=membership.version, nodes=len(candidates))
            except Exception:
                log.exception("cluster_update_failed")
            await asyncio.sleep(LOOK_EVERY_S)

    def _update_entry(self, membership: Membership) -> None:
        """Register again if a node of the same name replaced the entry.

        A removed entry stays removed.
        """
        assert self._member is not None, "only a node of the cluster tends to it"
        entered = membership.member(self._member.name)
        if entered is not None and entered.address != self._member.address:
            self._register_soon(self._member)

    def _update_peers(self, membership: Membership) -> None:
        wanted = {
            member.name: member for member in membership.members if member.name != self._config.node
        }
        for name, peer in list(self._peers.items()):
            member = wanted.get(name)
            if member is None or (member.address, member.dc) != (peer.address, peer.dc):
                del self._peers[name]
                self._probing.pop(name).cancel()
                peer.close()
        for name in [name for name in wanted if name not in self._peers]:
            timeout_s = self._config.origin_timeout_s + HOP_MARGIN_S
            peer = Peer(wanted[name], self._signer, timeout_s=timeout_s, on_slow=self._probe_soon)
            # It may have registered before it accepts connections.
            peer.health.is_doubted = True
            self._peers[name] = peer
            self._probing[name] = self._tasks.start(self._probe_for_ever(peer))
        self.router.peers = dict(self._peers)
        states = [peer.health.is_usable for peer in self._peers.values()]
        bound(PEERS, "media_peers", state="in").set(states.count(True))
        bound(PEERS, "media_peers", state="out").set(states.count(False))

    async def _probe_for_ever(self, peer: Peer) -> None:
        while True:
            await self._probe(peer)
            await asyncio.sleep(PROBE_EVERY_S * random.uniform(0.9, 1.1))

    async def _probe(self, peer: Peer) -> None:
        """Probe a peer; it is out if it refuses the connection or misses several in a row."""
        if await peer.is_alive():
            if peer.health.note_probe(is_answered=True):
                log.info("peer_back", node=peer.name)
            return
        if peer.health.note_probe(is_answered=False):
            log.warning("peer_out", node=peer.name, why="its probes were not answered")
        peer.drop()

    def _probe_soon(self, peer: Peer) -> None:
        """Probe a peer to which a request is slow or failed, once for all such requests."""
        name = f"probe {peer.name}"
        if all(task.get_name() != name for task in self._tasks):
            self._tasks.start(self._probe(peer), name=name)

    def _refresh_purges(self) -> None:
        self._tasks.start(self._polling.refresh(PURGES.name))


def copied_keys(rows: Sequence[Row], rate: float, copied: Collection[str]) -> frozenset[str]:
    """The keys of `rows` above `rate`. Those in `copied` stay down to half of it."""
    return frozenset(key for key, per_s in rows if per_s >= (rate / 2 if key in copied else rate))
