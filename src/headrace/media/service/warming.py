"""Warming: owners read objects before clients request them.

It requests one byte of each block from each owner. The node then reads the whole block from the
object store, as for any client, and only a byte per block crosses the network.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Unpack

from headrace.engines.blobs import BlobMissing
from headrace.media.errors import NoNodes, ObjectUnknown
from headrace.media.model import BLOCK_BYTES, MediaConfig
from headrace.media.partitions import partition_of
from headrace.media.service.nodes import Nodes
from headrace.media.sources import ObjectReader
from headrace.media.variants import VariantOptions, formats_to_make

CONNECTIONS: Final = 4
"""Connections to each node: enough for several reads of the object store, few beside clients."""
ANSWER_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class NodeWarmed:
    """The blocks that one node has now; `fault` is its first error."""

    node: str
    blocks: int
    failed: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class Warmed:
    """The number of keys, and the result of each node for its blocks."""

    keys: int
    nodes: tuple[NodeWarmed, ...]


@dataclass(frozen=True, slots=True)
class _WarmRequest:
    """A key that a node is to cache."""

    target: str
    blocks: int


class Warming:
    """Has owners of keys read them. `target_of` returns a path and query that nodes accept."""

    def __init__(
        self,
        blobs: ObjectReader,
        nodes: Nodes,
        config: MediaConfig,
        target_of: Callable[..., str],
    ) -> None:
        self._blobs = blobs
        self._nodes = nodes
        self._config = config
        self._target_of = target_of

    async def warm(self, keys: Sequence[str], **variant: Unpack[VariantOptions]) -> Warmed:
        """Have every owner of each key read all its blocks; cached blocks cost it nothing.

        With a `variant` that is made instead, unless `fm` names a format in all that are
        negotiated. The result reports nodes that fail. Raises: ObjectUnknown, InvalidBlobKey,
        InvalidVariant, VariantNotAllowed, NoNodes, BlobsDown.
        """
        requests: dict[tuple[str, str, int], list[_WarmRequest]] = {}
        addresses = await self._addresses()
        for key in keys:
            request = await self._request_for(key)
            if any(variant.values()):
                for fm in formats_to_make(variant.get("fm")):
                    target = self._target_of(key, **variant | {"fm": fm})
                    requests.setdefault(addresses(key)[0], []).append(_WarmRequest(target, 1))
                continue
            for owner in addresses(key):
                requests.setdefault(owner, []).append(request)
        results = await asyncio.gather(*(_warm_node(node, rows) for node, rows in requests.items()))
        return Warmed(len(keys), tuple(sorted(results, key=lambda row: row.node)))

    async def _request_for(self, key: str) -> _WarmRequest:
        try:
            info = await self._blobs.info(key)
        except BlobMissing as error:
            raise ObjectUnknown(
                f"no object {key[:80]!r} is stored: list what is with `headrace media ls`"
            ) from error
        return _WarmRequest(self._target_of(key), -(-info.size_bytes // BLOCK_BYTES))

    async def _addresses(self) -> Callable[[str], list[tuple[str, str, int]]]:
        """For a key: name, host and port of its owners. A single node owns all keys."""
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


async def _warm_node(node: tuple[str, str, int], requests: list[_WarmRequest]) -> NodeWarmed:
    """Warm one node over several connections; a failing connection costs its current key."""
    name, host, port = node
    left = list(reversed(requests))
    counts: Counter[str] = Counter()
    faults: list[str] = []

    async def work() -> None:
        while left:
            request = left.pop()
            done = 0
            try:
                async for _ in _first_bytes(host, port, request):
                    done += 1
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                counts["failed"] += request.blocks - done
                faults.append(str(error) or type(error).__name__)
            counts["blocks"] += done

    await asyncio.gather(*(work() for _ in range(min(CONNECTIONS, len(requests)))))
    return NodeWarmed(name, counts["blocks"], counts["failed"], faults[0] if faults else None)


async def _first_bytes(host: str, port: int, request: _WarmRequest) -> AsyncIterator[int]:
    """Each block's number, once its first byte was received."""
    async with _connected(host, port) as (reader, writer):
        for number in range(request.blocks):
            start = number * BLOCK_BYTES
            writer.write(
                f"GET {request.target} HTTP/1.1\r\nHost: {host}:{port}\r\n"
                "User-Agent: headrace-warm\r\n"
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
