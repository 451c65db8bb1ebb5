"""Fetching keys before they are asked for: each owner is asked for one byte of each block.

So a node needs to understand nothing new, and a byte a block is all that goes over the network: the node
reads the block whole from the object store, as it does for any client who begins there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from headrace.engines.blobs import BlobMissing, Blobs
from headrace.media.errors import NoNodes
from headrace.media.model import BLOCK_BYTES, MediaConfig, ObjectUnknown
from headrace.media.partitions import partition_of
from headrace.media.service.nodes import Nodes

CONNECTIONS: Final = 4
"""To each node: several blocks are on their way from the object store, and clients still come first."""
ANSWER_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class NodeWarmed:
    """What one node has now; `fault` is its first, told once."""

    node: str
    blocks: int
    failed: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class Warmed:
    """How many keys there were, and what each node made of the blocks that it owns of them."""

    keys: int
    nodes: tuple[NodeWarmed, ...]


@dataclass(frozen=True, slots=True)
class _Wish:
    """One key that a node is to have."""

    target: str
    blocks: int


class Warming:
    """Asks the nodes that own keys to fetch them. `target_of`: path and query that they accept."""

    def __init__(
        self, blobs: Blobs, nodes: Nodes, config: MediaConfig, target_of: Callable[[str], str]
    ) -> None:
        self._blobs = blobs
        self._nodes = nodes
        self._config = config
        self._target_of = target_of

    async def warm(self, keys: Sequence[str]) -> Warmed:
        """Have every owner of each key fetch all its blocks; those it has cost it nothing.

        Nodes that do not answer are told in the result. Raises: ObjectUnknown, InvalidBlobKey, NoNodes,
        BlobsDown.
        """
        wishes: dict[tuple[str, str, int], list[_Wish]] = {}
        addresses = await self._addresses()
        for key in keys:
            wish = await self._wish(key)
            for owner in addresses(key):
                wishes.setdefault(owner, []).append(wish)
        told = await asyncio.gather(*(_warm_node(node, rows) for node, rows in wishes.items()))
        return Warmed(len(keys), tuple(sorted(told, key=lambda row: row.node)))

    async def _wish(self, key: str) -> _Wish:
        try:
            info = await self._blobs.info(key)
        except BlobMissing as error:
            raise ObjectUnknown(
                f"no object {key[:80]!r} is stored: list what is with `headrace media ls`"
            ) from error
        return _Wish(self._target_of(key), -(-info.size_bytes // BLOCK_BYTES))

    async def _addresses(self) -> Callable[[str], list[tuple[str, str, int]]]:
        """Of a key: name, host and port of its owners; a node without a cluster owns all."""
        membership = await self._nodes.membership()
        if not membership.members:
            host, port = self._config.listen
            return lambda _: [(f"{host}:{port}", host, port)]
        known = {member.name: member.address for member in membership.members}
        table = await self._nodes.table(membership)

        def owners(key: str) -> list[tuple[str, str, int]]:
            names = table.owners(partition_of(key))
            if not names:
                raise NoNodes("no node takes partitions: see `headrace media nodes ls`")
            found = []
            for name in names:
                host, _, port = known[name].rpartition(":")
                found.append((name, host.strip("[]"), int(port)))
            return found

        return owners


async def _warm_node(node: tuple[str, str, int], wishes: list[_Wish]) -> NodeWarmed:
    """All wishes of one node over a few connections; a connection that fails costs its one wish."""
    name, host, port = node
    left = list(reversed(wishes))
    counts: Counter[str] = Counter()
    faults: list[str] = []

    async def work() -> None:
        while left:
            wish = left.pop()
            done = 0
            try:
                async for _ in _asked(host, port, wish):
                    done += 1
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                counts["failed"] += wish.blocks - done
                faults.append(str(error) or type(error).__name__)
            counts["blocks"] += done

    await asyncio.gather(*(work() for _ in range(min(CONNECTIONS, len(wishes)))))
    return NodeWarmed(name, counts["blocks"], counts["failed"], faults[0] if faults else None)


async def _asked(host: str, port: int, wish: _Wish) -> AsyncIterator[int]:
    """Each block's number, once its first byte has come."""
    async with _connected(host, port) as (reader, writer):
        for number in range(wish.blocks):
            start = number * BLOCK_BYTES
            writer.write(
                f"GET {wish.target} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: headrace-warm\r\n"
                f"Range: bytes={start}-{start}\r\n\r\n".encode()
            )
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status = head.split(b"\r\n", 1)[0].decode("latin-1")
                if b" 206 " not in head[:16]:
                    raise ValueError(f"block {number} was answered {status!r}")
                await reader.readexactly(1)
            yield number


@asynccontextmanager
async def _connected(
    host: str, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.close()
