"""A client's socket, its rate limit, and listening sockets.

`is_full` reports a short write of bytes: the socket is full and an edge will follow, which saves a
call. A short sendfile may be the end of a truncated file instead, after which no edge follows, so
it sets nothing. `is_drained` reports the same for a read. Both are unknown for TLS (`tls_io`).

Each worker has a listening socket of its own on the same address (SO_REUSEPORT). The supervisor
makes them all and keeps them. So an address in use is reported before anything starts, and clients
in the queue of a dead worker are served by its successor.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from typing import Final

from headrace.kernel.logs import logger
from headrace.media.errors import ListenFailed
from headrace.media.model import WORKERS_MAX, MediaConfig

log = logger(__name__)

RESET_LINGER: Final = struct.pack("ii", 1, 0)
BACKLOG: Final = 1024
FILES_KEPT_BACK: Final = 128
"""Descriptors reserved for engines, logs, disks and temporary files."""
BURST_S: Final = 0.25
BURST_BYTES_MIN: Final = 64 * 1024
UNEVEN: Final = 1.25
"""The kernel spreads clients by a hash: a worker gets up to this much more than its share."""


class Channel:
    """A client's socket by plain TCP; `tls_io` has those with TLS.

    Methods except `peer`, `reset`, `close` and `detach` raise BlockingIOError, or OSError if it is
    closed.
    """

    __slots__ = ("_socket", "fd", "is_drained", "is_full")

    def __init__(self, client: socket.socket) -> None:
        self._socket = client
        self.fd = client.fileno()
        self.is_full = self.is_drained = False

    def receive(self, bytes_max: int) -> bytes:
        """The received bytes; empty at the end."""
        data = self._socket.recv(bytes_max)
        self.is_drained = 0 < len(data) < bytes_max
        return data

    def send(self, data: memoryview, *, is_more: bool = False) -> int:
        """Send as much as fits; `is_more`: other bytes follow at once."""
        # MSG_MORE joins the head and the first bytes of the body in one segment.
        sent = self._socket.send(data, socket.MSG_MORE if is_more else 0)
        self.is_full = sent < len(data)
        return sent

    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Send as much as fits of a file; 0 at the file's end."""
        self.is_full = False
        return os.sendfile(self.fd, descriptor, offset, count)

    def end(self) -> None:
        """Shut down the sending side."""
        self._socket.shutdown(socket.SHUT_WR)

    def peer(self) -> str:
        """The client's address; empty if it disconnected, which no signature allows."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return ""

    def reset(self) -> None:
        """Close so that the client receives an error instead of an end."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_LINGER)
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def detach(self) -> tuple[int, int]:
        """Return the descriptor and the TLS state of the native plane, which the caller owns now.

        The state is 0 for a connection that the native plane does not encrypt.
        """
        return self._socket.detach(), 0


class RateLimit:
    """The rate limit of one answer, by a signed URL; in seconds of one monotonic clock.

    A client may be ahead by one burst: a quarter of a second, but at least 64 KiB. So an answer
    needs a timer for each burst and not for each segment. Unused rate is not saved.
    """

    __slots__ = ("_burst_bytes", "_left_bytes", "_rate", "_seen_s")

    def __init__(self, rate: int, now_s: float) -> None:
        self._rate = rate
        self._burst_bytes = max(BURST_BYTES_MIN, int(rate * BURST_S))
        self._left_bytes = float(self._burst_bytes)
        self._seen_s = now_s

    def allowed_bytes(self, now_s: float) -> int:
        """The bytes that may be sent at `now_s`; 0: wait `wait_s`.

        Less than a quarter of a burst counts as 0. Otherwise the bytes earned during one send would
        allow the next one, and the client would occupy its worker until its answer ends.
        """
        earned = (now_s - self._seen_s) * self._rate
        self._left_bytes = min(self._burst_bytes, self._left_bytes + earned)
        self._seen_s = now_s
        return int(self._left_bytes) if self._left_bytes >= self._burst_bytes / 4 else 0

    def spend(self, sent_bytes: int) -> None:
        """Record sent bytes."""
        self._left_bytes -= sent_bytes

    def expected_bytes(self, over_s: float) -> int:
        """The bytes that a client at full speed has certainly received after `over_s`."""
        return int(self._rate * over_s / 2)

    def wait_s(self) -> float:
        """Seconds until half a burst may be sent."""
        return max(0.001, (self._burst_bytes / 2 - self._left_bytes) / self._rate)


def listening_sockets(address: tuple[str, int], count: int, setting: str) -> list[socket.socket]:
    """`count` sockets that listen on one address; port 0: any free port. Raises: ListenFailed."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made: list[socket.socket] = []
    try:
        if port:
            # SO_REUSEPORT would share the port with another node of the same user, which is an
            # error.
            socket.create_server((host, port), family=family).close()
        for _ in range(count):
            # An address [::] takes IPv4 clients too.
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            made.append(
                socket.create_server(
                    (host, port),
                    family=family,
                    backlog=BACKLOG,
                    reuse_port=True,
                    dualstack_ipv6=is_dual,
                )
            )
            port = made[0].getsockname()[1]
    except OSError as error:
        for listener in made:
            listener.close()
        raise ListenFailed(
            f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}):"
            f" choose another {setting}"
        ) from error
    return made


def raise_file_limit() -> int:
    """Raise the limit of open files to its maximum and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def clients_per_process(files_max: int, *, files_per_client: int) -> int:
    """The number of clients that a process with `files_max` descriptors can hold."""
    if files_max == resource.RLIM_INFINITY:
        return 2**31
    return max(16, (files_max - FILES_KEPT_BACK) // files_per_client)


def workers_wanted(
    config: MediaConfig, *, cores: int, files_max: int, files_per_client: int
) -> int:
    """The configured number, or one for each core, or more if the file limit requires it."""
    if config.workers:
        return min(config.workers, WORKERS_MAX)
    held = clients_per_process(files_max, files_per_client=files_per_client)
    needed = (
        -(-int(config.connections_max * UNEVEN) // held) if config.connections_max > held else 1
    )
    return min(WORKERS_MAX, max(cores, needed))


def connections_of_worker(
    wished: int, *, workers: int, files_max: int, files_per_client: int
) -> int:
    """The number of `wished` clients that one of `workers` processes may hold."""
    share = wished if workers == 1 else min(wished, int(wished / workers * UNEVEN) + 16)
    held = clients_per_process(files_max, files_per_client=files_per_client)
    if held < share:
        log.warning("connections_limited", wished=share, allowed=held, files_max=files_max)
    return min(share, held)
