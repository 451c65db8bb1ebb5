"""A load generator over plain sockets: closed loop for the most a server can do, open loop for how
long callers wait.

    python -m bench.load PLAN.json

Open loop: requests are due at moments drawn beforehand (Poisson, seeded), whatever became of those
before; a request waits for a free connection, and its latency counts from the moment it was due.
`select` is used there, since it alone waits for less than a millisecond. Every answer's status is
looked at, and every body for which the plan has a check. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.figures import percentile

CONNECTIONS = 64
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
OVERTIME_S = 30.0


@dataclass
class Kind:
    """Requests of one kind: prepared texts sent in turn, and the replies."""

    name: str
    requests: list[bytes]
    bodies: list[dict[str, int] | None]
    """By request: the totals that its answer must hold, or None: any."""
    next: int = 0
    sent: int = 0
    done: int = 0
    waits_ms: list[float] = field(default_factory=list)

    def take(self) -> int:
        """The next request's number."""
        number, self.next = self.next, (self.next + 1) % len(self.requests)
        self.sent += 1
        return number


class Connection:
    """One kept connection with at most one request under way."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.kind: Kind | None = None
        self.number = 0
        self.due_s = 0.0
        self._got = b""

    def fileno(self) -> int:
        """For select."""
        return self.socket.fileno()

    def send(self, kind: Kind, due_s: float) -> None:
        """Send the next request of `kind`."""
        self.kind, self.number, self.due_s = kind, kind.take(), due_s
        self.socket.sendall(kind.requests[self.number])

    def read(self) -> bool:
        """Read a reply. Return whether the answer is whole. Exits where it is not the right one."""
        data = self.socket.recv(65536)
        if not data:
            raise SystemExit("the server closed a connection")
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found or len(body) < _length(head):
            return False
        assert self.kind is not None
        if b" 200 " not in head[:16]:
            raise SystemExit(f"{self.kind.name}: {self._got[:600].decode(errors='replace')}")
        _check(self.kind, self.number, body)
        self._got = b""
        return True

    def settle(self, now_s: float) -> None:
        """Note how long the request took since it was due."""
        assert self.kind is not None
        self.kind.done += 1
        self.kind.waits_ms.append((now_s - self.due_s) * 1000)
        self.kind = None


def _length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


def _check(kind: Kind, number: int, body: bytes) -> None:
    expected = kind.bodies[number]
    # Every 50th: decoding each would make the generator the slowest part.
    if expected is None or kind.done % 50:
        return
    answer = json.loads(body)
    rows = answer["views"] if isinstance(answer, dict) and "views" in answer else answer
    found = {row["id"]: row["total"] for row in rows} if isinstance(rows, list) else rows
    if found != expected:
        raise SystemExit(f"{kind.name}: expected {expected}, got {found}")


def closed(connections: list[Connection], kind: Kind, seconds: float) -> None:
    """Keep every connection busy for so long."""
    poll = select.epoll()
    by_number = {c.fileno(): c for c in connections}
    now_s = time.perf_counter()
    ends_s = now_s + seconds
    for connection in connections:
        poll.register(connection.fileno(), select.EPOLLIN)
        connection.send(kind, now_s)
    while now_s < ends_s:
        for number, _ in poll.poll(1):
            connection = by_number[number]
            if connection.read():
                now_s = time.perf_counter()
                connection.settle(now_s)
                connection.send(kind, now_s)


def run_first() -> None:
    """Run before all other processes, where that is permitted.

    On a site requests come from other machines. Here the generator would wait for a core that the
    servers have, and its own delay would count as theirs.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def opened(connections: list[Connection], arrivals: list[tuple[float, Kind]]) -> None:
    """Send each request when it is due."""
    free, busy = list(connections), set[Connection]()
    due: deque[tuple[float, Kind]] = deque(arrivals)
    began_s = time.perf_counter()
    ends_s = began_s + arrivals[-1][0] + OVERTIME_S
    while due or busy:
        now_s = time.perf_counter()
        if now_s > ends_s:
            raise SystemExit(f"{len(due) + len(busy)} requests were not answered in time")
        while due and free and began_s + due[0][0] <= now_s:
            at_s, kind = due.popleft()
            connection = free.pop()
            connection.send(kind, began_s + at_s)
            busy.add(connection)
        wait_s = 0.05
        if due and free:
            wait_s = min(wait_s, max(0.0, began_s + due[0][0] - time.perf_counter()))
        readable, _, _ = select.select(busy, (), (), wait_s)
        for connection in readable:
            if connection.read():
                connection.settle(time.perf_counter())
                busy.discard(connection)
                free.append(connection)


def arrivals_of(kinds: list[tuple[Kind, float]], seconds: float) -> list[tuple[float, Kind]]:
    """Moments of several Poisson processes, in order."""
    chance = random.Random(20261121)
    found: list[tuple[float, Kind]] = []
    for kind, rate_per_s in kinds:
        at_s = 0.0
        while (at_s := at_s + chance.expovariate(rate_per_s)) < seconds:
            found.append((at_s, kind))
    return sorted(found, key=lambda row: row[0])


def request(method: str, path: str, *, host: str, token: str, body: bytes = b"") -> bytes:
    """The bytes of one request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {token}"]
    lines += ["User-Agent: bench", "Accept: */*"]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    if body:
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + body


def main(plan_file: str) -> None:
    """Run the plan and print the result."""
    plan: dict[str, Any] = json.loads(Path(plan_file).read_text())
    address = (plan["host"], plan["port"])
    kinds = []
    for row in plan["kinds"]:
        texts = [
            request(
                one["method"],
                one["path"],
                host=f"{address[0]}:{address[1]}",
                token=plan["token"],
                body=one.get("body", "").encode(),
            )
            for one in row["requests"]
        ]
        kinds.append(
            (Kind(row["name"], texts, [one.get("totals") for one in row["requests"]]), row)
        )
    connections = [Connection(address) for _ in range(plan.get("connections", CONNECTIONS))]
    seconds = plan["seconds"]
    if plan["loop"] == "closed":
        [(kind, _)] = kinds
        closed(connections, kind, plan["warm_s"])
        _drain(connections)
        kind.waits_ms.clear()
        kind.done = 0
        _print("warm")
        closed(connections, kind, seconds)
    else:
        run_first()
        rates = [(kind, row["rate_per_s"]) for kind, row in kinds]
        opened(connections, arrivals_of(rates, plan["warm_s"]))
        for kind, _ in kinds:
            kind.waits_ms.clear()
            kind.done = 0
        _print("warm")
        opened(connections, arrivals_of(rates, seconds))
    _print(json.dumps({kind.name: summary(kind, seconds) for kind, _ in kinds}))


def summary(kind: Kind, seconds: float) -> dict[str, float]:
    """The result of one kind."""
    waits = {name: percentile(kind.waits_ms, share) for name, share in SHARES.items()}
    return {"rate_per_s": kind.done / seconds, "done": kind.done, "sent": kind.sent, **waits}


def _drain(connections: list[Connection]) -> None:
    """Let the answers under way come."""
    for connection in connections:
        if connection.kind is not None:
            while not connection.read():
                pass
            connection.settle(time.perf_counter())


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
