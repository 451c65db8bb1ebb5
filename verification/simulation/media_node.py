"""A media node of the simulation: the product's node on modelled sockets and disks."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from functools import partial
from typing import Any

from headrace.media.cluster import Cluster
from headrace.media.worker.connection import Connection
from headrace.media.worker.node import Node
from headrace.media.worker.request_context import RequestContext
from headrace.media.worker.timing import samples
from verification.simulation.loop import CURRENT, Process
from verification.simulation.media_model import NodeDisk
from verification.simulation.media_net import SimulatedChannel


class SimulatedNode(Node):
    """A node's connections without sockets; everything else of it is the product's."""

    def __init__(self, context: RequestContext, cluster: Cluster, disk: NodeDisk) -> None:
        self.config = context.config
        self.context = context
        self.cluster = cluster
        self.process: Process = CURRENT.get()
        self.is_stopping = False
        self.connections_max = 1000
        self.access_log = None
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, Connection] = {}
        self._queue: deque[Connection] = deque()
        self._is_run_due = False
        self._samples = samples()
        self._is_empty = asyncio.Event()
        self._plane_descriptors: set[int] = set()
        self._plane = None

    @property
    def purges_version(self) -> int:
        """The version of the purge list that this node has."""
        return self.context.purges_version

    @property
    def lock(self) -> int | None:
        """The descriptor that the kernel closes if the process dies."""
        return self.cluster._polling._lock

    def accept(self, channel: SimulatedChannel) -> None:
        """See `media_net.Server`."""
        connected: Any = channel
        self._connections[channel.fd] = Connection(connected, self)

    def on_socket(self, fd: int, mask: int) -> None:
        """See `media_net.Server`."""
        connection = self._connections.get(fd)
        if connection is None:
            return
        if mask == select.EPOLLOUT:
            self._enqueue(connection)
            self._run_queue_soon()
        else:
            self._run_in_epoch(connection, partial(connection.on_event, mask))

    def frame(self, fd: int) -> bytes:
        """See `media_net.Server`."""
        return self._disk.data(fd)
