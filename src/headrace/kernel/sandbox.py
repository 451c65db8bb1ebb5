"""Child processes without privileges, for decoders of untrusted files.

Hostile files attack decoders, so no decoder runs in a process that has leases, connections or keys.
A child is a new, isolated interpreter that runs a script by path and has one socket to its parent.
It loads its libraries and then calls `drop_privileges`: from then on it cannot open files or
sockets, start processes, write files or take more memory. If it crashes, only its file is refused.

Children import this module, so it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

DESCRIPTORS_MAX: Final = 3
START_S_MAX: Final = 30.0
ANSWER_BYTES_MAX: Final = 64 * 2**20


def start_child(
    python: str, script: Path, limits: tuple[float, ...]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start `script` in a new, isolated interpreter; return its socket and its process.

    Raises: OSError.
    """
    link, childs_end = socket.socketpair()
    try:
        with childs_end:
            process = subprocess.Popen(
                [python, "-I", "-B", str(script), *map(str, limits)],
                stdin=childs_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
            )
    except OSError:
        link.close()
        raise
    return link, process


class ChildGone(Exception):
    """The child exited, closed its socket or timed out; the text has the reason.

    `status` is its exit status, negative for a signal; None: it did not exit by itself.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Child:
    """A child that answers one request at a time. Every call blocks.

    An answer is a length of 4 bytes, little-endian, and as many bytes. The first one is sent when
    the child is ready.
    """

    def __init__(self, python: str, script: Path, limits: tuple[float, ...]) -> None:
        """Raises: OSError, ChildGone."""
        self._link, self._process = start_child(python, script, limits)
        try:
            self._receive_answer(START_S_MAX)
        except ChildGone:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    def request(self, head: bytes, data: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return the answer. Raises: ChildGone."""
        try:
            self._link.settimeout(timeout_s)
            self._link.sendall(head)
            self._link.sendall(data)
        except OSError as error:
            raise self._gone(error) from error
        return self._receive_answer(timeout_s)

    def end(self) -> None:
        """Kill the child."""
        self._link.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)

    def _receive_answer(self, timeout_s: float) -> bytes:
        ends_s = time.monotonic() + timeout_s
        try:
            length = int.from_bytes(receive(self._link, 4, until_s=ends_s), "little")
            # A child under a hostile file's control must not take the parent's memory.
            answer = receive(self._link, min(length, ANSWER_BYTES_MAX), until_s=ends_s)
        except OSError as error:
            raise self._gone(error) from error
        if not answer:
            raise self._gone(EOFError())
        return answer

    def _gone(self, error: Exception) -> ChildGone:
        if isinstance(error, TimeoutError):
            return ChildGone("the decoder timed out")
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return ChildGone("the decoder closed its socket")
        return ChildGone(f"the decoder exited with status {status}", status)


# In the child


def open_link() -> socket.socket:
    """The socket to the parent. Signals of a shutdown are ignored: the parent closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Sent to the whole process group at shutdown.
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    return socket.socket(fileno=0)


def drop_privileges(memory_bytes_max: int) -> None:
    """Limit memory, and forbid new descriptors, processes, file writes and core dumps."""
    for limit, most in (
        (resource.RLIMIT_AS, memory_bytes_max),
        (resource.RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def receive(link: socket.socket, length: int, *, until_s: float | None = None) -> bytes:
    """Receive exactly `length` bytes; return nothing if the other side closed the socket.

    Raises: OSError, TimeoutError at `until_s` by `time.monotonic`.
    """
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        if until_s is not None:
            link.settimeout(max(0.001, until_s - time.monotonic()))
        count = link.recv_into(view[got:])
        if not count:
            return b""
        got += count
    return bytes(data)
