"""Sellers' hosts: their photos, how they respond, their faults, and a log of what they received."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from verification.simulation.loop import Process
from verification.simulation.world import World

ADDRESSES: Final = "93.184.{}.{}"
RETRY_AFTER_S: Final = (20, 45, 90)
STRICT: Final = (2, 10.0)
"""Requests of a customer that a strict host serves in a window of seconds."""
KINDS: Final = (
    *("fast", "fast", "slow", "crawling", "hanging", "dead", "silent", "unknown"),
    *("strict", "busy", "cutting", "moving", "moving"),
)
"""One host of each, numbered."""
FIRST_BYTE_S: Final = {"slow": (1.2, 2.0), "crawling": (3.5, 6.0)}
MOODS: Final = ("hang", "reset", "refuse", "busy", "limit", "slow", "cut")
"""Temporary faults of a host."""


@lru_cache(maxsize=4096)
def photo_of(host: str, path: str, version: int) -> bytes:
    """The bytes of a version of a photo: a small PNG."""
    chance = random.Random(f"{host}{path}/{version}")
    data = chance.randbytes(chance.choice((40, 300, 2000)))
    head = struct.pack(">IIBBBBB", 64, 48, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", data), (b"IEND", b"")
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@dataclass(slots=True)
class LoggedRequest:
    """A request in the log of a host."""

    host: str
    customer: str
    path: str
    process: Process
    sent_s: float
    """When its process sent it."""
    at_s: float
    connections: int
    """Connections of the process to the host that the request's limits allow."""
    connect_s: float
    """How long its connection took; 0 for a kept one."""
    status: int = 0
    ended_s: float | None = None
    retry_after_s: float | None = None
    received_s: float | None = None
    """When its process had received the whole response."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a host sends, and when."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    wait_s: float = 0.05
    parts: int = 1
    end: str = "whole"
    """`whole`, `cut` (closed within the body), `reset`, or `never` (nothing is sent)."""


class SellerHost:
    """One host."""

    def __init__(self, name: str, kind: str, number: int, chance: random.Random) -> None:
        self.name, self.kind = name, kind
        self.address = ADDRESSES.format(number, 10)
        self.has_etags = chance.random() < 0.6
        self.mood: str | None = None
        self.next_hosts: list[str] = []
        """Where its redirects lead."""
        self._chance = chance
        self._versions: dict[str, int] = {}
        self._served: dict[str, list[float]] = defaultdict(list)

    def change(self, path: str) -> None:
        """Replace the photo of a path."""
        self._versions[path] = self._versions.get(path, 0) + 1

    def connect_s(self) -> float | None:
        """How long a connection takes; negative: refused after it; None: never."""
        if self.kind == "silent":
            return None
        if self.kind == "dead" or self.mood == "refuse":
            return -0.02
        if self.mood == "slow" and self._chance.random() < 0.3:
            return self._chance.uniform(0.2, 1.5)
        return self._chance.uniform(0.002, 0.04)

    def respond(self, request: LoggedRequest, etag: str | None, now_s: float) -> Response:
        """The response to a request."""
        chance, mood = self._chance, self.mood
        if self.kind == "hanging" or mood in ("hang", "reset"):
            return Response(end="reset" if mood == "reset" else "never")
        low_s, high_s = FIRST_BYTE_S.get(self.kind, (0.02, 0.2))
        wait_s = chance.uniform(low_s, high_s) + (mood == "slow") * chance.uniform(0.5, 4.0)
        if mood == "limit" or (self.kind == "strict" and self._is_over(request, now_s)):
            return self._refused(429, wait_s)
        if mood == "busy" or (self.kind == "busy" and chance.random() < 0.2):
            return self._refused(503, wait_s)
        if chance.random() < 0.01:
            return Response(500, wait_s=wait_s)
        if self.kind == "moving" and self.next_hosts:
            return self._moved(request, wait_s)
        return self._photo(request, etag, wait_s)

    def _is_over(self, request: LoggedRequest, now_s: float) -> bool:
        most, window_s = STRICT
        served = [at for at in self._served[request.customer] if at > now_s - window_s]
        self._served[request.customer] = served
        if len(served) >= most:
            return True
        served.append(now_s)
        return False

    def _refused(self, status: int, wait_s: float) -> Response:
        chance = self._chance
        headers = {}
        if chance.random() < 0.8:
            headers["Retry-After"] = str(chance.choice(RETRY_AFTER_S))
        return Response(status, headers, b"later", wait_s)

    def _moved(self, request: LoggedRequest, wait_s: float) -> Response:
        host = self.next_hosts[zlib.crc32(request.path.encode()) % len(self.next_hosts)]
        location = f"https://{host}{request.path}"
        return Response(302, {"Location": location}, b"moved", wait_s)

    def _photo(self, request: LoggedRequest, etag: str | None, wait_s: float) -> Response:
        chance, path = self._chance, request.path
        if path.endswith("-missing.png"):
            return Response(404, {}, b"not found", wait_s)
        if path.endswith("-page.png"):
            return Response(200, {}, b"<html></html>", wait_s)
        data = photo_of(self.name, path, self._versions.get(path, 0))
        headers = {"Content-Length": str(len(data))}
        own = f'"{hashlib.sha256(data).hexdigest()[:12]}"'
        if self.has_etags:
            headers["ETag"] = own
            if etag == own:
                return Response(304, {}, b"", wait_s)
        parts = chance.choice((1, 1, 1, 3))
        if self.mood == "cut" or (self.kind == "cutting" and chance.random() < 0.3):
            if chance.random() < 0.5:
                del headers["Content-Length"]
            end = chance.choice(("cut", "reset"))
            return Response(200, headers, data[: len(data) // 2], wait_s, parts, end)
        return Response(200, headers, data, wait_s, parts)


class Sellers:
    """All hosts, and what they received."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hosts: dict[str, SellerHost] = {}
        self.log: list[LoggedRequest] = []
        self.open: dict[int, LoggedRequest] = {}
        """Requests without an end, by their number."""
        self.served: dict[str, set[str]] = defaultdict(set)
        """Hashes of the complete photos that were sent, by URL."""
        self.is_dns_down = False
        self.on_request: Callable[[LoggedRequest], None] = lambda _request: None
        self.on_response: Callable[[LoggedRequest], None] = lambda _request: None
        for number, kind in enumerate(KINDS):
            name = f"{kind}-{number}.example"
            chance = world.stream(f"host/{name}")
            self.hosts[name] = SellerHost(name, kind, number, chance)
        fast, *_ = (name for name, host in self.hosts.items() if host.kind == "fast")
        first, second = (name for name, host in self.hosts.items() if host.kind == "moving")
        slow = next(name for name, host in self.hosts.items() if host.kind == "slow")
        self.hosts[first].next_hosts = [fast, slow, second]
        self.hosts[second].next_hosts = [fast, first]
        world.on_death(self._close_of)

    def by_address(self, address: str) -> SellerHost:
        """The host with an address."""
        return next(host for host in self.hosts.values() if host.address == address)

    def receive(self, request: LoggedRequest) -> int:
        """Log a request; return its number."""
        self.world.trace("request", request.host, request.path, request.process.name)
        self.log.append(request)
        self.open[len(self.log)] = request
        self.on_request(request)
        return len(self.log)

    def end(self, number: int) -> None:
        """The exchange of a request has ended: its response was sent, or its connection closed."""
        request = self.open.pop(number, None)
        if request is not None:
            request.ended_s = self.world.now_s

    def note_served(self, request: LoggedRequest, body: bytes) -> None:
        """Record that a complete body was received."""
        url = f"https://{request.host}{request.path}"
        self.served[url].add(hashlib.sha256(body).hexdigest())

    def final_urls(self, url: str) -> Iterator[str]:
        """The URL and those to which its redirects lead."""
        seen: set[str] = set()
        while url not in seen:
            seen.add(url)
            yield url
            host, _, path = url.removeprefix("https://").partition("/")
            found = self.hosts[host]
            if found.kind != "moving" or not found.next_hosts:
                return
            places = found.next_hosts
            url = f"https://{places[zlib.crc32(f'/{path}'.encode()) % len(places)]}/{path}"

    def _close_of(self, process: Process) -> None:
        for number in [n for n, request in self.open.items() if request.process is process]:
            self.end(number)
