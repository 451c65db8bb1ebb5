"""Small nodes on real sockets with faults on demand, and a router that sends them requests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import cache

from headrace.kernel.errors import HeadraceError
from headrace.kernel.signing import derive_key
from headrace.media.cluster.hop import KEY_USE, HopGate, HopGuard, HopSigner
from headrace.media.cluster.membership import Member
from headrace.media.cluster.peers import Peer
from headrace.media.cluster.purge import Generations
from headrace.media.cluster.routing import Router
from headrace.media.errors import ObjectUnknown
from headrace.media.model import BLOCK_BYTES, Shape
from headrace.media.partitions import Candidate, PartitionTable
from headrace.media.ranges import decide, format_http_date
from headrace.media.requests import HeadReader, Request, key_of
from headrace.media.sources import Span

KEYS = [derive_key("the secret that the little nodes share", KEY_USE)]


CANNED = {
    "full": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "sends garbage": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
}


@cache
def table_of(nodes: tuple[tuple[str, str], ...], replicas: int) -> PartitionTable:
    return PartitionTable.build([Candidate(name, dc) for name, dc in nodes], replicas)


def shape_of(data: bytes) -> Shape:
    return Shape(len(data), f"etag-{len(data)}-{hash(data) & 0xFFFF:x}", 1_700_000_000, False)


class Shelf:
    """A source over bytes in memory that counts its requests."""

    def __init__(self, name: str, objects: dict[str, bytes]) -> None:
        self.name, self.objects = name, objects
        self.shapes_asked, self.blocks_asked = 0, 0

    def shape_now(self, key: str) -> Shape | None:
        return None

    async def shape(self, key: str) -> Shape:
        self.shapes_asked += 1
        if key not in self.objects:
            raise ObjectUnknown("no object of this key is stored")
        return shape_of(self.objects[key])

    async def block(self, key: str, shape: Shape, number: int, span: Span) -> bytes:
        self.blocks_asked += 1
        start = number * BLOCK_BYTES
        return self.objects[key][start + span.start : start + span.end]


class LittleNode:
    """Serves objects by range to hops, as its `mood` allows."""

    def __init__(self, name: str, objects: dict[str, bytes], *, dc: str = "") -> None:
        self.name, self.objects, self.dc = name, objects, dc
        self.mood = "good"
        self.asked: list[Request] = []
        self.probes = 0
        self.generations = Generations()
        self.going_on = asyncio.Event()
        self.member: Member | None = None
        shelf = Shelf("own", objects)
        self.gate = HopGate(HopGuard(KEYS, name), self.generations, refresh_purges=lambda: None)
        self.router = Router(
            shelf,
            shelf,
            self.generations,
            name=name,
            dc=dc,
            signer=HopSigner(KEYS, name),
            on_peer_out=lambda _: None,
        )
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        port = self._server.sockets[0].getsockname()[1]
        self.member = Member(name=self.name, address=f"127.0.0.1:{port}", dc=self.dc)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader, writer) -> None:
        self._writers.add(writer)
        heads = HeadReader()
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65_536):
                heads.feed(data)
                while (request := heads.take()) is not None:
                    await self._answer(request, writer)
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, request: Request, writer) -> None:
        if self.mood == "hangs":
            await self.going_on.wait()
        if request.target == "/healthz":
            self.probes += 1
            status = "503 Service Unavailable" if self.mood == "full" else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
            return
        self.asked.append(request)
        if self.mood == "slow":
            await self.going_on.wait()
        if self.mood == "resets":
            writer.transport.abort()
            return
        answer = self._whole_answer(request)
        if self.mood in ("pauses", "ends half-way") and request.method == "GET":
            half = len(answer) // 2
            writer.write(answer[:half])
            await writer.drain()
            await self.going_on.wait()
            if self.mood == "ends half-way":
                # In order, so that the sent bytes arrive.
                writer.close()
                return
            answer = answer[half:]
        writer.write(answer)
        if self.mood == "cuts":
            await writer.drain()
            writer.transport.abort()

    def _whole_answer(self, request: Request) -> bytes:
        if self.mood in CANNED:
            return CANNED[self.mood]
        try:
            hop = self.gate.hop_of(request)
        except HeadraceError as error:
            return _answered(f"{error.status} {error.code}", [("Content-Length", "0")], b"")
        assert hop is not None
        data = self.objects.get(key_of(request.target))
        if data is None:
            fields = [] if self.mood == "denies all" else self.gate.reply_fields(hop, "", 0, 0)
            return _answered("404 Not Found", [*fields, ("Content-Length", "0")], b"")
        shape = shape_of(data)
        decision = decide(request.method, request.fields, shape)
        if decision.status == 412:
            return _answered("412 Precondition Failed", [("Content-Length", "0")], b"")
        return self._of_object(request, hop, data, decision)

    def _of_object(self, request, hop, data: bytes, decision) -> bytes:
        shape = shape_of(data)
        start, length = decision.start, decision.length_bytes
        proof = self.gate.reply_fields(hop, shape.etag, start, length)
        if self.mood == "has another secret":
            proof = (("X-Headrace-Reply", "00" * 32),)
        if self.mood == "gives another part":
            start += 1
            proof = self.gate.reply_fields(hop, shape.etag, start, length)
        fields = [
            *proof,
            ("ETag", f'"{shape.etag}"'),
            ("Last-Modified", format_http_date(shape.modified_s)),
            ("Content-Length", str(length)),
        ]
        if decision.status == 206 and self.mood != "ignores ranges":
            last = start + length - 1
            fields.append(("Content-Range", f"bytes {start}-{last}/{shape.size_bytes}"))
            status = "206 Partial Content"
        else:
            status = "200 OK"
        body = b"" if request.method == "HEAD" else data[start : start + length]
        return _answered(status, fields, body[:-1] if self.mood == "cuts" else body)


def _answered(status: str, fields, body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


class AskedRouter:
    """A router of a node without keys of its own, among `nodes`."""

    def __init__(self, nodes: list[LittleNode], objects: dict[str, bytes], replicas: int) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.own, self.origin = Shelf("own", objects), Shelf("origin", objects)
        self.generations = Generations()
        self.outs: list[str] = []
        self.slow: list[str] = []
        signer = HopSigner(KEYS, "asker")
        self.router = Router(
            self.own,
            self.origin,
            self.generations,
            name="asker",
            dc="here",
            signer=signer,
            on_peer_out=lambda peer: self.outs.append(peer.name),
        )
        self.peers = {
            node.name: Peer(
                node.member, signer, timeout_s=1.0, on_slow=lambda p: self.slow.append(p.name)
            )
            for node in nodes
        }
        self.router.peers = self.peers
        self.router.table = table_of(tuple((node.name, node.dc) for node in nodes), replicas)

    def order(self, key: str) -> list[LittleNode]:
        """The nodes in the order of requests for `key`."""
        return [self.nodes[peer.name] for peer in self.router.others(key)]

    async def get(self, key: str, start: int = 0, end: int = 1000) -> bytes:
        """The bytes of the first block, as a request gets them."""
        source = self.router.source(key, None)
        shape = source.shape_now(key) or await source.shape(key)
        data = await source.block(key, shape, 0, Span(start, min(end, shape.size_bytes)))
        assert isinstance(data, bytes)
        return data


@asynccontextmanager
async def asking(objects: dict[str, bytes], *, count: int = 2, replicas: int = 2, dcs=("",)):
    """A router, and nodes that keep its keys."""
    nodes = [LittleNode(f"n{i}", dict(objects), dc=dcs[i % len(dcs)]) for i in range(count)]
    for node in nodes:
        await node.start()
    found = AskedRouter(nodes, objects, replicas)
    try:
        yield found
    finally:
        for node in nodes:
            node.going_on.set()
        for peer in found.peers.values():
            peer.close()
        for node in nodes:
            await node.stop()
