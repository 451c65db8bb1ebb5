"""ID3v2 tags written virtually in front of tracks: one buyer's copy of an MP3 without a stored copy.

A tag (title, artist, album, cover, buyer) is rendered once, into the bytes of an ID3v2.4 tag, and stored under
the SHA-256 of them; a signed URL names it. What a client reads is that object followed by the track without
its own tag: two spans of two ordinary objects, so blocks of the track are shared by all buyers, a slow
client holds no memory, and length, ETag and every range are known before a byte is read.

A track that begins with an ID3v2 tag of its own loses it (its bytes are skipped): of two tags in a row readers
show the first, the second or both. An ID3v1 tag at the end stays: readers prefer ID3v2.

frames    tags as bytes and back; their limits
joined    two objects as one: shape, spans, the length of a track's own tag
"""

from __future__ import annotations

from headrace.media.id3.frames import (
    TAG_BYTES_MAX,
    TagCorrupt,
    TagInvalid,
    Tags,
    read_tags,
    tag_bytes,
)
from headrace.media.id3.joined import (
    START_BYTES,
    TAGS_PREFIX,
    OwnTags,
    Piece,
    Tagged,
    own_tag_bytes,
    tag_id,
    tag_key,
)

__all__ = [
    "START_BYTES",
    "TAGS_PREFIX",
    "TAG_BYTES_MAX",
    "OwnTags",
    "Piece",
    "TagCorrupt",
    "TagInvalid",
    "Tagged",
    "Tags",
    "own_tag_bytes",
    "read_tags",
    "tag_bytes",
    "tag_id",
    "tag_key",
]
