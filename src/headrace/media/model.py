"""What the media room speaks of: settings, errors, series, and what is known of one object.

Statuses that HTTP defines more finely than the eleven kinds (405, 408, 412, 414, 416, 431, 501, 505) are
set on the error itself, so that the table of errors still names every answer this room can give.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from headrace.kernel.config import (
    parse_count,
    parse_duration_s,
    parse_listen,
    parse_size_bytes,
    parse_text,
    parse_url,
    setting,
)
from headrace.kernel.errors import (
    Conflict,
    InvalidInput,
    Malformed,
    NotFound,
    TooLarge,
    Unavailable,
)
from headrace.kernel.metrics import FINE_BUCKETS_S, counter, gauge, histogram
from headrace.kernel.signing import ROOT_CHARACTERS_MIN
from headrace.media.cors import parse_origins

BLOCK_BYTES: Final = 256 * 1024
"""What is stored in a frame, asked of an origin at once, and looked at for being in memory at once."""

LIST_OBJECTS_MAX: Final = 1000
WEIGHT_MAX: Final = 100
WEIGHT_MIN: Final = 0.01
WORKERS_MAX: Final = 64
REPLICAS_MAX: Final = 8
REPLICAS_PER_CENTRE: Final = 2
"""The default: a lost centre and a node of each other one leave a replica of every key, half of all requests enter at one."""
CONNECTIONS_LIMIT: Final = 10_000_000
DISK_BYTES_MIN: Final = 16 * 2**20
DISK_BYTES_MAX: Final = 256 * 2**40
"""More than any disk has; 35 GB of memory for its table."""
_WEIGHT: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?")
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CONTENT_ADDRESS: Final = re.compile(
    r"photos/([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})\.[a-z0-9]+"
)

CONTENT_TYPES: Final = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "avif": "image/avif",
    "mp3": "audio/mpeg",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "ogg": "audio/ogg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "mp4": "video/mp4",
    "webm": "video/webm",
}
"""Nothing a browser would run (html, svg, xml, js) may enter: users' uploads are served from here."""


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A folder or a block device that blocks are kept on, and how much of it."""

    path: Path
    size_bytes: int


def parse_disks(text: str) -> tuple[DiskConfig, ...]:
    """Disks of `/var/cache/a:100GiB, /dev/sdb:1TiB`; the empty text is none. Raises: ValueError."""
    disks: list[DiskConfig] = []
    for part in (p.strip() for p in text.split(",") if p.strip()):
        path, _, size = part.rpartition(":")
        if not path.startswith("/"):
            raise ValueError("absolute paths and sizes such as /var/cache/a:100GiB, /dev/sdb:1TiB")
        size_bytes = parse_size_bytes(size)
        if not DISK_BYTES_MIN <= size_bytes <= DISK_BYTES_MAX:
            raise ValueError("sizes from 16MiB to 256TiB for each disk")
        disks.append(DiskConfig(Path(path), size_bytes))
    if len({disk.path for disk in disks}) < len(disks):
        raise ValueError("disks of which none is named twice")
    return tuple(disks)


def parse_signed(text: str) -> str:
    """`off` or `required`. Raises: ValueError."""
    if text.strip() not in ("off", "required"):
        raise ValueError("off or required")
    return text.strip()


def parse_secrets(text: str) -> tuple[str, ...]:
    """Secrets separated by commas; the empty text is none. Raises: ValueError."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if any(len(secret) < ROOT_CHARACTERS_MIN for secret in found):
        raise ValueError(
            f"secrets of {ROOT_CHARACTERS_MIN} characters or more, separated by commas"
        )
    return found


def parse_weight(text: str) -> float:
    """A weight from 0.01 to 100, such as `0.5`. Raises: ValueError."""
    if not _WEIGHT.fullmatch(text.strip()) or not WEIGHT_MIN <= float(text) <= WEIGHT_MAX:
        raise ValueError(f"a weight from {WEIGHT_MIN:g} to {WEIGHT_MAX} such as 1 or 0.5")
    return float(text)


def parse_node(text: str) -> str:
    """A node's name, which stands in hops, logs and commands. Raises: ValueError."""
    if not _NODE_NAME.fullmatch(text.strip()):
        raise ValueError("a name of 1 to 64 of A-Z a-z 0-9 . _ - such as n1")
    return text.strip()


def parse_time_s(text: str) -> float:
    """A duration that is not nothing: with none every client would be cut. Raises: ValueError."""
    if not (time_s := parse_duration_s(text)):
        raise ValueError("a duration of more than nothing such as 10s")
    return time_s


def parse_count_between(least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers in bounds."""

    def parse(text: str) -> int:
        if not least <= (count := parse_count(text)) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return count

    return parse


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Section `media`."""

    listen: tuple[str, int] = setting(
        "127.0.0.1:8081", "Address and port that serve media.", parse_listen
    )
    public_url: str | None = setting(
        None,
        "What stands in front of /m/ in URLs; unset: the listen address.",
        parse_url("http", "https"),
    )
    listen_tls: tuple[str, int] | None = setting(
        None, "Address and port that serve the same over HTTPS.", parse_listen
    )
    tls_cert: str | None = setting(
        None,
        "File with the certificate and its chain, PEM; looked at again when it changes.",
        parse_text,
    )
    tls_key: str | None = setting(None, "File with the certificate's private key, PEM.", parse_text)
    signed: str = setting(
        "off", "`required`: only signed URLs are served; `off`: also plain ones.", parse_signed
    )
    accepted_secrets: tuple[str, ...] = setting(
        "",
        "Further values of HEADRACE_SECRET whose signed URLs are accepted: the next one before a change, the"
        " former one after it.",
        parse_secrets,
        secret=True,
    )
    cors_origins: tuple[str, ...] = setting(
        "",
        "Origins whose scripts may read media, such as https://a.example, or * for all; unset: none."
        " Embedding with <audio> or <img> needs no permission.",
        parse_origins,
    )
    url_ttl_s: float = setting(
        "1h", "How long a signed URL is good when nothing else is said.", parse_time_s
    )
    workers: int = setting(
        "0",
        "Processes that serve; 0: one a core, or more where the limit of files asks for it.",
        parse_count_between(0, WORKERS_MAX),
    )
    disks: tuple[DiskConfig, ...] = setting(
        "",
        "Where blocks are cached: /folder:100GiB, /dev/sdb:1TiB; unset: nothing is cached, and objects of"
        " a folder are sent directly.",
        parse_disks,
    )
    node: str | None = setting(
        None, "This node's name in the cluster; unset: it stands alone.", parse_node
    )
    advertise: tuple[str, int] | None = setting(
        None,
        "Host and port by which the other nodes reach this one; unset: the listen address.",
        parse_listen,
    )
    dc: str = setting("", "The data centre of this node.", str.strip)
    weight: float = setting(
        "1.0", "This node's share of the keys, beside the weights of the others.", parse_weight
    )
    replicas: int = setting(
        "0",
        "How many nodes keep an object; 0: two in each data centre, at most 8.",
        parse_count_between(0, REPLICAS_MAX),
    )
    connections_max: int = setting(
        "4096",
        "Clients held at once; one more is answered 503. The limit of files may lower it.",
        parse_count_between(1, CONNECTIONS_LIMIT),
    )
    header_timeout_s: float = setting(
        "10s",
        "A request's head must be complete within this, however it trickles.",
        parse_time_s,
    )
    idle_timeout_s: float = setting(
        "60s", "How long a connection may wait for its next request.", parse_time_s
    )
    send_timeout_s: float = setting(
        "60s",
        "The time in which a client must take send_progress bytes, or it is cut.",
        parse_time_s,
    )
    send_progress_bytes: int = setting(
        "16KiB", "The least a client must take in each send_timeout.", parse_size_bytes
    )
    origin_timeout_s: float = setting(
        "10s",
        "How long an object store that is no folder may take for one answer.",
        parse_time_s,
    )
    stop_timeout_s: float = setting(
        "10s", "How long answers under way may go on after a stop.", parse_duration_s
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """What an object's answer is decided from. `etag` is bare; `is_immutable`: the name is its hash."""

    size_bytes: int
    etag: str
    modified_s: int
    is_immutable: bool


@dataclass(frozen=True, slots=True)
class MediaObject:
    """One object as people see it."""

    key: str
    size_bytes: int
    etag: str
    modified_at: datetime
    content_type: str
    url: str


class ObjectUnknown(NotFound):
    """No object of that key is stored, or the path can name none."""

    code = "media.object_unknown"


class BadRequest(Malformed):
    """The bytes are no request that can be framed without doubt; the connection is closed."""

    code = "media.bad_request"


class MethodNotAllowed(Malformed):
    """The method is none of GET, HEAD and OPTIONS."""

    code, status = "media.method_not_allowed", 405


class HeadTimeout(Malformed):
    """The head of a request did not arrive in time."""

    code, status = "media.head_timeout", 408


class PreconditionFailed(Conflict):
    """If-Match or If-Unmodified-Since names another version than the stored one."""

    code, status = "media.precondition_failed", 412


class TargetTooLong(TooLarge):
    """The path is over its bound."""

    code, status = "media.target_too_long", 414


class RangeUnsatisfiable(InvalidInput):
    """The range begins after the object's end."""

    code, status = "media.range_unsatisfiable", 416


class HeadTooLarge(TooLarge):
    """The header fields are over their bounds."""

    code, status = "media.head_too_large", 431


class TransferCodingUnknown(Malformed):
    """The request has a Transfer-Encoding that is not known here."""

    code, status = "media.transfer_coding_unknown", 501


class VersionUnknown(Malformed):
    """The request is of another HTTP version than 1.0 or 1.1."""

    code, status = "media.version_unknown", 505


class StoreUnavailable(Unavailable):
    """The object store does not answer."""

    code = "media.store_unavailable"


class SourceCut(Unavailable):
    """An object ended, changed or failed while it was being sent; its connection is cut."""

    code = "media.source_cut"


class ListenFailed(Conflict):
    """The address to serve on cannot be taken."""

    code = "media.listen_failed"


class WrongContentAddress(InvalidInput):
    """The bytes are not those whose hash the key names."""

    code = "media.wrong_content_address"


class TooManyConnections(Unavailable):
    """This node holds as many clients as it may."""

    code = "media.too_many_connections"


def content_address(key: str) -> str | None:
    """The SHA-256 in the name of a content-addressed object, or None for any other key."""
    match = _CONTENT_ADDRESS.fullmatch(key)
    return match[3] if match else None


def content_type(key: str) -> str:
    """The type to serve `key` with: from its extension, out of a list of harmless ones."""
    return CONTENT_TYPES.get(key.rpartition(".")[2].lower(), "application/octet-stream")


STATUSES: Final = (
    200, 204, 206, 304, 400, 403, 404, 405, 408, 409, 412, 414, 416, 431, 500, 501, 503, 505,
)  # fmt: skip
REQUESTS: Final = counter(
    "media_requests_total", "Answers begun, by status.", status=map(str, STATUSES)
)
SOURCES: Final = ("memory", "disk", "peer", "origin")
SENT_BYTES: Final = counter("media_bytes_total", "Bytes of bodies sent, by source.", source=SOURCES)
BLOCKS: Final = counter(
    "media_blocks_total",
    "Blocks begun to be sent, by what the store had of them: hit, miss (filled, then sent), pass (not placed).",
    outcome=("hit", "miss", "pass"),
)
DEMAND_STALLS: Final = counter(
    "media_demand_stalls_total", "Times a client was ready for bytes that its source had not yet."
)
CUTS: Final = counter(
    "media_cuts_total",
    "Connections cut before their answer was complete.",
    reason=("client", "source", "stalled", "stop"),
)
CONNECTIONS: Final = gauge("media_connections", "Clients connected now.")
TTFB: Final = histogram(
    "media_ttfb_seconds",
    "From a complete head to the first byte handed to the kernel.",
    buckets_s=FINE_BUCKETS_S,
)
STAGES: Final = ("parse", "verify", "find", "wait", "send")
STAGE: Final = histogram(
    "media_stage_seconds",
    "What the time to the first byte went into, of every 16th request.",
    buckets_s=FINE_BUCKETS_S,
    stage=STAGES,
)
CHILD_DEATHS: Final = counter(
    "media_child_deaths_total",
    "Processes of a node that ended unasked and were started again.",
    child=("worker", "filler"),
)
