"""Warming: owners read objects before clients request them.

It requests one byte of each block from each owner. The node then reads the whole block from the
object store, as for any client, and only a byte per block crosses the network.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Unpack

from headrace.engines.blobs import BlobMissing
from headrace.kernel.config import http_origin
from headrace.media.cluster.hop import PeerLost, PeerRequest
from headrace.media.cluster.membership import Membership
from headrace.media.cluster.upstream import UpstreamNode
from headrace.media.errors import ObjectUnknown
from headrace.media.model import BLOCK_BYTES, MediaConfig
from headrace.media.service.nodes import Nodes
from headrace.media.sources import ObjectReader
from headrace.media.variants import VariantOptions, formats_to_make

CONNECTIONS: Final = 4
"""Connections to each node: enough for several reads of the object store, few beside clients."""
ANSWER_TIMEOUT_S: Final = 30.0
_FIELDS: Final = (("User-Agent", "headrace-warm"),)


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


class _WarmRequest(NamedTuple):
    """A key that a node is to cache."""

    target: str
    blocks: int


class _Owner(NamedTuple):
    """A node that is to cache keys."""

    name: str
    url: str


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
        requests: dict[_Owner, list[_WarmRequest]] = {}
        membership = await self._nodes.membership()
        for key in keys:
            owners, request = await self._owners(membership, key), await self._request_for(key)
            if any(variant.values()):
                for fm in formats_to_make(variant.get("fm")):
                    target = self._target_of(key, **variant | {"fm": fm})
                    requests.setdefault(owners[0], []).append(_WarmRequest(target, 1))
                continue
            for owner in owners:
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

    async def _owners(self, membership: Membership, key: str) -> list[_Owner]:
        """The owners of `key`. A single node owns all keys."""
        if not membership.members:
            url = http_origin(self._config.listen)
            return [_Owner(url.removeprefix("http://"), url)]
        owners = await self._nodes.owners(membership, key)
        return [_Owner(owner.name, f"http://{owner.address}") for owner in owners]


async def _warm_node(owner: _Owner, requests: list[_WarmRequest]) -> NodeWarmed:
    """Warm one node by several requests at a time; a failure costs its current key."""
    node = UpstreamNode(owner.url, timeout_s=ANSWER_TIMEOUT_S, on_slow=lambda _: None)
    left = list(reversed(requests))
    counts: Counter[str] = Counter()
    faults: list[str] = []

    async def work() -> None:
        while left:
            request = left.pop()
            for number in range(request.blocks):
                if fault := await _fault_of_block(node, request.target, number):
                    counts["failed"] += request.blocks - number
                    faults.append(fault)
                    break
                counts["blocks"] += 1

    try:
        await asyncio.gather(*(work() for _ in range(min(CONNECTIONS, len(requests)))))
    finally:
        node.close()
    return NodeWarmed(owner.name, counts["blocks"], counts["failed"], faults[0] if faults else None)


async def _fault_of_block(node: UpstreamNode, target: str, number: int) -> str | None:
    """Request the first byte of a block; the reason if it was not received."""
    start = number * BLOCK_BYTES
    request = PeerRequest("GET", target, f"bytes={start}-{start}", fields=_FIELDS)
    try:
        answer = await node.request(request)
        await answer.body.whole()
    except PeerLost as error:
        return error.text
    return None if answer.status == 206 else f"block {number} was answered {answer.status}"
