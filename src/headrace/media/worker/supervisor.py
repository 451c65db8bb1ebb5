"""The supervisor of a node's processes: one filler if there are disks, and N workers.

Before anything is opened, `require_servable` checks what depends on this machine, such as files of
certificates. Errors in the settings themselves are found by every command when it reads them. A
missing disk is no error of the settings: the node serves without it.

All processes are started at once. The filler is stopped last, since answers in progress may need
it. A dead process is restarted with backoff under its number. A new worker takes over the listening
socket with its waiting clients; a new filler takes over the cache, and blocks stay verified
(`boot`). Only clients of a dead worker notice, and clients that wait for a block during a restart
of the filler.

A child that ends before it was ready ends the node: a retry would not help.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.engines.children import ChildProcess, RestartDelay
from headrace.kernel.config import InvalidConfig
from headrace.kernel.errors import FieldProblem, Unavailable
from headrace.kernel.ipc import MessageConnection
from headrace.kernel.logs import logger
from headrace.kernel.metrics import bound
from headrace.kernel.resilience import Backoff, wait_event
from headrace.media.cluster.membership import member_of
from headrace.media.model import CHILD_DEATHS, MediaConfig
from headrace.media.native import NativePlaneMissing, library_path
from headrace.media.service import Media
from headrace.media.worker.ipc_reports import (
    TICKET_SEED_BYTES,
    ChildConfig,
    Report,
    ReportCollector,
    decode_report,
    keep_hottest_file,
)
from headrace.media.worker.serving import OnReady, addresses_of, files_per_client, serve
from headrace.media.worker.socket_io import (
    listening_sockets,
    raise_file_limit,
    workers_wanted,
)
from headrace.media.worker.tls_io import require_current

log = logger(__name__)
RESTARTS: Final = Backoff(first_s=0.1, max_s=2.0)
"""Short, because clients wait in the socket of a dead worker."""
STOP_MARGIN_S: Final = 2.0
"""Time for a worker beyond the time for its answers."""
LAST_REPORTS_S: Final = 1.0
CHILD: Final = "headrace.media.child"
"""The module that children run. It imports little, so that a node restarts fast."""
FILLER_STOP_S: Final = 8.0
"""Time for the filler to write its blocks. If it is killed, blocks must be verified again."""


def require_servable(config: MediaConfig) -> None:
    """Check the setup of this machine. Raises: InvalidConfig, with every problem; InvalidNode."""
    InvalidConfig.require_none(_problems_of(config), "configuration")
    # A port chosen by the kernel is available only after the node listens.
    if config.node is not None and (config.advertise or config.listen[1]):
        member_of(config, config.listen)


def _problems_of(config: MediaConfig) -> Iterator[FieldProblem]:
    cert, key, path = config.tls_cert, config.tls_key, config.access_log_path
    if cert is None:
        if config.listen_tls is not None:
            text = "expected a file with a certificate, since media.listen_tls is set, got none"
            yield FieldProblem("media.tls_cert", "missing", text)
    elif config.listen_tls is not None:
        try:
            require_current(cert, key or cert)
        except OSError as error:  # ssl.SSLError is one
            needed = "a certificate and its private key, PEM without a password"
            got = f"{cert} and {key or 'no media.tls_key'}: {error.strerror or error}"
            yield FieldProblem("media.tls_cert", "invalid", f"expected {needed}, got {got}")
    if config.access_log != "off" and path is not None:
        try:
            Path(path).open("ab").close()
        except OSError as error:
            text = f"expected a file that can be written, got {path}: {error.strerror}"
            yield FieldProblem("media.access_log_path", "invalid", text)
    if config.variants is not None and config.upstream:
        text = "expected unset, since media.upstream is set: the upstream cluster makes variants"
        yield FieldProblem("media.variants", "invalid", text)
    for disk in config.disks:
        with suppress(OSError):
            mode = disk.path.stat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISBLK(mode):
                text = f"expected a folder or a block device, got {disk.path}, which is neither"
                yield FieldProblem("media.disks", "invalid", text)


class ChildFailed(Unavailable):
    """A process of the node ended before it was ready."""

    code = "media.child_failed"


async def run_node(
    media: Media,
    stop: asyncio.Event,
    on_ready: OnReady,
    *,
    child_config: ChildConfig,
) -> None:
    """Serve as a whole node until `stop`, with child processes where they are needed.

    `child_config` is the configuration of all children. Raises: InvalidConfig, InvalidNode,
    ListenFailed, ChildFailed.
    """
    require_servable(media.config)
    if media.config.data_plane != "python":
        # Once, not in each worker. A worker without it reports that and serves in Python.
        with suppress(NativePlaneMissing):
            await asyncio.to_thread(library_path)
    supervisor = Supervisor(media, child_config)
    if supervisor.workers == 1 and not media.config.disks:
        await serve(media, stop, on_ready, run=media.folder)
    else:
        await supervisor.run(stop, on_ready)


@dataclass(slots=True, eq=False)
class Child:
    """A process to keep running: its configuration and the running process."""

    name: str
    kind: str
    child_config: ChildConfig
    files: Sequence[int] = ()
    process: ChildProcess | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Keeps a node's processes running; see `run_node`."""

    def __init__(self, media: Media, child_config: ChildConfig) -> None:
        self._config: MediaConfig = media.config
        self._folder = media.folder
        self._child_config = msgspec.structs.replace(
            child_config,
            boot=secrets.token_hex(16),
            ticket_seed=secrets.token_bytes(TICKET_SEED_BYTES),
        )
        self._reports = ReportCollector()
        self._stopping = asyncio.Event()
        self.workers = workers_wanted(
            media.config,
            cores=len(os.sched_getaffinity(0)),
            files_max=raise_file_limit(),
            files_per_client=files_per_client(media),
        )
        self._listeners: list[socket.socket] = []
        self._children: list[Child] = []

    async def run(self, stop: asyncio.Event, on_ready: OnReady) -> None:
        """Serve until `stop`. Raises: ListenFailed, ChildFailed."""
        plain = listening_sockets(self._config.listen, self.workers, "media.listen")
        tls: list[socket.socket] = []
        self._listeners = plain
        if self._config.listen_tls is not None:
            tls = listening_sockets(self._config.listen_tls, self.workers, "media.listen_tls")
            self._listeners = [*plain, *tls]
        fillers = [Child("filler", "filler", self._child_config)] if self._config.disks else []
        workers = [self._worker(n, plain, tls) for n in range(self.workers)]
        self._children = [*fillers, *workers]
        stopping = asyncio.create_task(stop.wait())
        keeping = [asyncio.create_task(self._keep(child)) for child in self._children]
        assert self._folder is not None, "a node of several processes has a folder"
        leaving = asyncio.create_task(keep_hottest_file(self._folder, self._reports.hottest))
        try:
            if await self._wait_ready([*keeping, stopping]):
                on_ready(*addresses_of(plain, tls))
                await asyncio.wait([*keeping, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            leaving.cancel()
            await self._end(fillers, workers)
            ended = await asyncio.gather(*keeping, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    async def _wait_ready(self, ends: Sequence[asyncio.Task[Any]]) -> bool:
        """Wait until all children are ready. Return False if anything in `ends` finished before."""
        ready = asyncio.gather(*(child.ready.wait() for child in self._children))
        try:
            await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
            return ready.done() and not any(end.done() for end in ends)
        finally:
            ready.cancel()
            # Retrieved here, or asyncio logs the cancellation as an error.
            await asyncio.gather(ready, return_exceptions=True)

    def _worker(
        self, number: int, plain: Sequence[socket.socket], tls: Sequence[socket.socket]
    ) -> Child:
        files = [sockets[number].fileno() for sockets in (plain, tls) if sockets]
        child_config = msgspec.structs.replace(
            self._child_config,
            number=number,
            workers=self.workers,
            listener=files[0],
            tls_listener=files[1] if tls else None,
        )
        return Child(f"worker-{number}", "worker", child_config, files)

    # One child

    async def _keep(self, child: Child) -> None:
        delay = RestartDelay(RESTARTS)
        while True:
            delay.note_start()
            exit_code = await self._run(child)
            if self._stopping.is_set():
                return
            if not child.ready.is_set():
                raise ChildFailed(
                    f"the {child.name} of this node ended with exit code {exit_code} before it was"
                    " ready: see its last lines above"
                )
            bound(CHILD_DEATHS, "media_child_deaths_total", child=child.kind).inc()
            delay_s = delay.next_s()
            log.warning("child_died", name=child.name, exit_code=exit_code, restart_in_s=delay_s)
            if await wait_event(self._stopping, delay_s):
                return

    async def _run(self, child: Child) -> int:
        """Run it once until it ends. Return the exit code."""
        lost = asyncio.Event()
        link = MessageConnection(decode_report, partial(self._take_report, child), lost.set)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-u", "-m", CHILD, child.kind, str(theirs.fileno())]
            process = await ChildProcess.start(
                command, leads_session=False, files=(theirs.fileno(), *child.files)
            )
        child.process = process
        await link.connect(ours)
        link.send(child.child_config)
        if self._stopping.is_set():
            await process.stop([(signal.SIGTERM, FILLER_STOP_S)])
        try:
            return await process.wait()
        finally:
            child.process = None
            # Until the end of the socket its last reports may be read.
            await wait_event(lost, LAST_REPORTS_S)
            link.close()
            self._reports.forget(child.name)

    def _take_report(self, child: Child, report: Report) -> None:
        self._reports.take(child.name, report)
        if report.is_ready:
            child.ready.set()

    # The end

    async def _end(self, fillers: Sequence[Child], workers: Sequence[Child]) -> None:
        self._stopping.set()
        for listener in self._listeners:
            listener.close()
        await self._end_group(workers, self._config.stop_timeout_s + STOP_MARGIN_S)
        await self._end_group(fillers, FILLER_STOP_S)

    async def _end_group(self, group: Sequence[Child], timeout_s: float) -> None:
        running = [child.process for child in group if child.process is not None]
        in_time = await asyncio.gather(
            *(process.stop([(signal.SIGTERM, timeout_s)]) for process in running)
        )
        if not all(in_time):
            log.warning("children_killed_at_stop", count=in_time.count(False))
