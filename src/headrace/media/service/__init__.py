"""The services of media, by topic. `Media` gives each as an attribute.

app.media.objects.url("tracks/a.mp3")   await app.media.objects.put(key, data)
await app.media.purges.purge([key])     await app.media.warming.warm([key])
await app.media.nodes.drain("n1")
await app.media.entry.list()            await app.media.entry.render("haproxy")
await app.media.partitions.plan(lost=["n1"])

`disks` and `hottest` are about the node that uses this data folder:

await app.media.disks.verify()          await app.media.hottest.list()
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from headrace.engines.blobs import Blobs
from headrace.media import signing
from headrace.media.cluster.upstream import Upstream
from headrace.media.model import MediaConfig
from headrace.media.service.entry import Entry
from headrace.media.service.nodes import Disks, HottestObjects, Nodes, Partitions
from headrace.media.service.objects import Objects, Purging, TagStore
from headrace.media.service.uploads import Uploads
from headrace.media.service.warming import Warming
from headrace.media.sources import ObjectReader
from headrace.media.tracing import Traces

__all__ = ["Media"]


class Media:
    """The services of media. `blobs` belongs to the caller; nothing is opened here.

    `folder` is where the node of this machine keeps its sockets.
    """

    keeps_rows: ClassVar[bool] = False
    """Media stores nothing in PostgreSQL: its commands need the object store only."""

    def __init__(
        self,
        blobs: Blobs,
        config: MediaConfig,
        *,
        secret: Callable[[], str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.blobs = blobs
        self.config = config
        self.secret = secret
        self.folder = folder
        self.upstream: Upstream | None = None
        if config.upstream:
            self.upstream = Upstream(
                config.upstream, self._upstream_keys, timeout_s=config.origin_timeout_s
            )
        self.origin: ObjectReader = self.upstream or blobs
        self.tags = TagStore(blobs, config)
        self.objects = Objects(blobs, config, self.tags, secret=secret)
        self.uploads = Uploads(blobs, config)
        self.purges = Purging(blobs)
        self.nodes = Nodes(blobs)
        self.partitions = Partitions(self.nodes)
        self.entry = Entry(self.nodes)
        self.warming = Warming(self.origin, self.nodes, config, self.objects.target)
        self.traces = Traces(blobs)
        self.disks = Disks(folder)
        self.hottest = HottestObjects(folder)

    async def close_upstream(self) -> None:
        """Close the connections to the upstream cluster, if there is one."""
        if self.upstream is not None:
            await self.upstream.close()

    def _upstream_keys(self) -> signing.Keys:
        """The keys that sign requests to the upstream cluster. Raises: WeakSecret."""
        assert self.secret is not None, "this Media has no secret"
        root = self.config.upstream_secret or self.secret()
        return signing.Keys.derive(root, use=signing.TIER_USE)
