"""What passes through a proxy, as requests and answers: enough of each protocol to lose exactly one. No I/O.

The text of a statement goes to PostgreSQL once a connection and is named from then on, so a pattern can be
looked for only by whoever remembers the names; and only the server's ReadyForQuery says that a statement
took effect. For any other protocol the bytes of one read are the request, and the first bytes that come
back are its answer.

Source: "Message Formats" of the PostgreSQL manual, protocol 3.0. Connections under TLS cannot be read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, Protocol

_SSL_REQUEST: Final = 80877103
_GSS_REQUEST: Final = 80877104
ASKED_KEPT_MAX: Final = 1_000
"""Statements that a connection is remembered by."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its text with its arguments, and which answer of the connection will be its own."""

    text: bytes
    answer: int


class Wire(Protocol):
    """One connection's two directions."""

    asked_before: set[bytes]
    """Requests so far, without arguments."""

    def asked(self, data: bytes) -> list[Asked]:
        """What these bytes from the client ask for."""

    def answers(self, data: bytes) -> int:
        """How many answers the server has given with these bytes."""


@dataclass(slots=True)
class RawWire:
    """Any protocol: what one read brings is a request or an answer."""

    asked_before: set[bytes] = field(default_factory=set)
    _answers: int = 0

    def asked(self, data: bytes) -> list[Asked]:
        """The bytes as one request."""
        if len(self.asked_before) < ASKED_KEPT_MAX:
            self.asked_before.add(data)
        return [Asked(data, self._answers + 1)]

    def answers(self, data: bytes) -> int:
        """One more with each read."""
        self._answers += bool(data)
        return self._answers


@dataclass(slots=True)
class PostgresWire:
    """PostgreSQL: a request is a statement that begins to run, an answer a ReadyForQuery."""

    asked_before: set[bytes] = field(default_factory=set)
    _is_started: bool = False
    _from_client: bytearray = field(default_factory=bytearray)
    _from_server: bytearray = field(default_factory=bytearray)
    _single_bytes: int = 0
    """Answers of one byte that the server still owes: to a question about encryption."""
    _texts: dict[bytes, bytes] = field(default_factory=dict)
    """Prepared statements by name."""
    _syncs: int = 1
    """Answers that the server owes for what was sent so far; the first follows the login."""
    _answers: int = 0

    def asked(self, data: bytes) -> list[Asked]:
        """The statements whose last byte is among these bytes."""
        self._from_client += data
        found: list[Asked] = []
        while (message := self._next_message()) is not None:
            kind, body = message
            text = self._text_of(kind, body)
            if text is not None:
                found.append(Asked(text, self._syncs + 1))
            self._syncs += kind in b"QS"
        return found

    def answers(self, data: bytes) -> int:
        """ReadyForQuery messages so far, the one after the login included."""
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
        """The statement that a message runs, with its arguments; None: it runs none."""
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
        if len(self.asked_before) < ASKED_KEPT_MAX:
            self.asked_before.add(text)
        return text + b"\0" + arguments
