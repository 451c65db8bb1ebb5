"""The requests and replies of a proxied connection, without I/O.

PostgreSQL receives the text of a statement once per connection and a name from then on, so only a
parser that stores the names can search for a pattern. Only the server's ReadyForQuery confirms that
a statement took effect. For any other protocol the bytes of one read are a request, and the first
bytes that return are its reply.

Source: "Message Formats" of the PostgreSQL manual, protocol 3.0. TLS connections cannot be read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, Protocol

_SSL_REQUEST: Final = 80877103
_GSS_REQUEST: Final = 80877104
REQUESTS_KEPT_MAX: Final = 1_000
"""Most statements stored per connection."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its text with arguments, and the number of its reply on the connection."""

    text: bytes
    answer: int


class Wire(Protocol):
    """The protocol state of both directions of one connection."""

    asked_before: set[bytes]
    """Requests so far, without arguments."""

    def asked(self, data: bytes) -> list[Request]:
        """The requests that these bytes of the client complete."""

    def answers(self, data: bytes) -> int:
        """The number of replies of the server up to these bytes."""


@dataclass(slots=True)
class RawWire:
    """Any protocol: the bytes of one read are a request or a reply."""

    asked_before: set[bytes] = field(default_factory=set)
    _answers: int = 0

    def asked(self, data: bytes) -> list[Request]:
        """The bytes as one request."""
        if len(self.asked_before) < REQUESTS_KEPT_MAX:
            self.asked_before.add(data)
        return [Request(data, self._answers + 1)]

    def answers(self, data: bytes) -> int:
        """The number of reads with data."""
        self._answers += bool(data)
        return self._answers


@dataclass(slots=True)
class PostgresWire:
    """PostgreSQL: a request is a statement that starts to run, a reply is ReadyForQuery."""

    asked_before: set[bytes] = field(default_factory=set)
    _is_started: bool = False
    _from_client: bytearray = field(default_factory=bytearray)
    _from_server: bytearray = field(default_factory=bytearray)
    _single_bytes: int = 0
    """Pending replies of one byte, to requests for encryption."""
    _texts: dict[bytes, bytes] = field(default_factory=dict)
    """Prepared statements by name."""
    _syncs: int = 1
    """Replies expected for the requests so far; the first follows the login."""
    _answers: int = 0

    def asked(self, data: bytes) -> list[Request]:
        """The statements whose last byte is among these bytes."""
        self._from_client += data
        found: list[Request] = []
        while (message := self._next_message()) is not None:
            kind, body = message
            text = self._text_of(kind, body)
            if text is not None:
                found.append(Request(text, self._syncs + 1))
            self._syncs += kind in b"QS"
        return found

    def answers(self, data: bytes) -> int:
        """The number of ReadyForQuery messages so far, including the one after the login."""
        buffer = self._from_server
        buffer += data
        while self._single_bytes and buffer:
            del buffer[0]
            self._single_bytes -= 1
        at = 0
        while len(buffer) - at >= 5:
            ends = at + 1 + struct.unpack_from("!I", buffer, at + 1)[0]
            if ends > len(buffer):
                break
            self._answers += buffer[at] == ord("Z")
            at = ends
        del buffer[:at]
        return self._answers

    def _next_message(self) -> tuple[int, bytes] | None:
        buffer, head = self._from_client, 1 if self._is_started else 0
        if len(buffer) < head + 4:
            return None
        ends = head + struct.unpack_from("!I", buffer, head)[0]
        if len(buffer) < ends:
            return None
        kind, body = buffer[0] if head else 0, bytes(buffer[head + 4 : ends])
        del buffer[:ends]
        if not head:
            is_question = struct.unpack_from("!I", body)[0] in (_SSL_REQUEST, _GSS_REQUEST)
            self._single_bytes += is_question
            self._is_started = not is_question
        return kind, body

    def _text_of(self, kind: int, body: bytes) -> bytes | None:
        """The statement that a message runs, with its arguments, or None."""
        if kind == ord("P"):
            name, text, _ = body.split(b"\0", 2)
            self._texts[name] = text
            return None
        if kind == ord("B"):
            _, name, arguments = body.split(b"\0", 2)
            text = self._texts.get(name, b"")
        elif kind == ord("Q"):
            text, arguments = body.rstrip(b"\0"), b""
        else:
            return None
        if len(self.asked_before) < REQUESTS_KEPT_MAX:
            self.asked_before.add(text)
        return text + b"\0" + arguments
