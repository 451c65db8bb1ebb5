"""Requests between nodes (hops), authenticated in both directions.

A node that does not keep a key requests it from a replica, by GET or HEAD of the same path on the
same port that clients use, with one additional field:

    X-Headrace-Hop: 1;<key id>;<from>;<to>;<Unix ms>;<connection>;<counter>;<generation>;<HMAC>

The HMAC also covers method, target, Range and If-Match, so the field is useless for another object,
part or node. It is valid for 30 s, and once per worker: `connection` is a random number of the
sender, and its counter only increases. (Another worker would answer a replay, but with bytes that
the eavesdropper has seen already.) An invalid field is refused with 403; it is never treated as a
client request. A valid one is answered from the node's own disks or the origin, never by another
hop. So there is at most one hop, even if nodes disagree.

The answer carries X-Headrace-Reply: an HMAC of the hop's HMAC, ETag, start and length. So bytes of
another server at the address, or of another object or part, are not passed on.

`generation` is the sender's newest purge of the key. A node with an older one reads the purge list
first.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.kernel.errors import Conflict, Forbidden, Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.signing import Key
from headrace.media.cluster.purge import Generations
from headrace.media.model import Shape, content_address
from headrace.media.ranges import parse_http_date_s
from headrace.media.sources import PartialBlock

if TYPE_CHECKING:
    from headrace.media.requests import Request

log = logger(__name__)

HOP_FIELD: Final = "x-headrace-hop"
REPLY_FIELD: Final = "x-headrace-reply"
KEY_USE: Final = "media-hop"
WINDOW_S: Final = 30.0
CONNECTIONS_MAX: Final = 65_536
_FORMAT: Final = "1"
_PARTS: Final = 9
_DIGITS_MAX: Final = 16
_CONNECTION: Final = re.compile("[0-9a-f]{16}")


class HopRefused(Forbidden):
    """A request of another node has an invalid signature or time."""

    code = "media.hop_refused"


class HopAhead(Conflict):
    """The requesting node has a newer purge than this one, which will read it in a moment."""

    code = "media.hop_ahead"


@dataclass(frozen=True, slots=True)
class Hop:
    """An authenticated request of a peer. `mac` ties the answer to it."""

    sender: str
    generation: int
    key: Key
    mac: str


class AnswerSpan(NamedTuple):
    """The part of one version that an answer carries: for HEAD the whole, for 404 nothing."""

    etag: str
    start: int
    length_bytes: int


NOTHING: Final = AnswerSpan("", 0, 0)


class HopSigner:
    """Signs the requests of one node with the first of `keys`. Pure except for the clock."""

    def __init__(
        self, keys: Sequence[Key], sender: str, now_s: Callable[[], float] = time.time
    ) -> None:
        self.key: Final = keys[0]
        self.sender: Final = sender
        self.now_s: Final = now_s

    def sequence(self) -> HopSequence:
        """A signer for the requests of one new connection."""
        return HopSequence(self)

    def is_authentic(self, mac: str, reply: str, span: AnswerSpan) -> bool:
        """Whether `reply` signs this span as the answer to the request of `mac`."""
        return self.key.verify(_proof(mac, span), _unhex(reply))


class HopSequence:
    """Numbers and signs the requests of one connection."""

    __slots__ = ("_connection", "_counter", "_signer")

    def __init__(self, signer: HopSigner) -> None:
        self._signer = signer
        self._connection = secrets.token_hex(8)
        self._counter = itertools.count(1)

    def sign(self, to: str, covered: str, generation: int) -> tuple[str, str]:
        """The hop field of the next request, and its HMAC."""
        key, sender, moment_ms = self._signer.key, self._signer.sender, self._signer.now_s() * 1000
        order = f"{int(moment_ms)};{self._connection};{next(self._counter)}"
        text = f"{_FORMAT};{key.id};{sender};{to};{order};{generation}"
        mac = key.sign(f"hop\n{text}\n{covered}".encode()).hex()
        return f"{text};{mac}", mac


class HopGuard:
    """Checks the hop fields that one worker receives, and rejects replays."""

    def __init__(
        self, keys: Sequence[Key], name: str, now_s: Callable[[], float] = time.time
    ) -> None:
        self.keys: Final[Mapping[str, Key]] = {key.id: key for key in keys}
        self.name: Final = name
        self._now_s = now_s
        self._advance_native: Callable[[int, int], bool] | None = None
        self._newest: dict[str, tuple[int, float]] = {}
        """The last counter and time of each connection, the least recently used first."""

    def judge(self, request: Request) -> Hop | None:
        """The hop of `request`, or None for a client's request. Raises: HopRefused."""
        value = request.fields.get(HOP_FIELD)
        if value is None:
            return None
        parts = value.split(";")
        if (
            len(parts) != _PARTS
            or parts[0] != _FORMAT
            or not all(_is_number(parts[place]) for place in (4, 6, 7))
        ):
            raise _refused("is malformed")
        _, key_id, sender, to, moment_ms, connection, counter, generation, mac = parts
        key = self.keys.get(key_id)
        covered = covered_by(request.method, request.target, request.fields)
        message = f"hop\n{value.rpartition(';')[0]}\n{covered}"
        if key is None or not key.verify(message.encode(), _unhex(mac)):
            raise _refused("is not signed with this cluster's secret")
        if to != self.name:
            raise _refused("is meant for another node")
        now_s = self._now_s()
        away_s = abs(now_s - int(moment_ms) / 1000)
        if away_s > WINDOW_S:
            raise _refused(f"has a time {away_s:.0f} s away from this clock: correct the clocks")
        if not self._advance(connection, int(counter), now_s):
            raise _refused("was received before")
        return Hop(sender, int(generation), key, mac)

    def share_counters(self, advance: Callable[[int, int], bool]) -> None:
        """Keep the counters in the native data plane, which accepts hops too.

        `advance` records a counter of a connection and returns whether it is new.
        """
        self._advance_native = advance

    def _advance(self, connection: str, counter: int, now_s: float) -> bool:
        if self._advance_native is not None and _CONNECTION.fullmatch(connection):
            return self._advance_native(int(connection, 16), counter)
        last, _ = self._newest.pop(connection, (0, 0.0))
        self._newest[connection] = (max(counter, last), now_s)
        self._forget_old(now_s)
        return counter > last

    def _forget_old(self, now_s: float) -> None:
        """Forget connections with expired requests; twice the window covers both clocks."""
        while self._newest:
            connection = next(iter(self._newest))
            is_over = now_s - self._newest[connection][1] > 2 * WINDOW_S
            if not is_over and len(self._newest) <= CONNECTIONS_MAX:
                return
            del self._newest[connection]


class HopGate:
    """Admits the requests of other nodes; without a guard there are none."""

    def __init__(
        self,
        guard: HopGuard | None,
        generations: Generations,
        *,
        refresh_purges: Callable[[], None],
    ) -> None:
        self.guard: Final = guard
        self._generations = generations
        self._refresh_purges = refresh_purges
        self._often = SparseLogger(log)

    def hop_of(self, request: Request) -> Hop | None:
        """The hop of `request`, or None for a client's request. Raises: HopRefused, HopAhead."""
        if self.guard is None:
            return None
        hop = self.guard.judge(request)
        if hop is not None and hop.sender == self.guard.name:
            reason = "another node with this name sent a request"
            self._often.error("node_name_taken", node=self.guard.name, reason=reason)
        if hop is not None and hop.generation:
            key = request.target.partition("?")[0].removeprefix("/m/")
            if hop.generation > self._generations.generation(key):
                self._refresh_purges()
                raise HopAhead(
                    f"{key}: this node has not read its purge yet: try again", retry_after_s=1
                )
        return hop

    def reply_fields(
        self, hop: Hop, etag: str, start: int, length_bytes: int
    ) -> tuple[tuple[str, str], ...]:
        """The field that signs an answer to `hop`: for HEAD the whole object, for 404 an empty
        span.
        """
        return (("X-Headrace-Reply", reply_of(hop, AnswerSpan(etag, start, length_bytes))),)


def covered_by(method: str, target: str, fields: Mapping[str, str]) -> str:
    """The parts of a request's head that a hop field covers."""
    return covered_text(method, target, fields.get("range", ""), fields.get("if-match", ""))


def covered_text(method: str, target: str, span: str, if_match: str) -> str:
    """The covered text of these values."""
    return f"{method}\n{target}\n{span}\n{if_match}"


def reply_of(hop: Hop, span: AnswerSpan) -> str:
    """The reply field's value that signs an answer to `hop`."""
    return hop.key.sign(_proof(hop.mac, span)).hex()


def _proof(mac: str, span: AnswerSpan) -> bytes:
    return f"reply\n{mac}\n{span.etag}\n{span.start}\n{span.length_bytes}".encode()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _refused(why: str) -> HopRefused:
    return HopRefused(f"the hop field {why}: nodes of one cluster share one HEADRACE_SECRET")


class PeerLost(Unavailable):
    """Another node did not answer correctly; the next replica is used."""

    code = "media.peer_lost"

    def __init__(
        self,
        text: str,
        *,
        is_refused: bool = False,
        is_unanswered: bool = False,
        is_counted: bool = True,
    ) -> None:
        super().__init__(text, retry_after_s=1)
        self.is_refused = is_refused
        self.is_unanswered = is_unanswered
        self.is_counted = is_counted
        """Whether it is a failure of the peer, and not only a doubt."""


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
    """Status and fields of a head without its empty line. Raises: ValueError."""
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
    if response.status in (404, 422):
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
