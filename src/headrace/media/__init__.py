"""Media: objects of the object store, served by byte range to many clients.

Promise: never a wrong byte. An answer that cannot be completed correctly is cut off, so that no
client takes it for complete.

Limits: a request for several ranges gets the whole object. Requests with a body are refused. A
replaced object may be served in its old version for a minute, unless it is purged.

Media needs the object store only; it stores nothing in PostgreSQL or Valkey. Losing the blocks on a
node's disks causes cache misses only.

A request: a worker accepts it, `requests` parses it, `signing` checks its URL, `cluster` routes it,
`sources` gives shape and blocks, `ranges` decides the answer, `answers` writes the head, and the
worker sends.

    ranges       status and bytes of an answer (pure)
    requests     parse heads of HTTP/1.1: strict and bounded (pure)
    answers      heads and problem documents as bytes (pure)
    signing      signed URLs
    header_rules header fields by key prefix (pure)
    id3          tags in front of tracks
    variants     variants of images: queries, formats, keys
    tracing      follow one request through the cluster
    sources      shapes and blocks of files, the disk cache and the object store
    cache        the disk cache: shared-memory index, one writing process
    partitions   which nodes keep a key (pure)
    cluster      members, health, requests between nodes, purges
    worker       the processes of a node; `child` is the entry point of each
    hottest      the most requested objects
    simulate     effects of lost nodes and of other cache sizes
    service      `Media` and its services
    http, cli    /v1/media/... and `headrace media ...`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.media.model import MediaConfig, MediaObject

if TYPE_CHECKING:
    from headrace.media.service import Media as Media

__all__ = ["Media", "MediaConfig", "MediaObject"]


def __getattr__(name: str) -> Any:
    """Import the services on first use; reading the configuration does not need them."""
    if name == "Media":
        from headrace.media.service import Media

        return Media
    raise AttributeError(f"module 'headrace.media' has no attribute {name!r}")
