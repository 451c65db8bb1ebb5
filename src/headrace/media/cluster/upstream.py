"""Tiers: read objects from another cluster instead of an object store.

With `media.upstream` the nodes of this cluster, such as a CDN site, read blocks and descriptions
from the nodes or entries of another one, the home. Requests are ordinary ones of `/m/KEY`, signed
with a key of their own purpose (`signing.TIER_USE`). Its holder may also read tags and the purge
list. Each key has its own order of the URLs, so that a node of the home gets the same keys.

**Failover.** A URL that fails costs one retry at the next one. It is then skipped until a probe
succeeds. A block is passed on only when it is complete, so clients notice nothing.

**Versions.** Every block is compared with the ETag that was requested. If a node of the home still
has another version, the block is requested again with If-Match, which that node answers from its
object store. So a body never mixes versions.

**Purges.** The process that polls the documents also polls the home's purge list, and adds new
entries to this cluster's own list after `SETTLE_S`. By then the nodes of the home have applied
them, so nothing is read again from an older copy. The own list records the home's version, so any
number of nodes may do this. Bound: two polls, SETTLE_S and the requests: 8 s.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from headrace.engines.blobs import BlobChanged, BlobInfo, BlobMissing
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger, onward
from headrace.kernel.metrics import bound, counter
from headrace.media import signing
from headrace.media.cluster.cluster_config import POLL_EVERY_S
from headrace.media.cluster.hop import PeerLost, PeerRequest, target_of
from headrace.media.cluster.membership import Member
from headrace.media.cluster.peers import PROBE_EVERY_S, Peer
from headrace.media.cluster.purge import PURGES, Purges
from headrace.media.model import BLOCK_BYTES
from headrace.media.ranges import parse_http_date_s
from headrace.media.sources import UpstreamDown

log = logger(__name__)
URL_VALID_S: Final = 600.0
"""Validity of a signed request, rounded up to a multiple: equal URLs are checked faster."""
SETTLE_S: Final = 2.5
OUTCOMES: Final = ("ok", "missing", "changed", "failed")
REQUESTS: Final = counter(
    "media_upstream_requests_total", "Requests to the upstream cluster.", outcome=OUTCOMES
)
_OUTCOME_OF: Final = {200: "ok", 206: "ok", 404: "missing", 412: "changed", 416: "changed"}
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")


class UpstreamAnswer(NamedTuple):
    """A complete answer of the upstream cluster."""

    status: int
    fields: dict[str, str]
    data: bytes

    @property
    def etag(self) -> str:
        """The ETag without quotes."""
        return self.fields.get("etag", "").strip('"')


class UpstreamNode(Peer):
    """A node or an entry of the upstream cluster."""

    connect_timeout_s = 3.0
    probe_timeout_s = 3.0

    def __init__(self, url: str, *, timeout_s: float, on_slow: Callable[[Peer], None]) -> None:
        parts = urlsplit(url)
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        member = Member(name=parts.netloc, address=address)
        super().__init__(member, None, timeout_s=timeout_s, on_slow=on_slow)
        self.host = parts.netloc
        if is_tls:
            self.tls = ssl.create_default_context()


class Upstream:
    """The objects of another cluster; implements `sources.ObjectReader`."""

    def __init__(
        self, urls: Sequence[str], make_keys: Callable[[], signing.Keys], *, timeout_s: float
    ) -> None:
        self._urls = urls
        self._make_keys = make_keys
        self._timeout_s = timeout_s
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._often = SparseLogger(log)

    @cached_property
    def _keys(self) -> signing.Keys:
        return self._make_keys()

    @cached_property
    def _nodes(self) -> list[UpstreamNode]:
        return [
            UpstreamNode(url, timeout_s=self._timeout_s, on_slow=self._probe_soon)
            for url in self._urls
        ]

    async def info(self, key: str) -> BlobInfo:
        """See `ObjectReader`."""
        answer = await self._request(PeerRequest("HEAD", self._target(key)), key)
        return _info_of(key, answer, int(answer.fields["content-length"]))

    async def read_part(
        self, key: str, start: int, length_bytes: int, *, etag: str = ""
    ) -> tuple[BlobInfo, bytes]:
        """See `ObjectReader`. Raises: BlobMissing, BlobChanged, BlobsDown."""
        span = f"bytes={start}-{start + length_bytes - 1}"
        request = PeerRequest("GET", self._target(key), span)
        answer = await self._request(request, key)
        if etag and answer.etag != etag:
            # Either version may be the newer one: this node looks it up in its object store.
            answer = await self._request(request._replace(if_match=f'"{etag}"'), key)
        part = _CONTENT_RANGE.fullmatch(answer.fields.get("content-range", ""))
        if answer.status != 206 or part is None or int(part[1]) != start:
            raise BlobChanged(f"object {key!r}: upstream has no byte {start} of it: read it again")
        return _info_of(key, answer, int(part[2])), answer.data

    async def read(self, key: str, *, unless: str = "") -> tuple[bytes, str] | None:
        """All bytes and their ETag, or None if it is `unless`. Raises: as `read_part`."""
        info = await self.info(key)
        if info.etag == unless:
            return None
        data = b""
        while len(data) < info.size_bytes:
            count = min(BLOCK_BYTES, info.size_bytes - len(data))
            data += (await self.read_part(key, len(data), count, etag=info.etag))[1]
        return data, info.etag

    async def check(self) -> dict[str, int | str]:
        """By URL: the status of a signed request for the purge list, or why none was received.

        200 and 404 (no purge yet) are right.
        """
        request = PeerRequest("HEAD", self._target(PURGES.key))

        async def status_of(node: UpstreamNode) -> int | str:
            try:
                return (await node.request(request)).status
            except PeerLost as error:
                return error.text

        found = await asyncio.gather(*map(status_of, self._nodes))
        return dict(zip(self._urls, found, strict=True))

    async def close(self) -> None:
        """Close all connections."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        for node in self.__dict__.get("_nodes", ()):
            node.close()

    def _target(self, key: str) -> str:
        path = target_of(key)
        expires_at = signing.expiry_on_grid(time.time(), URL_VALID_S, URL_VALID_S)
        return f"{path}?{signing.sign(self._keys, path, expires_at=expires_at)}"

    async def _request(self, request: PeerRequest, key: str) -> UpstreamAnswer:
        """The complete answer of the first node that has one.

        Raises: BlobMissing, BlobChanged, BlobsDown.
        """
        request = request._replace(fields=onward.get())
        for node in self._order(key):
            answer = await self._request_from(node, request)
            outcome = _OUTCOME_OF.get(answer.status, "failed") if answer else "failed"
            bound(REQUESTS, "media_upstream_requests_total", outcome=outcome).inc()
            if answer is None or outcome == "failed":
                continue
            node.health.succeed()
            if outcome == "missing":
                raise BlobMissing(f"no object {key!r} is stored upstream")
            if outcome == "changed":
                raise BlobChanged(f"object {key!r} has changed upstream: read it again")
            return answer
        raise UpstreamDown("no node of the upstream cluster answers: see media.upstream, the log")

    def _order(self, key: str) -> list[UpstreamNode]:
        """All nodes, in the order of requests for `key`; those that failed last."""

        def rank(node: UpstreamNode) -> tuple[bool, int]:
            return not node.health.is_usable, zlib.crc32(f"{node.name} {key}".encode())

        return sorted(self._nodes, key=rank)

    async def _request_from(
        self, node: UpstreamNode, request: PeerRequest
    ) -> UpstreamAnswer | None:
        """The complete answer of a node, whatever its status; None: it was lost."""
        try:
            head = await node.request(request)
            answer = UpstreamAnswer(head.status, head.fields, await head.body.whole())
        except PeerLost as error:
            if node.health.fail(is_refused=error.is_refused):
                log.warning("upstream_out", node=node.name, why=error.text)
                self._probe_soon(node)
            return None
        if answer.status not in _OUTCOME_OF:
            # It is full, stopping, without its store, or has another secret; probes decide.
            self._often.warning("upstream_refused", node=node.name, status=answer.status)
        return answer

    def _probe_soon(self, node: Peer) -> None:
        """Probe a node that is slow or out until it answers."""
        if node.name not in self._probes:
            task = asyncio.get_running_loop().create_task(self._probe(node))
            self._probes[node.name] = task
            task.add_done_callback(lambda _: self._probes.pop(node.name))

    async def _probe(self, node: Peer) -> None:
        while not await node.probe():
            if node.health.note_probe(is_answered=False):
                log.warning("upstream_out", node=node.name, why="its probes were not answered")
            node.drop()
            await asyncio.sleep(PROBE_EVERY_S)
        if node.health.note_probe(is_answered=True):
            log.info("upstream_back", node=node.name)


async def follow_purges(upstream: Upstream, purges: Purges, leads: Callable[[], bool]) -> None:
    """Add the upstream cluster's purges to `purges` while this process `leads`; never returns."""
    etag = logged = ""
    while True:
        await asyncio.sleep(POLL_EVERY_S)
        if not leads():
            continue
        try:
            found = await upstream.read(PURGES.key, unless=etag)
            if found is not None:
                await asyncio.sleep(SETTLE_S)
                await purges.add_upstream(PURGES.decode(found[0]))
                etag, logged = found[1], ""
        except BlobMissing:
            continue
        except HeadraceError as error:
            if logged != error.text:
                logged = error.text
                log.warning("upstream_purges_not_read", reason=error.text)


def _info_of(key: str, answer: UpstreamAnswer, size_bytes: int) -> BlobInfo:
    modified_s = parse_http_date_s(answer.fields.get("last-modified", "")) or 0
    return BlobInfo(key, size_bytes, answer.etag, datetime.fromtimestamp(modified_s, UTC))
