"""The scenario `media`: six nodes in three data centers, an object store, clients and writers.

A node runs the product's cluster, router, peers, connections and bodies on modelled sockets, disks
and store. Promises: a client receives bytes of one version only. Once a node has a purge, it
serves nothing older, and in a healthy cluster each node has it within PURGED_S. A dead, draining or
removed node alone lets no request fail. A herd reads a block of the store once for each replica.
An incomplete body ends with a reset. No change of the members is lost.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.kit.checkers import Finding

from headrace.engines.blobs import BlobsDown
from headrace.kernel.errors import HeadraceError
from headrace.kernel.signing import derive_key
from headrace.media import partitions, tracing
from headrace.media.cache.origin import Origin
from headrace.media.cluster import Cluster, Generations
from headrace.media.cluster.cluster_config import DocumentType, FollowedDocument
from headrace.media.cluster.hop import KEY_USE, HopGuard, HopSigner, parse_answer_head
from headrace.media.cluster.membership import MEMBERSHIP, Member, MembershipStore
from headrace.media.cluster.purge import PURGES, Purges
from headrace.media.model import BLOCK_BYTES, MediaConfig
from headrace.media.service import Media
from headrace.media.sources import CacheSource
from headrace.media.worker.request_context import RequestContext
from verification.simulation.faults import Fault, FaultKind, process_kinds
from verification.simulation.loop import Process
from verification.simulation.media_ledger import DonePurge, MediaLedger, Reply, SentRequest
from verification.simulation.media_model import (
    SLOW_MAX_S,
    STORE,
    CacheModel,
    NodeDisk,
    SimulatedBlobs,
    StoreModel,
    bytes_of,
)
from verification.simulation.media_net import PORT, MediaNetwork, Receiver
from verification.simulation.media_node import SimulatedNode
from verification.simulation.run import SETTLE_MAX_S
from verification.simulation.valkey_faults import Disturbance
from verification.simulation.world import BEGIN, World

NODES: Final = tuple(f"n{n}" for n in range(6))
CENTERS: Final = ("east", "west", "north")
KEYS: Final = tuple(f"photos/{n}.jpg" for n in range(8))
SIZES: Final = (1, 1000, 100_000, BLOCK_BYTES, BLOCK_BYTES + 1, 300_001, 600_000)
SECRET: Final = "a secret of thirty-two characters"
CLIENTS: Final = 6
WRITERS: Final = 2
REMOVED: Final = NODES[-1]
"""The operator removes this node; of the others it sets the weight and drains them."""
PARTITION_BITS: Final = 10
"""Fewer partitions than the product has: a table is built in 5 ms instead of 0.6 s."""
CALM_S: Final = 10.0
CLIENT_TIMEOUT_S: Final = 40.0
SHAPES_FRESH_S: Final = 80.0
READS_AFTER_PURGE: Final = 4
FAULT_MAX_S: Final = 40.0


def _wall_s() -> float:
    return time.time()


class MediaScenario:
    """See the module."""

    gap_s = 12.0
    settle_max_s = SETTLE_MAX_S

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.stream("media")
        self.ledger = MediaLedger()
        self.store = StoreModel(world)
        self.store.on_change = lambda key, stored: self.ledger.note_change(
            key, stored, now_s=world.now_s
        )
        self.net = MediaNetwork(world)
        self.disturbance = Disturbance()
        self.replicas = self.chance.choice([1, 2, 2, 3])
        self.nodes: dict[str, SimulatedNode] = {}
        self.served = 0
        self._disks = {name: NodeDisk(name) for name in NODES}
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-simulation-")
        self._numbers = iter(range(10**9))
        self._is_working = True
        self._members_changed_s = 0.0
        self._wanted: dict[str, list[dict[str, Any]]] = {}
        """The acknowledged state of each member, then what later changes without a reply may have
        made of it.
        """
        world.on_death(self._release_lock)
        world.replaced.update(
            {
                (partitions, "PARTITION_BITS"): PARTITION_BITS,
                (partitions, "PARTITIONS"): 1 << PARTITION_BITS,
                (HopSigner.__init__, "__defaults__"): (_wall_s,),
                (HopGuard.__init__, "__defaults__"): (_wall_s,),
            }
        )

    def _release_lock(self, process: Process) -> None:
        node = self.nodes.get(process.name)
        if node is not None and node.process is process and node.lock is not None:
            os.close(node.lock)

    # Faults

    def fault_kinds(self) -> Sequence[FaultKind]:
        """Faults of nodes, their connections, and the store."""
        kinds = process_kinds(NODES, lasts_max_s=FAULT_MAX_S)
        kinds = [kind for kind in kinds if kind.name != "clock_step"]
        more = {
            "clock_step": (self._clock_step, NODES),
            "breaks": (self._breaks, ["connections"]),
            "store_down": (self._store_down, [STORE]),
            "store_slow": (self._store_slow, [STORE]),
            "store_lossy": (self._store_lossy, [STORE]),
        }
        kinds += [FaultKind(name, act, on, FAULT_MAX_S) for name, (act, on) in more.items()]
        kinds = [self.disturbance.noting(kind, rest_s=5.0) for kind in kinds]
        return [*kinds, FaultKind("down", self._down, NODES, 3 * FAULT_MAX_S, weight=2.0)]

    def _clock_step(self, world: World, fault: Fault) -> Any:
        by_s = (fault.strength - 0.5) * 7200
        world.step_clock(fault.target, by_s)
        return lambda: world.step_clock(fault.target, -by_s)

    def _breaks(self, _world: World, fault: Fault) -> Any:
        self.net.break_links(fault.strength)
        return self.net.heal_links

    def _store_down(self, _world: World, _fault: Fault) -> Any:
        self.store.is_down = True
        return lambda: setattr(self.store, "is_down", False)

    def _store_slow(self, _world: World, fault: Fault) -> Any:
        self.store.slow_s = SLOW_MAX_S * fault.strength**2
        return lambda: setattr(self.store, "slow_s", 0.0)

    def _store_lossy(self, _world: World, fault: Fault) -> Any:
        self.store.lost_share = fault.strength
        return lambda: setattr(self.store, "lost_share", 0.0)

    def _down(self, world: World, fault: Fault) -> Any:
        """A node is dead for long: the others serve its keys soon."""
        world.kill(fault.target, restarts=False)
        self.disturbance.ended_s = max(self.disturbance.ended_s, world.now_s + 5.0)

        def start() -> None:
            self.disturbance.ended_s = max(self.disturbance.ended_s, world.now_s + 5.0)
            if not world.processes[fault.target].is_alive:
                world.start(fault.target, partial(self._node, fault.target))

        return start

    @property
    def is_calm(self) -> bool:
        """Whether there were no faults for a while, except dead nodes."""
        return self.disturbance.calm_s(self.world.now_s) > CALM_S and self.world.now_s > CALM_S

    # Processes

    async def begin(self) -> None:
        """Start the nodes of a cluster that is a day old, and store objects."""
        day_ago_s = BEGIN.timestamp() - 86_400
        members = MembershipStore(self._blobs())
        for number, name in enumerate(NODES):
            member = Member(
                name=name,
                address=f"{name}:{PORT}",
                dc=CENTERS[number % len(CENTERS)],
                started_at_s=day_ago_s,
            )
            await members.register(member, replicas=self.replicas)
            self._wanted[name] = [{"weight": 1.0, "state": "up"}]
        for key in KEYS:
            self._put(key, self.chance.choice(SIZES))
        for name in NODES:
            self.world.start(name, partial(self._node, name))
        await asyncio.sleep(3.0)

    def _put(self, key: str, size_bytes: int) -> None:
        self.store.put(key, bytes_of(key, next(self._numbers), size_bytes))

    def _blobs(self) -> Any:
        return SimulatedBlobs(self.store)

    async def _node(self, name: str) -> None:
        config = MediaConfig(
            listen=(name, PORT),
            node=name,
            dc=CENTERS[NODES.index(name) % len(CENTERS)],
            replicas=self.replicas,
            data_plane="python",
            send_timeout_s=1e6,
        )
        blobs, folder = self._blobs(), Path(self._folder.name) / name
        media = Media(blobs, config, secret=lambda: SECRET, folder=folder)
        generations, watched = Generations(), FollowedDocument(tracing.TRACE)
        origin = Origin(media.origin, timeout_s=config.origin_timeout_s)
        cache: Any = CacheModel(self._disks[name], origin, generations.generation)
        own = CacheSource(cache)
        cluster = Cluster(
            config,
            blobs,
            own=own,
            keys=[derive_key(SECRET, KEY_USE)],
            folder=folder,
            also=[watched],
            generations=generations,
        )
        traces = tracing.TraceLog(lambda: watched.value.watches, node=name)
        context = RequestContext(
            media, own, cluster=cluster, traces=traces, generations=generations, run=folder
        )
        node = self.nodes[name] = SimulatedNode(context, cluster, self._disks[name])
        await cluster.start(config.listen)
        self.net.listen(name, node)
        await asyncio.Event().wait()

    # Clients

    async def work(self, until_s: float) -> None:
        """Let clients, writers and operators work until the time."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(self.world.stream(f"client/{number}")))
            for number in range(WRITERS):
                group.create_task(self._writer(KEYS[number::WRITERS], number))
            for number in range(2):
                nodes = NODES[number:-1:2]
                group.create_task(self._operator(nodes, self.world.stream(f"operator/{number}")))
            group.create_task(self._remover(self.world.stream("remover")))
            group.create_task(self._herds(self.world.stream("herds")))
            await asyncio.sleep(max(0.0, until_s - self.world.now_s))
            self._is_working = False

    async def _client(self, chance: random.Random) -> None:
        while self._is_working:
            await asyncio.sleep(chance.expovariate(1 / 0.5))
            key, span = chance.choice(KEYS), None
            method = chance.choice(["GET", "GET", "GET", "HEAD"])
            if method == "GET" and chance.random() < 0.8:
                start = chance.choice([0, 1, 5000, BLOCK_BYTES - 10, BLOCK_BYTES, BLOCK_BYTES + 9])
                span = start, start + chance.choice([1, 500, 40_000, BLOCK_BYTES, 400_000])
            await self._request(chance.choice(NODES), method, key, span)

    async def _request(
        self, name: str, method: str, key: str, span: tuple[int, int] | None
    ) -> Reply:
        """Send a request and check its answer."""
        node = self.nodes[name]
        sent = SentRequest(
            node=name,
            method=method,
            key=key,
            span=span,
            at_s=self.world.now_s,
            generation=node.purges_version,
            is_calm=self.is_calm and node.process.is_alive,
        )
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                reply = await self._exchange(sent)
        except TimeoutError:
            reply = Reply("late")
        except OSError:
            reply = Reply("refused")
        self.world.trace(method, key, name, reply.end, reply.status, len(reply.body))
        is_same = self.nodes[name] is node and node.process.is_alive
        self.ledger.check(sent, reply, is_same_process=is_same)
        self.served += reply.status in (200, 206)
        is_changed = self.ledger.changed_s(key) > sent.at_s - SHAPES_FRESH_S
        if sent.is_calm and self.is_calm and is_same and not is_changed:
            size_bytes = len(self.ledger.versions[key][-1].data or b"")
            right = (404,) if self.ledger.versions[key][-1].data is None else (200, 206)
            right = (
                (416,) if span is not None and size_bytes <= span[0] and right[0] != 404 else right
            )
            if reply.end != "whole" or reply.status not in right:
                text = f"{reply.end}, status {reply.status}, at {sent.at_s:.3f} s, by {name}"
                self.ledger.findings.append(Finding("not_served", key, text))
        return reply

    async def _exchange(self, sent: SentRequest) -> Reply:
        transport = await self.net.connect(sent.node, Receiver)
        receiver: Receiver = transport.protocol
        text = f"{sent.method} /m/{sent.key} HTTP/1.1\r\nHost: media\r\n"
        if sent.span is not None:
            text += f"Range: bytes={sent.span[0]}-{sent.span[1] - 1}\r\n"
        transport.write(f"{text}\r\n".encode())
        try:
            while b"\r\n\r\n" not in receiver.data:
                if receiver.is_over:
                    return Reply("cut")
                await receiver.more()
            head, _, _ = bytes(receiver.data).partition(b"\r\n\r\n")
            status, fields = parse_answer_head(head)
            del receiver.data[: len(head) + 4]
            length_bytes = 0 if sent.method == "HEAD" else int(fields["content-length"])
            while len(receiver.data) < length_bytes and not receiver.is_over:
                await receiver.more()
        finally:
            transport.abort()
        end = "whole"
        if len(receiver.data) < length_bytes:
            end = "cut" if receiver.is_reset else "short"
        return Reply(end, status, fields, bytes(receiver.data))

    async def _writer(self, keys: Sequence[str], number: int) -> None:
        """Replace and delete objects, and purge most of them."""
        chance, blobs = self.world.stream(f"writer/{number}"), self._blobs()
        while self._is_working:
            await asyncio.sleep(chance.expovariate(1 / 3))
            key = chance.choice(keys)
            try:
                if chance.random() < 0.15:
                    await blobs.delete(key)
                else:
                    size_bytes = chance.choice(SIZES)
                    await blobs.put(key, bytes_of(key, next(self._numbers), size_bytes))
            except BlobsDown:
                pass
            if chance.random() < 0.8:
                await self._purge(Purges(blobs), key, chance)

    async def _purge(self, purges: Purges, key: str, chance: random.Random) -> None:
        first = self.ledger.newest(key)
        try:
            if chance.random() < 0.8:
                generation = await purges.purge(key)
            else:
                generation = await purges.purge_prefix(key[:-4])
        except HeadraceError:
            return
        self.world.trace("purged", key, generation)
        self.ledger.purges[key].append(DonePurge(generation, self.world.now_s, first))
        for _ in range(READS_AFTER_PURGE):
            await asyncio.sleep(chance.uniform(0, 1.2))
            name, method = chance.choice(NODES), chance.choice(["GET", "HEAD"])
            span = (0, chance.choice([1, 500_000])) if method == "GET" else None
            await self._request(name, method, key, span)

    async def _herds(self, chance: random.Random) -> None:
        """Request a new object everywhere at once; each replica reads a block of it once."""
        while self._is_working:
            await asyncio.sleep(chance.expovariate(1 / 20))
            key = f"herds/{next(self._numbers)}.jpg"
            began_s = self.world.now_s
            self._put(key, 2 * BLOCK_BYTES)
            etag = self.store.find(key).info.etag
            is_calm = self.is_calm and self._is_steady(began_s)
            names = [name for name in NODES if self.nodes[name].process.is_alive]
            whole = (0, 2 * BLOCK_BYTES)
            requests = [self._request(chance.choice(names), "GET", key, whole) for _ in range(12)]
            await asyncio.gather(*requests)
            if not (is_calm and self.is_calm and self._is_steady(began_s)):
                continue
            for number in range(2):
                reads = self.store.block_reads[key, etag, number]
                if not 1 <= reads <= self.replicas:
                    text = f"block {number} was read {reads} times for {self.replicas} replicas"
                    self.ledger.findings.append(Finding("herd", key, text))

    def _is_steady(self, began_s: float) -> bool:
        """Whether the members were the same for a while."""
        return self._members_changed_s < began_s - CALM_S and all(
            node.process.is_alive for node in self.nodes.values()
        )

    # Operators

    async def _operator(self, nodes: Sequence[str], chance: random.Random) -> None:
        """Drain nodes and set their weights; another operator does it to other nodes."""
        members = MembershipStore(self._blobs())
        while self._is_working:
            await asyncio.sleep(chance.expovariate(1 / 25))
            name, wanted = chance.choice(nodes), chance.choice(["up", "up", "draining"])
            states = self._wanted[name]
            weight = chance.choice([0.5, 1.0, 2.0])
            is_weight = chance.random() < 0.5
            self._members_changed_s = self.world.now_s
            change = {"weight": weight} if is_weight else {"state": wanted}
            after = [state | change for state in states]
            states += [state for state in after if state not in states]
            try:
                if is_weight:
                    await members.set_weight(name, weight)
                elif wanted == "up":
                    await members.undrain(name)
                else:
                    await members.drain(name)
                states[:] = list({repr(state): state for state in after}.values())
            except HeadraceError:
                pass
            self._members_changed_s = self.world.now_s

    async def _remover(self, chance: random.Random) -> None:
        """Remove a node; its next start adds it again."""
        members = MembershipStore(self._blobs())
        while self._is_working:
            await asyncio.sleep(chance.expovariate(1 / 90))
            self._members_changed_s = self.world.now_s
            try:
                await members.remove(REMOVED)
            except HeadraceError:
                continue
            self._members_changed_s = self.world.now_s

    # Checks

    async def is_settled(self) -> bool:
        """Whether all nodes live and follow the newest documents."""
        if self.ledger.findings:
            return True
        if not self.is_calm:
            return False
        for node in self.nodes.values():
            if node.cluster.members.value.version != self._stored_version(MEMBERSHIP):
                return False
            if node.purges_version != self._stored_version(PURGES):
                return False
        for key in KEYS:
            for name in NODES:
                await self._request(name, "GET", key, None)
        return True

    def _stored_version(self, kind: DocumentType[Any]) -> int:
        stored = self.store.objects.get(kind.key)
        return kind.decode(stored.data).version if stored is not None else 0

    def findings(self) -> list[Finding]:
        """Broken promises."""
        return [*self.ledger.findings, *self._check_members(), *self._check_purges()]

    def _check_members(self) -> list[Finding]:
        membership = MEMBERSHIP.decode(self.store.find(MEMBERSHIP.key).data)
        found = []
        for name, states in self._wanted.items():
            member = membership.member(name)
            if name == REMOVED:
                continue
            has = {"weight": member.weight, "state": member.state} if member is not None else None
            if has not in states:
                found.append(Finding("member_lost", name, f"it is {has}, expected {states}"))
        return found

    def _check_purges(self) -> list[Finding]:
        generations = Generations()
        if PURGES.key in self.store.objects:
            generations.accept(self.store.find(PURGES.key).data)
        return [
            Finding("purge_lost", key, f"generation {purge.generation}")
            for key, purges in self.ledger.purges.items()
            for purge in purges
            if generations.generation(key) < purge.generation
        ]
