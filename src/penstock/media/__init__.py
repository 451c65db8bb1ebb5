"""media: objects of the object store, served by byte range to very many clients.

Promise: never a wrong byte. What cannot be completed rightly is cut, never ended cleanly.
Limits: one node of one process, which serves the object store directly; answers to several ranges are
whole; requests with a body are refused. Engines: the object store alone; nothing of this room is kept
in PostgreSQL or Valkey.

The way of a request: `worker` accepts, `requests` parses, `sources` opens, `ranges` decides, `answers`
writes the head, `connection` sends.

ranges       which answer and which bytes a request gets (pure, the heart)
requests     heads of HTTP/1.1 out of bytes: strict and bounded (pure)
answers      heads and problem documents as bytes (pure)
sources      bodies: a file by sendfile, or an object store by blocks
connection   one client: its states, its deadlines, its bounds
deadlines    who is due when, for very many clients
worker       the node: listens, accepts, gives turns; `serve` is the role's loop
service      `Media`: url, put, info, ls, rm
http, cli    /v1/media/objects and `penstock media ...`
"""

from __future__ import annotations

from penstock.media.model import MediaConfig, MediaObject
from penstock.media.service import Media

__all__ = ["Media", "MediaConfig", "MediaObject"]
