"""The parent of a node's processes: one filler where there are disks, and N workers.

All are started at once: workers open what the filler made as it comes. The filler is ended last, since answers under
way may need it.
What dies is started again with backoff, under its number: a worker's successor takes over its listening socket with
the clients that wait in it, a filler's successor the store with what the workers know to be right (`boot`).
Only the clients of a dead worker notice, and none of a dead filler but those whose block is nowhere yet.

A child that ends before it was ever ready ends the node: nothing that a second try would mend.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from headrace.engines.embedded.process import launcher_command
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.metrics import bound
from headrace.kernel.resilience import Backoff
from headrace.media.model import CHILD_DEATHS, MediaConfig
from headrace.media.service import Media
from headrace.media.worker.readiness import require_servable
from headrace.media.worker.serving import files_a_client, serve
from headrace.media.worker.sockets import listening_sockets, raise_file_limit, workers_wanted
from headrace.media.worker.telling import LINE_BYTES_MAX, Heard, Orders, Report, leave_hottest

log = logger(__name__)
RESTARTS: Final = Backoff(first_s=0.1, max_s=2.0)
"""Short at most: clients wait in the socket of a dead worker for its successor."""
HEALTHY_S: Final = 60.0
STOP_MARGIN_S: Final = 2.0
"""What a worker gets beyond its answers' time."""
CHILD: Final = "headrace.media.child"
"""The module that children are. Not the whole program: it imports little, so that a node is soon back."""
FILLER_STOP_S: Final = 8.0
"""What the filler gets to bring its blocks to the disks; killed, it only has to look at their sums again."""


class ChildFailed(Unavailable):
    """A process of the node ended before it was ready."""

    code = "media.child_failed"


async def run_node(
    media: Media,
    stop: asyncio.Event,
    on_ready: Callable[[str, int], None],
    *,
    orders: Orders,
) -> None:
    """Serve as a whole node until `stop`: in this process where one is enough, else as the parent of several.

    `orders` is what all children go by. Raises: InvalidConfig, InvalidNode, ListenFailed, ChildFailed.
    """
    require_servable(media.config)
    crew = Crew(media, orders)
    if crew.workers == 1 and not media.config.disks:
        await serve(media, stop, on_ready, run=media.folder)
    else:
        await crew.run(stop, on_ready)


@dataclass(slots=True, eq=False)
class Child:
    """A process to keep: what it is told, and the one that runs."""

    name: str
    kind: str
    orders: Orders
    files: Sequence[int] = ()
    process: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Crew:
    """Keeps a node's processes; see `run_node`."""

    def __init__(self, media: Media, orders: Orders) -> None:
        self._config: MediaConfig = media.config
        self._folder = media.folder
        self._orders = msgspec.structs.replace(orders, boot=secrets.token_hex(16))
        self._heard = Heard()
        self._stopping = asyncio.Event()
        self.workers = workers_wanted(
            media.config,
            cores=len(os.sched_getaffinity(0)),
            files_max=raise_file_limit(),
            files_a_client=files_a_client(media),
        )
        self._listeners: list[socket.socket] = []
        self._children: list[Child] = []

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that run, by name."""
        return {c.name: c.process.pid for c in self._children if c.process is not None}

    async def run(self, stop: asyncio.Event, on_ready: Callable[[str, int], None]) -> None:
        """Serve until `stop`. Raises: ListenFailed, ChildFailed."""
        plain = listening_sockets(self._config.listen, self.workers, "media.listen")
        tls: list[socket.socket] = []
        self._listeners = plain
        if self._config.listen_tls is not None:
            tls = listening_sockets(self._config.listen_tls, self.workers, "media.listen_tls")
            self._listeners = [*plain, *tls]
        fillers = [self._filler()] if self._config.disks else []
        workers = [self._worker(n, plain, tls) for n in range(self.workers)]
        self._children = [*fillers, *workers]
        stopping = asyncio.create_task(stop.wait())
        keeping = [asyncio.create_task(self._keep(child)) for child in self._children]
        assert self._folder is not None, "a node of several processes has a folder"
        leaving = asyncio.create_task(leave_hottest(self._folder, self._heard.hottest))
        try:
            if await self._wait_ready([*keeping, stopping]):
                on_ready(*plain[0].getsockname()[:2])
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
        """Whether all children came to serve, before anything in `ends` was over."""
        waits = [asyncio.ensure_future(child.ready.wait()) for child in self._children]
        try:
            while not all(wait.done() for wait in waits):
                left = [wait for wait in waits if not wait.done()]
                await asyncio.wait([*left, *ends], return_when=asyncio.FIRST_COMPLETED)
                if any(end.done() for end in ends):
                    return False
            return True
        finally:
            for wait in waits:
                wait.cancel()

    def _filler(self) -> Child:
        return Child("filler", "filler", self._orders)

    def _worker(
        self, number: int, plain: Sequence[socket.socket], tls: Sequence[socket.socket]
    ) -> Child:
        files = [sockets[number].fileno() for sockets in (plain, tls) if sockets]
        orders = msgspec.structs.replace(
            self._orders,
            number=number,
            workers=self.workers,
            listener=files[0],
            tls_listener=files[1] if tls else None,
        )
        return Child(f"worker-{number}", "worker", orders, files)

    # One child

    async def _keep(self, child: Child) -> None:
        loop, deaths = asyncio.get_running_loop(), 0
        while True:
            began_s = loop.time()
            exit_code = await self._run(child)
            if self._stopping.is_set():
                return
            if not child.ready.is_set():
                raise ChildFailed(
                    f"the {child.name} of this node ended with exit code {exit_code} before it was ready:"
                    " its last lines above say why"
                )
            bound(CHILD_DEATHS, "media_child_deaths_total", child=child.kind).inc()
            deaths = 1 if loop.time() - began_s > HEALTHY_S else deaths + 1
            delay_s = round(RESTARTS.delay_s(deaths), 2)
            log.warning("child_died", name=child.name, exit_code=exit_code, restart_in_s=delay_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return

    async def _run(self, child: Child) -> int:
        """Run it once to its end; the exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-u", "-m", CHILD, child.kind, str(theirs.fileno())]
            process = await asyncio.create_subprocess_exec(
                *launcher_command(signal.SIGTERM), "--", *command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *child.files),
                # Ctrl-C in a terminal is for the parent alone, which ends them in order.
                process_group=0,
            )  # fmt: skip
        child.process = process
        if self._stopping.is_set():
            process.terminate()
        hearing = asyncio.create_task(self._hear(child, ours))
        try:
            return await process.wait()
        finally:
            child.process = None
            # Its last words may still be in the socket.
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await hearing
            self._heard.forget(child.name)

    async def _hear(self, child: Child, control: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=control, limit=LINE_BYTES_MAX)
        try:
            writer.write(msgspec.json.encode(child.orders) + b"\n")
            while line := await reader.readline():
                report = msgspec.json.decode(line, type=Report)
                self._heard.take(child.name, report)
                if report.is_ready and not child.ready.is_set():
                    child.ready.set()
        except ConnectionError:
            # It died before it read what we said; its exit tells.
            return
        except ValueError as error:
            log.warning("child_not_understood", name=child.name, error=str(error))
        finally:
            writer.close()

    # The end

    async def _end(self, fillers: Sequence[Child], workers: Sequence[Child]) -> None:
        self._stopping.set()
        for listener in self._listeners:
            listener.close()
        await self._end_group(workers, self._config.stop_timeout_s + STOP_MARGIN_S)
        await self._end_group(fillers, FILLER_STOP_S)

    async def _end_group(self, group: Sequence[Child], patience_s: float) -> None:
        running = [child.process for child in group if child.process is not None]
        for process in running:
            with suppress(ProcessLookupError):
                process.terminate()
        if not running:
            return
        waits = [asyncio.ensure_future(process.wait()) for process in running]
        _, late = await asyncio.wait(waits, timeout=patience_s)
        if late:
            log.warning("children_killed_at_stop", count=len(late))
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*waits)
