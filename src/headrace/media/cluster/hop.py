"""The one hop between nodes, proven in both directions.

A node that does not keep a key asks one that does, by a GET or HEAD of the same path on the same port that
clients use, with one field more:

    X-Headrace-Hop: 1;<key id>;<from>;<to>;<Unix ms>;<connection>;<counter>;<generation>;<HMAC-SHA256>

The HMAC covers method, target, Range and If-Match as well, so that the field is worth nothing for another
object, another part, or another node. It counts for 30 s, and within one worker once: connection is a
random number of the asking side, and its counter only rises. (Another worker of the node would answer
the same request again: with the bytes that whoever heard the field has heard too.) A field that does not fit is refused with
403, never taken for a plain request. A request with it is answered from the node's own disks or the origin and
goes no further: that is what bounds the hops to one, whatever two nodes think of each other.

The answer carries X-Headrace-Reply: the HMAC of the hop's own with ETag, start and length. So bytes of a
stranger who took over an address, or of another object or part, are not passed on.

`generation` is what the asking side knows of the key's purges: a node that knows less asks the store first.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from headrace.kernel.errors import Forbidden
from headrace.kernel.signing import Key

HOP_FIELD: Final = "x-headrace-hop"
REPLY_FIELD: Final = "x-headrace-reply"
KEY_USE: Final = "media-hop"
WINDOW_S: Final = 30.0
CONNECTIONS_MAX: Final = 65_536
_FORMAT: Final = "1"
_PARTS: Final = 9
_DIGITS_MAX: Final = 16


class HopRefused(Forbidden):
    """The request claims to come from a node of the cluster and does not prove it."""

    code = "media.hop_refused"


class Head(Protocol):
    """What is read of a request."""

    @property
    def method(self) -> str: ...

    @property
    def target(self) -> str: ...

    @property
    def fields(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Hop:
    """An authenticated request of a peer; `mac` ties the answer to it."""

    sender: str
    generation: int
    key: Key
    mac: str


class Told(NamedTuple):
    """What an answer says it carries: a span of one version. A HEAD's is the whole, a 404's is nothing."""

    etag: str
    start: int
    length_bytes: int


NOTHING: Final = Told("", 0, 0)


class Proven(NamedTuple):
    """A hop whose field is right for its request; `HopGuard.accept` says whether it is new."""

    hop: Hop
    connection: str
    counter: int
    moment_s: float


class HopSigner:
    """Signs the requests of one node; the first of `keys` signs. Pure but for the clock."""

    def __init__(
        self, keys: Sequence[Key], sender: str, now_s: Callable[[], float] = time.time
    ) -> None:
        self._key = keys[0]
        self._sender = sender
        self._now_s = now_s

    def line(self) -> HopLine:
        """What signs the requests of one new connection."""
        return HopLine(self)

    def sign(self, order: str, to: str, covered: str, generation: int) -> tuple[str, str]:
        """The field's value, and its HMAC alone. `order` is connection and counter."""
        moment_ms = int(self._now_s() * 1000)
        text = f"{_FORMAT};{self._key.id};{self._sender};{to};{moment_ms};{order};{generation}"
        mac = self._key.sign(f"hop\n{text}\n{covered}".encode()).hex()
        return f"{text};{mac}", mac

    def is_proven(self, mac: str, reply: str, told: Told) -> bool:
        """Whether `reply` is the asked node's own to the request of `mac`, and tells just this."""
        return self._key.verify(_proof(mac, told), _unhex(reply))


class HopLine:
    """Numbers and signs the requests of one connection."""

    __slots__ = ("_connection", "_counter", "_signer")

    def __init__(self, signer: HopSigner) -> None:
        self._signer = signer
        self._connection = secrets.token_hex(8)
        self._counter = itertools.count(1)

    def sign(self, to: str, covered: str, generation: int) -> tuple[str, str]:
        """The value of the hop field for the next request, and its HMAC."""
        return self._signer.sign(
            f"{self._connection};{next(self._counter)}", to, covered, generation
        )


class HopGuard:
    """Judges the hop fields that one worker receives; remembers what must not come twice."""

    def __init__(
        self, keys: Sequence[Key], name: str, now_s: Callable[[], float] = time.time
    ) -> None:
        self._keys = {key.id: key for key in keys}
        self._name = name
        self._now_s = now_s
        self._newest: dict[str, tuple[int, float]] = {}
        """Of each connection its last counter and moment, the connection longest silent first."""

    def judge(self, request: Head) -> Hop | None:
        """The hop that `request` is, or None for a client's own. Raises: HopRefused."""
        value = request.fields.get(HOP_FIELD)
        if value is None:
            return None
        covered = covered_by(request.method, request.target, request.fields)
        return self.accept(self.prove(value, covered))

    def prove(self, value: str, covered: str) -> Proven:
        """The hop of a field that vouches for `covered`, and nothing remembered of it. Raises: HopRefused."""
        text, _, mac = value.rpartition(";")
        parts = value.split(";")
        if (
            len(parts) != _PARTS
            or parts[0] != _FORMAT
            or not all(_is_number(parts[place]) for place in (4, 6, 7))
        ):
            raise _refused("is malformed")
        key = self._keys.get(parts[1])
        message = f"hop\n{text}\n{covered}"
        if key is None or not key.verify(message.encode(), _unhex(mac)):
            raise _refused("is not signed with this cluster's secret")
        if parts[3] != self._name:
            raise _refused("is meant for another node")
        hop = Hop(parts[2], int(parts[7]), key, mac)
        return Proven(hop, parts[5], int(parts[6]), int(parts[4]) / 1000)

    def accept(self, proven: Proven) -> Hop:
        """The hop, if it is of now and came for the first time. Raises: HopRefused."""
        hop, connection, counter, moment_s = proven
        now_s = self._now_s()
        if abs(now_s - moment_s) > WINDOW_S:
            raise _refused(
                f"is of a moment {abs(now_s - moment_s):.0f} s away: set the clocks right"
            )
        last, _ = self._newest.pop(connection, (0, 0.0))
        self._newest[connection] = (max(counter, last), now_s)
        if counter <= last:
            raise _refused("came before")
        self._forget_old(now_s)
        return hop

    def _forget_old(self, now_s: float) -> None:
        """What was last heard so long ago is refused for its moment; twice the window covers both clocks."""
        while self._newest:
            connection = next(iter(self._newest))
            is_over = now_s - self._newest[connection][1] > 2 * WINDOW_S
            if not is_over and len(self._newest) <= CONNECTIONS_MAX:
                return
            del self._newest[connection]


def covered_by(method: str, target: str, fields: Mapping[str, str]) -> str:
    """What of a request's head a hop field vouches for."""
    return covered_text(method, target, fields.get("range", ""), fields.get("if-match", ""))


def covered_text(method: str, target: str, span: str, if_match: str) -> str:
    """The same, of the values themselves."""
    return f"{method}\n{target}\n{span}\n{if_match}"


def reply_of(hop: Hop, told: Told) -> str:
    """The value of the reply field that proves an answer to `hop`."""
    return hop.key.sign(_proof(hop.mac, told)).hex()


def _proof(mac: str, told: Told) -> bytes:
    return f"reply\n{mac}\n{told.etag}\n{told.start}\n{told.length_bytes}".encode()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _refused(why: str) -> HopRefused:
    return HopRefused(f"the hop field {why}: nodes of one cluster share one HEADRACE_SECRET")
