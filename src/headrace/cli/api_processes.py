"""The processes of one API, which share its port.

This process opens the listening sockets, one for each worker, with SO_REUSEPORT: the kernel
distributes new connections evenly. It keeps them open, so clients that connect while a worker is
replaced wait for the next one.

A dead worker is restarted with backoff. A reload replaces the workers one by one: a new one starts
beside the old one and, once it is ready, the old one drains (`web.serving`). So a reload loads new
code and settings without a refused or broken request, except for the number of processes and the
address. If a new worker does not become ready, the reload ends and the old workers stay.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from headrace.cli.supervisor import start_announcing
from headrace.engines.children import ChildProcess, RestartDelay
from headrace.kernel import metrics
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff, wait_event

RESTARTS: Final = Backoff(first_s=0.1, max_s=5.0)
"""Short, because clients wait in the socket of a dead worker."""
READY_S: Final = 60.0
STOP_MARGIN_S: Final = 3.0
"""Time for a worker beyond the time for its requests."""
_DEATHS: Final = metrics.counter(
    "web_process_deaths_total", "Processes of the API that ended unexpectedly."
)
log: Final = logger(__name__)


class _Worker:
    """A running worker."""

    def __init__(self, process: ChildProcess, ready: asyncio.Task[bool]) -> None:
        self.process = process
        self._ready = ready

    async def wait_ready(self, timeout_s: float) -> bool:
        """Whether it became ready within `timeout_s`."""
        await asyncio.wait({self._ready}, timeout=timeout_s)
        return self._ready.done() and not self._ready.cancelled() and self._ready.result()


class ApiProcesses:
    """Keeps one worker for each of `listeners`; `command(descriptor)` starts it."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        command: Callable[[int], Sequence[str]],
        *,
        graceful_s: float,
    ) -> None:
        self._listeners = listeners
        self._command = command
        self._stop_s = graceful_s + STOP_MARGIN_S
        self._stopping, self._all_ready = asyncio.Event(), asyncio.Event()
        self._ready: set[int] = set()
        """Numbers whose worker was ready at least once."""
        self._workers: dict[int, _Worker] = {}
        self._replacing = asyncio.Lock()
        """Held while a worker is started, so that a reload and a restart do not start two."""

    async def run(
        self, stop: asyncio.Event, reload: asyncio.Event, on_ready: Callable[[], None]
    ) -> None:
        """Serve until `stop`; reload whenever `reload` is set.

        Raises: SystemExit with the exit code of a worker that ended before it was ever ready.
        """
        keeping = [asyncio.create_task(self._keep(n)) for n in range(len(self._listeners))]
        serving = asyncio.create_task(self._serve(reload, on_ready))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*keeping, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()
            serving.cancel()
            stopping.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            for listener in self._listeners:
                listener.close()
            workers = list(self._workers.values())
            await asyncio.gather(
                *(one.process.stop([(signal.SIGTERM, self._stop_s)]) for one in workers)
            )
            ended = await asyncio.gather(*keeping, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    async def _serve(self, reload: asyncio.Event, on_ready: Callable[[], None]) -> None:
        await self._all_ready.wait()
        on_ready()
        while True:
            await reload.wait()
            reload.clear()
            await self._reload()

    async def _keep(self, number: int) -> None:
        delay = RestartDelay(RESTARTS)
        while not self._stopping.is_set():
            delay.note_start()
            async with self._replacing:
                worker = self._workers[number] = await self._start(number)
            exit_code = await worker.process.wait()
            while worker is not self._workers[number]:
                # A reload has replaced it.
                worker = self._workers[number]
                exit_code = await worker.process.wait()
            if self._stopping.is_set():
                return
            if number not in self._ready:
                log.error("api_process_failed", number=number, exit_code=exit_code)
                raise SystemExit(exit_code if exit_code > 0 else 1)
            _DEATHS.inc()
            delay_s = delay.next_s()
            log.warning(
                "api_process_died", number=number, exit_code=exit_code, restart_in_s=delay_s
            )
            await wait_event(self._stopping, delay_s)

    async def _reload(self) -> None:
        """Replace the workers one by one; stop at the first that does not become ready."""
        for number in range(len(self._listeners)):
            async with self._replacing:
                if not await self._replace(number):
                    return
        log.info("api_reloaded", processes=len(self._listeners))

    async def _replace(self, number: int) -> bool:
        new = await self._start(number)
        try:
            is_ready = await new.wait_ready(READY_S)
        except asyncio.CancelledError:
            await new.process.stop([(signal.SIGTERM, self._stop_s)])
            raise
        if not is_ready:
            await new.process.stop([(signal.SIGTERM, self._stop_s)])
            log.error("api_reload_failed", number=number, exit_code=await new.process.wait())
            return False
        old, self._workers[number] = self._workers[number], new
        await old.process.stop([(signal.SIGHUP, self._stop_s)])
        return True

    async def _start(self, number: int) -> _Worker:
        def note_ready(_: dict[str, Any]) -> None:
            self._ready.add(number)
            if len(self._ready) == len(self._listeners):
                self._all_ready.set()

        listener = self._listeners[number].fileno()
        process, ready = await start_announcing(
            self._command(listener), note_ready, files=(listener,), leads_session=False
        )
        return _Worker(process, ready)
