"""The entry point of a child process: `python -m headrace.media.child worker|filler DESCRIPTOR`.

DESCRIPTOR is the control socket. Children are started, not forked, because the client of the object
store has threads. The configuration is the first message on the control socket
(`ipc_reports.ChildConfig`), so no secret is on a command line. This module imports no application,
no commands and no engine except the object store, because a restarted node waits for these imports
before it serves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

from headrace.engines.blobs import Blobs, BlobsConfig
from headrace.engines.mount_guard import StoreRecord
from headrace.kernel import spans
from headrace.kernel.config import load_config
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import configure_logs
from headrace.kernel.signing import derive_key, load_or_create_secret
from headrace.media.model import MediaConfig
from headrace.media.service import Media
from headrace.media.worker.ipc_reports import ChildConfig, ReportSender

STORE_KEY_USE: Final = "media-store"


def main(kind: str, control: int) -> int:
    """Run a worker or the filler until SIGTERM or the end of the parent. Return the exit code.

    Ctrl-C is handled by the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sender = ReportSender(socket.socket(fileno=control))
    config = sender.read_config()
    role = "media-filler" if kind == "filler" else f"media-worker-{config.number}"
    configure_logs(role, level=config.log_level)
    try:
        if kind == "worker":
            spans.start("media")
        # The standard loop: clients are served by a separate epoll, and TLS writes are faster on
        # it.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(_run(kind, config, sender))
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error.text} [{error.code}]\n")
        return error.exit_code
    spans.flush()
    return 0


def media_of(config: ChildConfig) -> Media:
    """The services with the configuration of the parent. Raises: InvalidConfig."""
    sections = {"blobs": BlobsConfig, "media": MediaConfig}
    loaded = load_config(sections, env={}, flags=config.settings)
    record = None
    if config.store_record:
        record = StoreRecord(Path(config.store_record), may_create=False)
    return Media(
        Blobs(config.blobs_url, loaded.section(BlobsConfig), record=record),
        loaded.section(MediaConfig),
        secret=lambda: _root_secret(config),
        folder=Path(config.run_folder),
    )


def _root_secret(config: ChildConfig) -> str:
    return os.environ.get("HEADRACE_SECRET") or load_or_create_secret(Path(config.data_folder))


async def _run(kind: str, config: ChildConfig, sender: ReportSender) -> None:
    media = media_of(config)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await (_fill if kind == "filler" else _serve)(media, config, sender, stop)
    finally:
        await media.blobs.close()


async def _serve(
    media: Media, config: ChildConfig, sender: ReportSender, stop: asyncio.Event
) -> None:
    from headrace.media.worker.serving import WorkerParams, run_worker

    assert config.listener is not None, "a worker has a listener"
    tls = socket.socket(fileno=config.tls_listener) if config.tls_listener is not None else None
    listener = socket.socket(fileno=config.listener)
    params = WorkerParams(
        config.number, config.workers, config.boot, listener, tls, config.ticket_seed
    )
    await run_worker(media, stop, params, sender)


async def _fill(
    media: Media, config: ChildConfig, sender: ReportSender, stop: asyncio.Event
) -> None:
    from headrace.media.cache import Filler

    assert media.folder is not None, "a node with disks has a folder"
    filler = Filler(
        media.origin,
        media.config.disks,
        run=media.folder,
        boot=config.boot,
        hash_key=derive_key(_root_secret(config), STORE_KEY_USE).secret,
        timeout_s=media.config.origin_timeout_s,
    )
    reporting = asyncio.create_task(sender.run(stop))
    try:
        await filler.run(stop, sender.report_ready)
    finally:
        reporting.cancel()
        await media.close_upstream()
        await sender.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
