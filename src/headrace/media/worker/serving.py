"""One worker: its sockets, its request context, its node."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.media.hottest import HOTTEST
from headrace.media.service import Media
from headrace.media.worker.ipc_reports import (
    TICKET_SEED_BYTES,
    ReportSender,
    keep_hottest_file,
)
from headrace.media.worker.node import Node
from headrace.media.worker.request_context import open_request_context, served_folder
from headrace.media.worker.socket_io import (
    connections_of_worker,
    listening_sockets,
    raise_file_limit,
)

OnReady = Callable[[str, str | None], None]
"""Takes the plain address and that of HTTPS, if any, once clients can connect."""


@dataclass(frozen=True, slots=True)
class WorkerParams:
    """The number of this worker, the number of workers, and its listening sockets.

    `ticket_seed` of TLS is the same in all workers of a node.
    """

    number: int
    workers: int
    boot: str
    listener: socket.socket
    tls_listener: socket.socket | None = None
    ticket_seed: bytes = field(default_factory=lambda: secrets.token_bytes(TICKET_SEED_BYTES))


def addresses_of(
    plain: Sequence[socket.socket], tls: Sequence[socket.socket]
) -> tuple[str, str | None]:
    """The address of the plain listeners, and that of the TLS listeners if there are any."""
    found = [":".join(map(str, one[0].getsockname()[:2])) if one else None for one in (plain, tls)]
    assert found[0] is not None, "every node has a plain listener"
    return found[0], found[1]


async def serve(
    media: Media,
    stop: asyncio.Event,
    on_ready: OnReady,
    *,
    run: Path | None = None,
) -> None:
    """Serve `GET /m/{key}` in this process until `stop`, then finish answers for `stop_timeout`.

    `on_ready` gets the addresses once clients can connect. `run` is the node's folder; None for a
    node without disks and cluster. Raises: ListenFailed.
    """
    config = media.config
    [listener] = listening_sockets(config.listen, 1, "media.listen")
    tls: Sequence[socket.socket] = ()
    if config.listen_tls is not None:
        tls = listening_sockets(config.listen_tls, 1, "media.listen_tls")
    params = WorkerParams(0, 1, "", listener, tls[0] if tls else None)
    plain_at, tls_at = addresses_of([listener], tls)
    leaving = None
    if media.folder is not None:
        leaving = asyncio.create_task(keep_hottest_file(media.folder, HOTTEST.top))
    try:
        await _serve_worker(media, stop, params, lambda: on_ready(plain_at, tls_at), run=run)
    finally:
        if leaving is not None:
            leaving.cancel()


async def run_worker(
    media: Media, stop: asyncio.Event, params: WorkerParams, sender: ReportSender
) -> None:
    """Serve as one worker of a node until `stop` or the end of its parent."""
    telling = asyncio.create_task(sender.run(stop))
    try:
        await _serve_worker(media, stop, params, sender.report_ready, run=media.folder)
    finally:
        telling.cancel()
        await sender.close()


async def _serve_worker(
    media: Media,
    stop: asyncio.Event,
    params: WorkerParams,
    on_ready: Callable[[], None],
    *,
    run: Path | None,
) -> None:
    files_max = raise_file_limit()
    connections_max = connections_of_worker(
        media.config.connections_max,
        workers=params.workers,
        files_max=files_max,
        files_per_client=files_per_client(media),
    )
    listen = params.listener.getsockname()[:2]
    tls = [params.tls_listener] if params.tls_listener is not None else []
    async with open_request_context(
        media, number=params.number, run=run, boot=params.boot, listen=listen
    ) as context:
        node = Node(
            context,
            [params.listener],
            tls_listeners=tls,
            ticket_seed=params.ticket_seed,
            connections_max=connections_max,
            worker=params.number,
        )
        try:
            node.start()
            on_ready()
            await stop.wait()
            await node.drain()
        finally:
            node.close()


def files_per_client(media: Media) -> int:
    """Descriptors for each client: a socket, and a file if files are sent directly."""
    return 2 if served_folder(media) is not None else 1
