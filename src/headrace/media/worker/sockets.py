"""The sockets a node listens on, and how many clients its processes may hold.

Each worker has a listening socket of its own on the one address (SO_REUSEPORT: the kernel spreads clients
over them without a hand-off). The parent makes them all and keeps them: so a taken address is told before
anything starts, and clients that wait in the queue of a worker that died are served by its successor.
"""

from __future__ import annotations

import os
import resource
import socket
from typing import Final

from headrace.kernel.logs import logger
from headrace.media.model import WORKERS_MAX, ListenFailed, MediaConfig

log = logger(__name__)
BACKLOG: Final = 1024
FILES_KEPT_BACK: Final = 128
"""Descriptors for everything but clients: engines, logs, disks, files being made."""
UNEVEN: Final = 1.25
"""The kernel spreads clients by a hash: a worker gets up to this much more than its share of a few thousand."""


def listening_sockets(address: tuple[str, int], count: int, setting: str) -> list[socket.socket]:
    """`count` sockets that listen on one address; port 0: on one free port. Raises: ListenFailed."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made: list[socket.socket] = []
    try:
        if port:
            # SO_REUSEPORT would share the port with another node of the same user: that must be a fault.
            socket.create_server((host, port), family=family).close()
        for _ in range(count):
            made.append(_listening(family, host, port))
            port = made[0].getsockname()[1]
    except OSError as error:
        for listener in made:
            listener.close()
        raise ListenFailed(
            f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}): choose another {setting}"
        ) from error
    return made


def raise_file_limit() -> int:
    """Let this process open as many files as it may; that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def clients_a_process(files_max: int, *, files_a_client: int) -> int:
    """How many clients a process of `files_max` descriptors can hold."""
    if files_max == resource.RLIM_INFINITY:
        return 2**31
    return max(16, (files_max - FILES_KEPT_BACK) // files_a_client)


def workers_wanted(config: MediaConfig, *, cores: int, files_max: int, files_a_client: int) -> int:
    """As many as configured, else one a core; more where the limit of files would refuse clients."""
    if config.workers:
        return min(config.workers, WORKERS_MAX)
    held = clients_a_process(files_max, files_a_client=files_a_client)
    needed = (
        -(-int(config.connections_max * UNEVEN) // held) if config.connections_max > held else 1
    )
    return min(WORKERS_MAX, max(cores, needed))


def connections_of_worker(wished: int, *, workers: int, files_max: int, files_a_client: int) -> int:
    """How many of `wished` clients one of `workers` processes may hold."""
    share = wished if workers == 1 else min(wished, int(wished / workers * UNEVEN) + 16)
    held = clients_a_process(files_max, files_a_client=files_a_client)
    if held < share:
        log.warning("connections_limited", wished=share, allowed=held, files_max=files_max)
    return min(share, held)


def _listening(family: int, host: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
