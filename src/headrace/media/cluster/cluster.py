"""A worker's part in the cluster: it follows the shared documents, probes its peers, keeps its router true.

Each worker of a node has one; they share nothing but the copies of the documents in the node's folder. A
change of members makes a new table beside the traffic, in steps of 2 ms, and the old one serves until
it is there. Nodes that have different tables for that moment ask each other once more, and no wrong byte
comes of it: a hop is answered by whoever gets it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from headrace.engines.blobs import Blobs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger
from headrace.kernel.metrics import bound, gauge
from headrace.kernel.signing import Key
from headrace.media.cluster.health import PROBE_EVERY_S
from headrace.media.cluster.hop import HopGuard, HopSigner
from headrace.media.cluster.membership import (
    MEMBERSHIP,
    Member,
    Membership,
    Roster,
    member_of,
)
from headrace.media.cluster.namesake import NodeNameTaken, Reminder, require_name_free
from headrace.media.cluster.peers import Peer
from headrace.media.cluster.polling import Polled, Polling
from headrace.media.cluster.purge import PURGES, Generations
from headrace.media.cluster.routing import Router
from headrace.media.model import MediaConfig
from headrace.media.partitions import Candidate, Table, build_in_steps
from headrace.media.sources import OriginSource, Source

log = logger(__name__)
LOOK_EVERY_S: Final = 0.25
REGISTER_TIMEOUT_S: Final = 10.0
REGISTER_AGAIN_S: Final = 2.0
NAMESAKE_AGAIN_S: Final = 5.0
HOP_MARGIN_S: Final = 2.0
"""What a hop may take beyond the origin's own time: the peer may have to read it first."""
PEERS: Final = gauge(
    "media_peers", "Other nodes of the cluster, by whether they are asked.", state=("in", "out")
)


class Cluster:
    """What a worker knows of the others. Owner of its tasks: `start`, then `close`."""

    def __init__(
        self,
        config: MediaConfig,
        blobs: Blobs,
        *,
        own: Source,
        keys: Sequence[Key],
        folder: Path,
        generations: Generations | None = None,
        also: Sequence[Polled[Any]] = (),
    ) -> None:
        name = config.node or ""
        self._config = config
        self._blobs = blobs
        generations = generations or Generations()
        self._signer = HopSigner(keys, name)
        self.members = Polled(MEMBERSHIP)
        self.router = Router(
            own,
            OriginSource(blobs, timeout_s=config.origin_timeout_s),
            generations,
            name=name,
            dc=config.dc,
            guard=HopGuard(keys, name) if name else None,
            signer=self._signer,
            refresh_purges=self._refresh_purges,
            on_peer_out=self._probe_soon,
        )
        self._polling = Polling(blobs, folder, [self.members, generations, *also])
        self._built_of: tuple[int, tuple[Candidate, ...]] | None = None
        self._peers: dict[str, Peer] = {}
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._member: Member | None = None
        self._listen = config.listen
        self._registering: asyncio.Task[None] | None = None
        self._namesake_told = Reminder()

    async def start(self, listen: tuple[str, int] | None = None) -> None:
        """Follow the cluster, and enter this node where `media.node` is set; `listen` is what it serves on.

        Raises: InvalidNode, OSError (the folder). A store that is away is waited for beside.
        """
        if self._config.node:
            self._listen = listen or self._config.listen
            self._member = member_of(self._config, self._listen)
        await self._polling.start()
        if self._member is not None:
            self._register_soon(self._member)
            self._begin(self._tend())

    async def close(self) -> None:
        """End all tasks and connections."""
        tasks = [*self._tasks, *self._probing.values(), *self.router.mending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            peer.close()
        await self._polling.close()

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _register_soon(self, member: Member) -> None:
        """Enter this node beside. One process of it is enough, and the one that asks the store is one."""
        is_under_way = self._registering is not None and not self._registering.done()
        if self._polling.leads and not is_under_way:
            task = self._registering = asyncio.get_running_loop().create_task(
                self._register(member)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _register(self, member: Member) -> None:
        """Enter this node, however long the store is away or another one has its name."""
        roster = Roster(self._blobs)
        while True:
            try:
                async with asyncio.timeout(REGISTER_TIMEOUT_S):
                    entered = (await roster.read()).member(member.name)
                    if entered is not None:
                        await require_name_free(entered, member, self._signer, self._listen)
                    await roster.register(member, replicas=self._config.replicas)
                    await self._polling.refresh(MEMBERSHIP.name)
            except NodeNameTaken as error:
                if self._namesake_told.is_due():
                    log.error("node_name_taken", node=member.name, reason=error.text)  # noqa: TRY400 - no fault of code
                await asyncio.sleep(NAMESAKE_AGAIN_S)
            except (HeadraceError, TimeoutError) as error:
                log.warning("node_not_entered", node=member.name, reason=str(error))
                await asyncio.sleep(REGISTER_AGAIN_S)
            else:
                return

    async def _tend(self) -> None:
        """Keep peers and table as the membership and the moment say."""
        while True:
            try:
                membership = self.members.value
                self._tend_entry(membership)
                self._tend_peers(membership)
                candidates = membership.candidates(time.time())
                if self._built_of != (membership.replicas, candidates):
                    self.router.table = await _build_slowly(candidates, membership.replicas)
                    self._built_of = (membership.replicas, candidates)
                    log.info("table_built", version=membership.version, nodes=len(candidates))
            except Exception:
                log.exception("cluster_not_tended")
            await asyncio.sleep(LOOK_EVERY_S)

    def _tend_entry(self, membership: Membership) -> None:
        """Put our own entry right, where a node of our name came and went; one that was removed stays so."""
        assert self._member is not None, "only a node of the cluster tends to it"
        entered = membership.member(self._member.name)
        if entered is not None and entered.address != self._member.address:
            self._register_soon(self._member)

    def _tend_peers(self, membership: Membership) -> None:
        wanted = {
            member.name: member for member in membership.members if member.name != self._config.node
        }
        for name, peer in list(self._peers.items()):
            member = wanted.get(name)
            if member is None or (member.address, member.dc) != (peer.address, peer.dc):
                del self._peers[name]
                self._probing.pop(name).cancel()
                peer.close()
        for name in wanted.keys() - self._peers.keys():
            timeout_s = self._config.origin_timeout_s + HOP_MARGIN_S
            peer = Peer(wanted[name], self._signer, timeout_s=timeout_s, on_slow=self._probe_soon)
            self._peers[name] = peer
            probing = self._probe_for_ever(peer, first_s=random.uniform(0, PROBE_EVERY_S))
            self._probing[name] = asyncio.get_running_loop().create_task(probing)
        self.router.peers = dict(self._peers)
        states = [peer.health.is_usable for peer in self._peers.values()]
        bound(PEERS, "media_peers", state="in").set(states.count(True))
        bound(PEERS, "media_peers", state="out").set(states.count(False))

    async def _probe_for_ever(self, peer: Peer, *, first_s: float) -> None:
        await asyncio.sleep(first_s)
        while True:
            await self._probe(peer)
            await asyncio.sleep(PROBE_EVERY_S * random.uniform(0.9, 1.1))

    async def _probe(self, peer: Peer) -> None:
        """Probe, once more if that fails: one lost packet takes nobody out."""
        if await peer.probe() or await peer.probe():
            if peer.health.probe_succeeded():
                log.info("peer_back", node=peer.name)
            return
        if peer.health.probe_failed():
            log.warning("peer_out", node=peer.name, why="its probes were not answered")
        peer.drop()

    def _probe_soon(self, peer: Peer) -> None:
        """A request to `peer` waits, or failed, perhaps with one worker of it alone: look, once for all."""
        name = f"probe {peer.name}"
        if all(task.get_name() != name for task in self._tasks):
            task = asyncio.get_running_loop().create_task(self._probe(peer), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refresh_purges(self) -> None:
        self._begin(self._polling.refresh(PURGES.name))


async def _build_slowly(candidates: Sequence[Candidate], replicas: int) -> Table:
    """A table, made while everything else goes on."""
    steps = build_in_steps(candidates, replicas)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            table: Table = done.value
            return table
        await asyncio.sleep(0)
