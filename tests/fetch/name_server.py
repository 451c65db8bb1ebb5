"""A name server whose answers a test sets, one query at a time."""

from __future__ import annotations

import asyncio
import ipaddress
import struct

A, CNAME, AAAA = 1, 5, 28


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records[name]`: addresses, or a name for a CNAME; logs the queries.

    `turns[name]`: the answers of one lookup after the other; the last one stays. Names in `silent`
    get no answer before `speak`. `lost[name]` queries are dropped, `broken[name]` fail (SERVFAIL).
    """

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.turns: dict[str, list[list[str]]] = {}
        self.silent: set[str] = set()
        self.lost: dict[str, int] = {}
        self.broken: dict[str, int] = {}
        self.unanswered: list[tuple[bytes, tuple[str, int]]] = []
        self.queries: list[str] = []
        self.port = 0

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data, peer) -> None:
        name, end = self._name(data)
        self.queries.append(name)
        if name in self.silent:
            self.unanswered.append((data, peer))
            return
        if self.lost.get(name):
            self.lost[name] -= 1
            return
        if self.broken.get(name):
            self.broken[name] -= 1
            head = data[:2] + struct.pack(">HHHHH", 0x8182, 1, 0, 0, 0)
            self.transport.sendto(head + data[12 : end + 4], peer)
            return
        (kind,) = struct.unpack_from(">H", data, end)
        if kind == A and self.turns.get(name):
            turns = self.turns[name]
            self.records[name] = turns.pop(0) if len(turns) > 1 else turns[0]
        answers = self._answers(name, kind)
        flags = 0x8180 if name in self.records or name in self.turns else 0x8183
        head = data[:2] + struct.pack(">HHHHH", flags, 1, len(answers), 0, 0)
        self.transport.sendto(head + data[12 : end + 4] + b"".join(answers), peer)

    def speak(self) -> None:
        """Answer all names again."""
        self.silent = set()
        unanswered, self.unanswered = self.unanswered, []
        for data, peer in unanswered:
            self.datagram_received(data, peer)

    def _name(self, data: bytes) -> tuple[str, int]:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        return ".".join(labels).lower(), at + 1

    def _answers(self, name: str, kind: int) -> list[bytes]:
        found, owner = [], name
        values = self.records.get(name, [])
        if values and not values[0][0].isdigit() and ":" not in values[0]:
            found.append(record(owner, CNAME, encoded(values[0])))
            owner = values[0]
            values = self.records.get(owner, [])
        for value in values:
            address = ipaddress.ip_address(value)
            if kind == {4: A, 6: AAAA}[address.version]:
                found.append(record(owner, kind, address.packed))
        return found


def encoded(name: str) -> bytes:
    return b"".join(bytes([len(x)]) + x.encode() for x in name.split(".")) + b"\0"


def record(owner: str, kind: int, data: bytes) -> bytes:
    return encoded(owner) + struct.pack(">HHIH", kind, 1, 0, len(data)) + data
