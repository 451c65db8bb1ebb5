"""A child of a media node: `python -m headrace.media.child worker|filler <descriptor of its control socket>`.

Started anew, not forked: the object store's client has threads, which no fork survives. What it is to do comes as the
first line of its control socket (`telling.Orders`), so no secret and no setting stands on a command line. It imports no
application, no commands and no engine but the object store: a node that was killed waits for its children's imports before
it serves again, and those of the whole program took 0.9 s of CPU each (2026-11-22, 2 cores), these a third of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from headrace.engines.blobs import Blobs, BlobsConfig
from headrace.engines.mount_guard import StoreRecord
from headrace.kernel.config import load_config
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import configure_logs
from headrace.kernel.signing import derive_key, load_or_create_secret
from headrace.media.model import MediaConfig
from headrace.media.service import Media
from headrace.media.worker.telling import Orders, Teller

STORE_KEY_USE: Final = "media-store"
Body = Callable[[asyncio.Event], Awaitable[None]]


def main(kind: str, control: int) -> int:
    """Be a worker or the filler until SIGTERM or the end of the parent; Ctrl-C is the parent's. The exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    teller = Teller(socket.socket(fileno=control))
    orders = teller.read_orders()
    role = "media-filler" if kind == "filler" else f"media-worker-{orders.number}"
    configure_logs(role, level=orders.log_level)
    try:
        media = media_of(orders)
        body = _fill(media, orders, teller) if kind == "filler" else _serve(media, orders, teller)
        # The standard loop: the data plane is an epoll of its own, and TLS writes are faster on it.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(_run(media, body))
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error.text} [{error.code}]\n")
        return error.exit_code
    return 0


def media_of(orders: Orders) -> Media:
    """The room as the parent configured it. Raises: InvalidConfig."""
    sections = {"blobs": BlobsConfig, "media": MediaConfig}
    loaded = load_config(sections, env={}, flags=orders.settings)
    record = None
    if orders.store_record:
        record = StoreRecord(Path(orders.store_record), may_create=False)
    return Media(
        Blobs(orders.blobs_url, loaded.section(BlobsConfig), record=record),
        loaded.section(MediaConfig),
        secret=lambda: _root_secret(orders),
        folder=Path(orders.run_folder),
    )


def _root_secret(orders: Orders) -> str:
    return os.environ.get("HEADRACE_SECRET") or load_or_create_secret(Path(orders.data_folder))


async def _run(media: Media, body: Body) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await body(stop)
    finally:
        await media.blobs.close()


def _serve(media: Media, orders: Orders, teller: Teller) -> Body:
    from headrace.media.worker.serving import Place, run_worker

    assert orders.listener is not None, "a worker has a listener"
    tls = socket.socket(fileno=orders.tls_listener) if orders.tls_listener is not None else None
    listener = socket.socket(fileno=orders.listener)
    place = Place(orders.number, orders.workers, orders.boot, listener, tls)

    async def body(stop: asyncio.Event) -> None:
        await run_worker(media, stop, place, teller)

    return body


def _fill(media: Media, orders: Orders, teller: Teller) -> Body:
    from headrace.media.store import Filler

    async def body(stop: asyncio.Event) -> None:
        assert media.folder is not None, "a node with disks has a folder"
        keeping = Filler(
            media.blobs,
            media.config.disks,
            run=media.folder,
            boot=orders.boot,
            hash_key=derive_key(_root_secret(orders), STORE_KEY_USE).secret,
            timeout_s=media.config.origin_timeout_s,
        )
        telling = asyncio.create_task(teller.run(stop))
        try:
            await keeping.run(stop, teller.tell_ready)
        finally:
            telling.cancel()
            await teller.close()

    return body


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
