"""Requests to other nodes and their responses: parse a response's head, check what it carries.

Pure, except for the received body.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from headrace.kernel.errors import Unavailable
from headrace.media.cluster.hop import NOTHING, REPLY_FIELD, AnswerSpan
from headrace.media.model import Shape, content_address
from headrace.media.ranges import parse_http_date_s
from headrace.media.sources import PartialBlock

PLAIN_HEAD: Final = re.compile(
    rb"HTTP/1\.1 206 Partial Content\r\nDate: [\x20-\x7e]+\r\nETag: ([\x21-\x7e]+)\r\n"
    rb"Last-Modified: [\x20-\x7e]+\r\nAccept-Ranges: bytes\r\nCache-Control: [\x20-\x7e]+\r\n"
    rb"Cache-Status: [\x20-\x7e]+\r\nContent-Type: [\x20-\x7e]+\r\n"
    rb"X-Content-Type-Options: nosniff\r\nContent-Length: ([0-9]{1,9})\r\n"
    rb"Content-Range: (bytes [0-9]{1,18}-[0-9]{1,18}/[0-9]{1,18})\r\n"
    rb"X-Headrace-Reply: ([0-9a-f]{64})"
)
"""The head with which a node answers a hop for a part. Matching it is faster than parsing."""


class PeerLost(Unavailable):
    """A peer failed to answer as a node does; the next replica is used."""

    code = "media.peer_lost"

    def __init__(self, text: str, *, is_refused: bool = False, is_unanswered: bool = False) -> None:
        super().__init__(text, retry_after_s=1)
        self.is_refused = is_refused
        self.is_unanswered = is_unanswered


class PeerResponse(NamedTuple):
    """A peer's response; field names are in lower case. `mac` is that of the hop field."""

    status: int
    fields: dict[str, str]
    body: PartialBlock
    mac: str


class PeerRequest(NamedTuple):
    """A request to a peer. `span` and `if_match` are the values of Range and If-Match."""

    method: str
    target: str
    span: str = ""
    if_match: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    """Additional fields, not covered by the hop's signature."""
    generation: int = 0


def target_of(key: str) -> str:
    """The path of `key`; keys need no escaping."""
    return f"/m/{key}"


def parse_answer_head(data: bytes) -> tuple[int, dict[str, str]]:
    """Status and fields of a head without its empty line. Raises: ValueError.

    For the head that answers a hop, only the fields that describe and sign the part.
    """
    plain = PLAIN_HEAD.fullmatch(data)
    if plain is not None:
        etag, length_bytes, place, proof = plain.groups()
        return 206, {
            "etag": etag.decode("ascii"),
            "content-length": length_bytes.decode("ascii"),
            "content-range": place.decode("ascii"),
            REPLY_FIELD: proof.decode("ascii"),
        }
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest.partition(" ")[0]
    if version != "HTTP/1.1" or not (status.isascii() and status.isdecimal() and len(status) == 3):
        raise ValueError("its first line is not a status line")
    fields: dict[str, str] = {}
    for connection in lines:
        name, colon, value = connection.partition(":")
        name = name.lower()
        if not colon or name in fields:
            raise ValueError("a field is malformed or repeated")
        fields[name] = value.strip(" \t")
    length = fields.get("content-length", "0")
    if "transfer-encoding" in fields or not (length.isascii() and length.isdecimal()):
        raise ValueError("its length is unclear")
    fields.setdefault("content-length", "0")
    return int(status), fields


def answer_span(response: PeerResponse, request: PeerRequest) -> AnswerSpan | None:
    """The span that a valid response to `request` carries; None: it is another one."""
    if response.status == 404:
        return NOTHING
    etag = response.fields.get("etag", "").strip('"')
    length_bytes = int(response.fields["content-length"])
    if request.method == "HEAD":
        return AnswerSpan(etag, 0, length_bytes) if response.status == 200 else None
    part = request.span[len("bytes=") :]
    start, _, last = part.partition("-")
    is_right = (
        response.status == 206
        and response.fields.get("content-range", "").startswith(f"bytes {part}/")
        and f'"{etag}"' == request.if_match
        and length_bytes == int(last) - int(start) + 1
    )
    return AnswerSpan(etag, int(start), length_bytes) if is_right else None


def shape_of_answer(key: str, response: PeerResponse) -> Shape:
    """The shape of `key` in the response to a HEAD."""
    etag = response.fields.get("etag", "").strip('"')
    modified_s = parse_http_date_s(response.fields.get("last-modified", "")) or 0
    size_bytes = int(response.fields["content-length"])
    return Shape(size_bytes, etag, modified_s, content_address(key) is not None)
