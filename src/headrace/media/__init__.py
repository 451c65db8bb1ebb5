"""media: objects of the object store, served by byte range to very many clients.

Promise: never a wrong byte. What cannot be completed rightly is cut, never ended cleanly.
Limits: answers to several ranges are whole; requests with a body are refused; a changed object may be
served as it was for a minute, unless it is purged. Engines: the object store alone; nothing of this room is
kept in PostgreSQL or Valkey. Blocks on a node's disks, and what the cluster shares in the object store, may be lost:
misses come of it.

The way of a request: a worker accepts, `requests` parses, `signing` admits, `cluster` routes, `sources` gives shape and
blocks (`store`: of our own disks), `ranges` decides, `answers` writes the head, the worker sends.

ranges       which answer and which bytes a request gets (pure, a heart)
requests     heads of HTTP/1.1 out of bytes: strict and bounded (pure)
answers      heads and problem documents as bytes (pure)
signing      signed URLs;  id3  tags in front of tracks;  tracing  one request followed through the cluster
sources      files, our own disks, the object store: who gives shapes and blocks
store        blocks on disks, found through shared memory; the filler (a heart)
partitions   who keeps a key (pure);  cluster  members, health, the one hop, purges
worker       the processes of a node, the data plane;  child  one of them;  hottest  what clients ask for most
simulate     what a lost node or another cache size does
service      `Media` and its verbs
http, cli    /v1/media/... and `headrace media ...`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.media.model import MediaConfig, MediaObject

if TYPE_CHECKING:
    from headrace.media.service import Media as Media

__all__ = ["Media", "MediaConfig", "MediaObject"]


def __getattr__(name: str) -> Any:
    """Import the room on first use: whoever reads the configuration needs its settings alone."""
    if name == "Media":
        from headrace.media.service import Media

        return Media
    raise AttributeError(f"module 'headrace.media' has no attribute {name!r}")
