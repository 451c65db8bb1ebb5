"""Settings, object shapes and metrics of media."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from headrace.kernel.config import (
    parse_choice,
    parse_count_between,
    parse_duration_s,
    parse_listen,
    parse_size_bytes,
    parse_text,
    parse_url,
    setting,
)
from headrace.kernel.metrics import FINE_BUCKETS_S, counter, gauge, histogram
from headrace.kernel.signing import ROOT_CHARACTERS_MIN
from headrace.media.header_rules import HeaderRule, parse_header_rules

BLOCK_BYTES: Final = 256 * 1024
"""The size of a frame, of a read of the origin, and of a check for cached pages."""

LIST_OBJECTS_MAX: Final = 1000
WEIGHT_MAX: Final = 100
WEIGHT_MIN: Final = 0.01
WORKERS_MAX: Final = 64
SIZE_SETTING: Final = "media.disks (HEADRACE_MEDIA_DISKS)"
"""The setting to correct if a cache disk does not fit, as errors name it."""
REPLICAS_MAX: Final = 8
REPLICAS_PER_CENTER: Final = 2
"""The default. If one data center and one node of each other fail, a replica of every key is left.
"""
CONNECTIONS_LIMIT: Final = 10_000_000
DISK_BYTES_MIN: Final = 16 * 2**20
DISK_BYTES_MAX: Final = 256 * 2**40
"""More than any disk has. Its table would need 35 GB of memory."""
UPLOAD_BYTES_LIMIT: Final = 64 * 2**30
SIDE_MAX: Final = 4096
"""The most pixels of a side that a variant may request."""
VARIANT_SIZES_MAX: Final = 32
ANY_ORIGIN: Final = "*"
NAME_MARK: Final = "{name}"
_ORIGIN: Final = re.compile(
    r"https?://(?:[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[1-9][0-9]{0,4})?"
)
_WEIGHT: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?")
_VARIANT_SIZE: Final = re.compile(r"([1-9][0-9]{0,3})?(?:x([1-9][0-9]{0,3}))?")
_NODE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CONTENT_ADDRESS: Final = re.compile(r"photos/([0-9a-f]{2})/(\1[0-9a-f]{62})\.[a-z0-9]+")

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
"""Only types that browsers do not execute (no html, svg, xml, js), because users upload objects."""
STATUSES: Final = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    304: "Not Modified",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    412: "Precondition Failed",
    414: "URI Too Long",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
"""The statuses of answers with their reasons (RFC 9110)."""
REQUESTS: Final = counter(
    "media_requests_total", "Answers begun, by status.", status=map(str, STATUSES)
)
SOURCES: Final = ("memory", "disk", "peer", "origin")
SENT_BYTES: Final = counter("media_bytes_total", "Bytes of bodies sent, by source.", source=SOURCES)
BLOCKS: Final = counter(
    "media_blocks_total",
    "Blocks begun to be sent, by cache result: hit, miss (filled first), pass (not stored).",
    outcome=("hit", "miss", "pass"),
)
DEMAND_STALLS: Final = counter(
    "media_demand_stalls_total",
    "Times a client waited for data of its source: disk, node or object store.",
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
    "Time to the first byte by stage, of every 16th request.",
    buckets_s=FINE_BUCKETS_S,
    stage=STAGES,
)
CHILD_DEATHS: Final = counter(
    "media_child_deaths_total",
    "Processes of a node that died and were restarted.",
    child=("worker", "filler"),
)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A folder or block device to cache blocks on, and how much of it to use."""

    path: Path
    size_bytes: int


def parse_disks(text: str) -> tuple[DiskConfig, ...]:
    """Parse disks such as `/var/cache/a:100GiB, /dev/sdb:1TiB`; empty: none. Raises: ValueError."""
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


def parse_upstream(text: str) -> tuple[str, ...]:
    """Parse URLs such as `https://media.example.com`; empty: none. Raises: ValueError."""
    found = tuple(part.strip().rstrip("/").lower() for part in text.split(",") if part.strip())
    if not all(_ORIGIN.fullmatch(url) for url in found) or len(set(found)) < len(found):
        raise ValueError(
            "different URLs without a path such as https://n1.example.com,"
            " https://n2.example.com:8443"
        )
    return found


def parse_preferred_url(text: str) -> str:
    """Parse a URL with `{name}` in its host. Raises: ValueError."""
    url = text.strip().rstrip("/")
    wanted = "a URL with {name} in its host such as https://{name}.media.example.com"
    try:
        parts = urlsplit(url)
    except ValueError as error:  # with a text of Python, as for http://[
        raise ValueError(wanted) from error
    is_right = parts.scheme in ("http", "https") and url.count(NAME_MARK) == 1
    if not is_right or NAME_MARK not in parts.netloc:
        raise ValueError(wanted)
    return url


def parse_origins(text: str) -> tuple[str, ...]:
    """Parse `*`, or origins such as `https://a.example`; empty: none. Raises: ValueError."""
    found = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    if found != (ANY_ORIGIN,) and not all(_ORIGIN.fullmatch(origin) for origin in found):
        raise ValueError(
            "* or origins without a path such as https://a.example, http://localhost:3000"
        )
    return found


class VariantSize(NamedTuple):
    """The sides of a variant in pixels; 0 follows the other one."""

    width: int
    height: int

    def __str__(self) -> str:
        """Such as `400x300`, `400` or `x300`."""
        return f"{self.width or ''}{f'x{self.height}' if self.height else ''}"


def parse_variants(text: str) -> tuple[VariantSize, ...] | None:
    """Parse `signed`, or sizes such as `320, x200, 640x480`; empty: None. Raises: ValueError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or parts == ["signed"]:
        return () if parts else None
    sizes = []
    for match in map(_VARIANT_SIZE.fullmatch, parts):
        sides = [int(side or 0) for side in match.groups()] if match else [0, 0]
        if not 1 <= max(sides) <= SIDE_MAX or len(parts) > VARIANT_SIZES_MAX:
            raise ValueError(
                f"`signed`, or at most {VARIANT_SIZES_MAX} sizes of 1 to {SIDE_MAX} pixels such as"
                " 320, x200, 640x480"
            )
        sizes.append(VariantSize(*sides))
    return tuple(sizes)


def parse_secrets(text: str) -> tuple[str, ...]:
    """Parse secrets separated by commas; empty: none. Raises: ValueError."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if any(len(secret) < ROOT_CHARACTERS_MIN for secret in found):
        raise ValueError(
            f"secrets of {ROOT_CHARACTERS_MIN} characters or more, separated by commas"
        )
    return found


def parse_secret(text: str) -> str:
    """Parse one secret. Raises: ValueError."""
    if len(text.strip()) < ROOT_CHARACTERS_MIN:
        raise ValueError(f"a secret of {ROOT_CHARACTERS_MIN} characters or more")
    return text.strip()


def parse_weight(text: str) -> float:
    """Parse a weight from 0.01 to 100, such as `0.5`. Raises: ValueError."""
    if not _WEIGHT.fullmatch(text.strip()) or not WEIGHT_MIN <= float(text) <= WEIGHT_MAX:
        raise ValueError(f"a weight from {WEIGHT_MIN:g} to {WEIGHT_MAX} such as 1 or 0.5")
    return float(text)


def parse_node(text: str) -> str:
    """Parse a node's name, which is used in hops, logs and commands. Raises: ValueError."""
    if not _NODE_NAME.fullmatch(text.strip()):
        raise ValueError("a name of 1 to 64 of A-Z a-z 0-9 . _ - such as n1")
    return text.strip()


def parse_time_s(text: str) -> float:
    """Parse a duration above zero; zero would cut every client. Raises: ValueError."""
    if not (time_s := parse_duration_s(text)):
        raise ValueError("a duration above zero such as 10s")
    return time_s


def parse_upload_max(text: str) -> int:
    """Parse a size up to 64 GiB, whose parts a resumable upload can have. Raises: ValueError."""
    if not 1 <= (size_bytes := parse_size_bytes(text)) <= UPLOAD_BYTES_LIMIT:
        raise ValueError("a size from 1B to 64GiB")
    return size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Section `media`."""

    listen: tuple[str, int] = setting(
        "127.0.0.1:8081", "Address and port that serve media.", parse_listen
    )
    public_url: str | None = setting(
        None,
        "The URL prefix in front of /m/; unset: the listen address.",
        parse_url("http", "https"),
    )
    preferred_url: str | None = setting(
        None,
        "The URL prefix of one node or data center by its {name}, such as"
        " https://{name}.media.example.com; `headrace media entry dns` makes these DNS names.",
        parse_preferred_url,
    )
    listen_tls: tuple[str, int] | None = setting(
        None, "Address and port that serve media over HTTPS.", parse_listen
    )
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate and its chain; reloaded when it changes.",
        parse_text,
    )
    tls_key: str | None = setting(None, "PEM file with the certificate's private key.", parse_text)
    signed: str = setting(
        "off",
        "`required`: only signed URLs are served; `off`: also unsigned ones.",
        parse_choice("off", "required"),
    )
    accepted_secrets: tuple[str, ...] = setting(
        "",
        "Further values of HEADRACE_SECRET whose signed URLs are accepted: the next one before a"
        " change, the previous one after it.",
        parse_secrets,
        secret=True,
    )
    cors_origins: tuple[str, ...] = setting(
        "",
        "Origins whose scripts may read media, such as https://a.example, or * for all; unset:"
        " none. Embedding with <audio> or <img> needs no permission.",
        parse_origins,
    )
    upload_max_bytes: int = setting(
        "16GiB",
        "Largest resumable upload; at most 64GiB.",
        parse_upload_max,
    )
    upload_ttl_s: float = setting(
        "24h", "After this time an unfinished resumable upload is removed.", parse_time_s
    )
    uploads_max: int = setting(
        "1000", "Maximum of unfinished resumable uploads.", parse_count_between(1, 100_000)
    )
    headers: tuple[HeaderRule, ...] = setting(
        "",
        "Tables [[media.headers]] that set response headers by key prefix: Cache-Control of"
        " unsigned URLs, and others. In the environment a JSON list.",
        parse_header_rules,
    )
    url_ttl_s: float = setting("1h", "How long a signed URL is valid by default.", parse_time_s)
    variants: tuple[VariantSize, ...] | None = setting(
        "",
        "Sizes of images that unsigned URLs may request with ?w= and ?h=, such as 320, x200,"
        " 640x480; `signed`: only signed URLs may. Unset: no variants are made.",
        parse_variants,
    )
    workers: int = setting(
        "0",
        "Processes that serve; 0: one for each core, or more if the file limit requires it.",
        parse_count_between(0, WORKERS_MAX),
    )
    data_plane: str = setting(
        "auto",
        "`auto`: compiled C code serves what is cached, if it can be compiled here;"
        " `python`: Python serves all.",
        parse_choice("auto", "python"),
    )
    access_log: str = setting(
        "off",
        "Log each answer: `off`, `json` or `combined`.",
        parse_choice("off", "json", "combined"),
    )
    access_log_path: str | None = setting(
        None, "File of the access log, rotated by renaming it; unset: standard output.", parse_text
    )
    disks: tuple[DiskConfig, ...] = setting(
        "",
        "Where objects are cached: /folder:100GiB, /dev/sdb:1TiB. Unset: nothing is cached,"
        " and objects of a folder are sent directly.",
        parse_disks,
    )
    node: str | None = setting(
        None, "This node's name in the cluster; unset: no cluster.", parse_node
    )
    advertise: tuple[str, int] | None = setting(
        None,
        "Host and port by which the other nodes reach this one; unset: the listen address.",
        parse_listen,
    )
    dc: str = setting("", "The data center of this node.", str.strip)
    upstream: tuple[str, ...] = setting(
        "",
        "URLs of nodes, or of load balancers, of another cluster, from which objects are"
        " read instead of from the object store: https://n1.example.com, https://n2.example.com.",
        parse_upstream,
    )
    upstream_secret: str | None = setting(
        None,
        "The HEADRACE_SECRET of the upstream cluster, or one of its accepted secrets; unset: the"
        " same as here.",
        parse_secret,
        secret=True,
    )
    weight: float = setting(
        "1.0", "This node's share of the keys, relative to the weights of the others.", parse_weight
    )
    replicas: int = setting(
        "0",
        "How many nodes keep an object; 0: two in each data center, at most 8.",
        parse_count_between(0, REPLICAS_MAX),
    )
    copy_rate: int = setting(
        "0",
        "Requests per second of one process for an object of other nodes above which this"
        " node caches it too; 0: never.",
        parse_count_between(0, CONNECTIONS_LIMIT),
    )
    connections_max: int = setting(
        "4096",
        "Maximum of concurrent clients; further ones get 503. The file limit may lower it.",
        parse_count_between(1, CONNECTIONS_LIMIT),
    )
    header_timeout_s: float = setting(
        "10s",
        "Time limit for receiving a complete request head.",
        parse_time_s,
    )
    idle_timeout_s: float = setting(
        "60s", "How long a connection may wait for its next request.", parse_time_s
    )
    send_timeout_s: float = setting(
        "60s",
        "Time in which a client must receive send_progress bytes; otherwise its connection"
        " is closed.",
        parse_time_s,
    )
    send_progress_bytes: int = setting(
        "16KiB", "The least a client must receive in each send_timeout.", parse_size_bytes
    )
    origin_timeout_s: float = setting(
        "10s",
        "Time limit for one answer of a remote object store.",
        parse_time_s,
    )
    stop_timeout_s: float = setting(
        "10s", "How long a node that stops completes its answers in progress.", parse_duration_s
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The facts that decide an answer. `etag` is unquoted; `is_immutable`: the key is the hash."""

    size_bytes: int
    etag: str
    modified_s: int
    is_immutable: bool


@dataclass(frozen=True, slots=True)
class MediaObject:
    """One object as users see it."""

    key: str
    size_bytes: int
    etag: str
    modified_at: datetime
    content_type: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFolder:
    """A page of a folder: its subfolders and objects by name."""

    prefix: str
    folders: list[str]
    """Prefixes of the subfolders."""
    objects: list[MediaObject]
    next_after: str | None
    """The `after` of the next page; None: the last page."""


def content_address(key: str) -> str | None:
    """The SHA-256 in the key of a content-addressed object, or None for any other key."""
    match = _CONTENT_ADDRESS.fullmatch(key)
    return match[2] if match else None


def content_type(key: str) -> str:
    """The content type of `key`, from its extension and a list of harmless types."""
    return CONTENT_TYPES.get(key.rpartition(".")[2].lower(), "application/octet-stream")
