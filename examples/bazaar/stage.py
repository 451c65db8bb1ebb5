"""What the demo runs on.

A data folder, free ports, the sellers' hosts, `headrace up` and the shop's pages.

Everything lies in one folder. Ports are kept there, so that the photos' links stay the same from
one run to the next. A port that somebody else has is replaced until it is free again. All
programs are real processes that end with the demo (see `leash`), and their output goes to files in
the folder.

"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from examples.bazaar.client import Client, RefusedError, ServerFailedError
from examples.bazaar.lock import DemoError, StoppedError, option
from examples.bazaar.origins import PORT_TAKEN
from examples.bazaar.shops import Shop

from headrace.jobs.agent.capacity import cores
from headrace.kernel.errors import Unavailable

READY_S: Final = 300.0
"""Longest start: a fresh data folder on a busy machine takes minutes."""
COMMAND_S: Final = 600.0
"""Longest run of a command; a busy machine needs a minute for what else takes a second."""
UP_SAID: Final = "Headrace is up"
"""The line of `headrace up` when every role is ready, also roles without a port."""
LOG_BYTES_MAX: Final = 10_000_000
"""The log of `headrace up` gets a new file at a start, if it is longer; the old one is kept."""
STOP_S: Final = 30.0
SLOTS: Final = 6
"""Slots on a machine of up to 6 cores."""
FLOATS: Final = 3
"""Slots for all queues; the others are enough for the minimums of the three timeout classes."""
PORT_TRIES: Final = 5
"""A port that is free now may be another's a moment later."""
_TAKEN: Final = re.compile(r"(?i)in use by (another|other) program|address already in use")
_ERROR_CODE: Final = re.compile(r"(?m)(?:\"code\":\"|\[)([a-z0-9_.]+)(?:\"|\]$)")
"""The code of an error that a command printed, with or without --json."""
ROOT: Final = Path(__file__).resolve().parents[2]
LOOPBACK: Final = "127.0.0.1"


class CommandFailedError(Exception):
    """A command ended with an error or took too long; the demo continues without it."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where things listen."""

    api: int
    media: int
    shop: int
    origins: int


_LISTENERS: Final = {"api": "console", "media": "photos' server", "shop": "site"}
_PREFERRED: Final = Ports(api=8080, media=8081, shop=8082, origins=8300)


class Stage:
    """The folder and the processes of one demo."""

    def __init__(
        self, folder: Path, sellers: Sequence[Shop], *, lock_fd: int, port: int | None = None
    ) -> None:
        """`port`: where the console is to listen, with photos and shop on the next two.

        Raises: DemoError, when one of these is taken.
        """
        self.folder = folder.resolve()
        self._port = port
        self._lock_fd = lock_fd
        self.sellers = sellers
        self.folder.mkdir(parents=True, exist_ok=True)
        self.origins_log = self.folder / "origins.log"
        self.headrace_log = self.folder / "headrace.log"
        self._log_begins_at = 0
        self.shop_log = self.folder / "shop.log"
        self.database = self.folder / "bazaar.sqlite"
        self.pictures = self.folder / "pictures"
        self.config = self.folder / "headrace.toml"
        self.data = self.folder / "headrace"
        self.waits_for = "the sellers' hosts"
        """What the start waits for now, for its progress."""
        self.notes: dict[str, str] = {}
        """A line for each port that is in use by others, by what would listen there."""
        self.ports = self._choose_ports()

    @property
    def api_url(self) -> str:
        """The HTTP API."""
        return f"http://{LOOPBACK}:{self.ports.api}"

    @property
    def media_url(self) -> str:
        """The range server."""
        return f"http://{LOOPBACK}:{self.ports.media}"

    @property
    def shop_url(self) -> str:
        """The site's pages."""
        return f"http://{LOOPBACK}:{self.ports.shop}"

    @property
    def token_file(self) -> Path:
        """The file with the token of all scopes, which only its owner may read."""
        return self.data / "token"

    def env(self) -> dict[str, str]:
        """The environment of commands on this platform: none of the caller's own settings."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")
        }
        paths = os.pathsep.join(path for path in (str(ROOT), kept.get("PYTHONPATH")) if path)
        return kept | {
            "PYTHONPATH": paths,
            "PYTHONUNBUFFERED": "1",
            # Processes return freed memory to the system early.
            "MALLOC_ARENA_MAX": "2",
            "MALLOC_TRIM_THRESHOLD_": "131072",
            "HEADRACE_CONFIG": str(self.config),
            "BAZAAR_DATABASE": str(self.database),
        }

    @contextlib.asynccontextmanager
    async def running(self, stop: asyncio.Event) -> AsyncIterator[asyncio.subprocess.Process]:
        """Hosts and `headrace up`, ready; both are ended on the way out. Raises: DemoError."""
        # Beside the start of the engines; only the first demo in a folder has pictures to draw.
        drawing = await self._start(
            [sys.executable, "-m", "examples.bazaar.pictures", str(self.pictures)], "pictures.log"
        )
        try:
            origins = await self._start_origins(stop)
            try:
                self.waits_for = f"PostgreSQL, Valkey and the roles ({self.headrace_log})"
                up = await self._start_up(origins, stop)
                try:
                    self.waits_for = "the photos of the sellers, which the first run draws"
                    await self._wait_drawn(drawing, stop)
                    self.waits_for = "the pages of the site"
                    async with self._serving_shop(stop):
                        self.waits_for = "a link into the console"
                        yield up
                finally:
                    await _end(up)
            finally:
                await _end(origins)
        finally:
            await _end(drawing)

    async def _wait_drawn(self, drawing: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
        while drawing.returncode is None:
            if stop.is_set():
                raise StoppedError
            await asyncio.sleep(0.1)
        if drawing.returncode:
            log = _tail(self.folder / "pictures.log")
            raise DemoError(f"the pictures were not drawn ({drawing.returncode}):\n{log}")

    async def _start_up(
        self, origins: asyncio.subprocess.Process, stop: asyncio.Event
    ) -> asyncio.subprocess.Process:
        """`headrace up`, ready: on other ports where one was taken meanwhile. Raises: DemoError."""
        tries_left = PORT_TRIES
        while True:
            tries_left -= 1
            self.ports = self._choose_ports(origins=self.ports.origins)
            self._write_config()
            command = [sys.executable, "-m", "headrace", "up", "examples.bazaar.chores:app"]
            self._begin_log()
            up = await self._start(command, self.headrace_log.name, mode="ab")
            try:
                await self._wait_ready(up, origins, stop)
            except StoppedError:
                await _end(up)
                raise
            except DemoError:
                await _end(up)
                if not tries_left or not _TAKEN.search(self._log()):
                    raise
            except BaseException:
                await _end(up)
                raise
            else:
                return up

    async def _start_origins(self, stop: asyncio.Event) -> asyncio.subprocess.Process:
        """The sellers' hosts, listening: on another port where this one was taken meanwhile.

        Raises: DemoError.
        """
        self.origins_log.write_bytes(b"")
        out = self.folder / "origins.out"
        for _ in range(PORT_TRIES):
            given = ["--port", str(self.ports.origins), "--log", str(self.origins_log)]
            given += ["--shops", str(len(self.sellers))]
            given += ["--pictures", str(self.pictures)]
            command = [sys.executable, "-m", "examples.bazaar.origins", *given]
            origins = await self._start(command, out.name)
            while b'"ready"' not in out.read_bytes() and origins.returncode is None:
                if stop.is_set():
                    await _end(origins)
                    raise StoppedError
                await asyncio.sleep(0.05)
            if origins.returncode is None:
                return origins
            if origins.returncode != PORT_TAKEN:
                break
            self.ports = self._choose_ports()
        raise DemoError(f"the sellers' hosts ended with {origins.returncode}:\n{_tail(out)}")

    @contextlib.asynccontextmanager
    async def _serving_shop(self, stop: asyncio.Event) -> AsyncIterator[None]:
        for _ in range(PORT_TRIES):
            listening = ["--host", LOOPBACK, "--port", str(self.ports.shop)]
            quiet = ["--log-level", "warning", "--timeout-graceful-shutdown", "3"]
            command = ["-m", "uvicorn", "examples.bazaar.site:web", *listening, *quiet]
            shop = await self._start([sys.executable, *command], self.shop_log.name)
            try:
                if await self._is_shop_up(shop, stop):
                    yield
                    return
            finally:
                await _end(shop)
            others = {name: port for name, port in asdict(self.ports).items() if name != "shop"}
            self.ports = self._choose_ports(**others)
        raise DemoError(f"the site's pages do not answer:\n{_tail(self.shop_log)}")

    async def _is_shop_up(self, shop: asyncio.subprocess.Process, stop: asyncio.Event) -> bool:
        """Whether its pages answer; False: somebody took its port meanwhile. Raises: DemoError."""
        deadline = time.monotonic() + READY_S
        while shop.returncode is None:
            if await _answers(self.shop_url, "/assets/shop.css"):
                return True
            if stop.is_set():
                raise StoppedError
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        if not _TAKEN.search(self.shop_log.read_text(encoding="utf-8", errors="replace")):
            raise DemoError(f"the site's pages do not answer:\n{_tail(self.shop_log)}")
        return False

    def token(self) -> str:
        """The token. Raises: OSError."""
        return self.token_file.read_text(encoding="ascii").strip()

    async def command(self, *words: str) -> bytes:
        """Run `headrace` with these words, as a person at the terminal would; return its output.

        The process ends with this call, also when it is cancelled. Raises: RefusedError, when
        a server that it needs is away; CommandFailedError.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", *words),
            env=self.env(),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        command = f"headrace {' '.join(words)}"
        try:
            async with asyncio.timeout(COMMAND_S):
                out, errors = await process.communicate()
        except TimeoutError:
            raise CommandFailedError(f"{command} took over {COMMAND_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            output = errors.decode(errors="replace")
            if process.returncode == Unavailable.exit_code:
                found = _ERROR_CODE.search(output)
                raise RefusedError(f"{command}: {output}", found[1] if found else "")
            raise CommandFailedError(f"{command} ended with {process.returncode}: {output}")
        return out

    async def console_link(self) -> str:
        """A one-time link into the console; its plain address where the command made none."""
        try:
            made = await self.command("console", "link")
        except (CommandFailedError, RefusedError):
            return f"{self.api_url}/console"
        return made.decode().strip()

    def _begin_log(self) -> None:
        """Separate the lines of this run: the console refers to those of earlier ones, too."""
        with contextlib.suppress(FileNotFoundError):
            if self.headrace_log.stat().st_size > LOG_BYTES_MAX:
                self.headrace_log.replace(self.headrace_log.with_suffix(".log.1"))
        with self.headrace_log.open("ab") as log:
            log.write(time.strftime("--- headrace up, %Y-%m-%d %H:%M:%S %z ---\n").encode())
            self._log_begins_at = log.tell()

    async def _start(
        self, program: list[str], output: str, *, mode: str = "wb"
    ) -> asyncio.subprocess.Process:
        # A session of its own: Ctrl-C reaches the demo alone, which ends things in order.
        leash = [sys.executable, "-m", "examples.bazaar.leash", str(os.getpid())]
        with (self.folder / output).open(mode) as out:
            return await asyncio.create_subprocess_exec(
                *leash,
                *program,
                env=self.env(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=(self._lock_fd,),
            )

    async def _wait_ready(
        self,
        up: asyncio.subprocess.Process,
        origins: asyncio.subprocess.Process,
        stop: asyncio.Event,
    ) -> None:
        deadline = time.monotonic() + READY_S
        hosts = f"http://{self.sellers[0].address}:{self.ports.origins}"
        waiting = {hosts: "/", self.media_url: "/m/", self.api_url: "/readyz"}
        while waiting or UP_SAID not in self._log():
            if stop.is_set():
                raise StoppedError
            for process, log, begins_at in (
                (up, self.headrace_log, self._log_begins_at),
                (origins, self.folder / "origins.out", 0),
            ):
                if process.returncode is not None:
                    text = _tail(log, begins_at)
                    raise DemoError(f"a program ended with {process.returncode}:\n{text}")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"not ready within {READY_S:.0f} s: {waiting or dead_roles(self._log())}\n"
                    f"{_tail(self.headrace_log, self._log_begins_at)}"
                )
            for url in [url for url, path in waiting.items() if await _answers(url, path)]:
                del waiting[url]
            await asyncio.sleep(0.1)
        if not self.token_file.exists():
            raise DemoError(f"`headrace up` is ready but made no token in {self.token_file}")

    def _log(self) -> str:
        """What this run of `headrace up` logged."""
        return _text(self.headrace_log, self._log_begins_at)

    def _write_config(self) -> None:
        self.config.write_text(
            f"[data]\nfolder = {json.dumps(str(self.data))}\n\n"
            f'[web]\nlisten = "{LOOPBACK}:{self.ports.api}"\n\n'
            f'[media]\nlisten = "{LOOPBACK}:{self.ports.media}"\nworkers = 1\n\n'
            "# Few processes and connections, to stay below 1 GB of memory on any machine.\n"
            f"[jobs]\nslots_per_core = {-(-SLOTS // cores())}\nfloats = {FLOATS}\n\n"
            "[postgres]\nconnections_max = 3\nslot_connections_max = 2\n\n"
            "# The sellers' hosts are on this machine: forbidden without these two lines.\n"
            f'[fetch]\nallow_networks = "127.0.0.0/8"\n'
            f'allow_ports = "80, 443, {self.ports.origins}"\n',
            encoding="utf-8",
        )

    def _choose_ports(self, **kept_ports: int) -> Ports:
        """Free ports; `kept_ports` are ours already.

        The usual ones where they are free, else those of the last run. The sellers' hosts have that
        of the last run first: the photos' links have it.
        """
        file, last = self.folder / "ports.json", asdict(_PREFERRED)
        with contextlib.suppress(FileNotFoundError, ValueError):
            kept = json.loads(file.read_text(encoding="utf-8"))
            last |= {name: int(kept[name]) for name in last if name in kept}
        chosen: dict[str, int] = dict(kept_ports)
        if self._port is not None:
            asked = {"api": self._port, "media": self._port + 1, "shop": self._port + 2}
            taken = [at for name, at in asked.items() if name not in chosen and not _is_free(at)]
            if taken:
                raise DemoError(
                    f"port {taken[0]} is in use: choose another with {option('port', '9000')}"
                )
            chosen |= asked
        for name, port in asdict(_PREFERRED).items():
            if name in chosen:
                continue
            if name == "origins":
                hosts = [shop.address for shop in self.sellers]
                chosen[name] = _free_port(hosts, last[name], port, taken=chosen.values())
                continue
            chosen[name] = _free_port([LOOPBACK], port, last[name], taken=chosen.values())
            self.notes.pop(name, None)
            if chosen[name] != port:
                self.notes[name] = (
                    f"port {port} is in use by another process: the {_LISTENERS[name]} uses"
                    f" {chosen[name]} (kept in {file}) until {port} is free at a start"
                )
        file.write_text(json.dumps(chosen), encoding="utf-8")
        return Ports(**chosen)


def _free_port(hosts: Sequence[str], *wanted: int, taken: Iterable[int]) -> int:
    tries = [*reversed(wanted)]
    for _ in range(50):
        if not tries:
            with socket.create_server((LOOPBACK, 0)) as probe:
                tries.append(probe.getsockname()[1])
        port = tries.pop()
        if port not in set(taken) and all(_can_bind(host, port) for host in hosts):
            return port
    raise DemoError(f"no port is free on all of {hosts[0]} .. {hosts[-1]}")


def _is_free(port: int) -> bool:
    return 0 < port < 65536 and _can_bind(LOOPBACK, port)


def _can_bind(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


async def _answers(url: str, path: str) -> bool:
    client = Client(url, patience_s=0)
    try:
        await client.request("GET", path)
    except ServerFailedError:
        return False
    finally:
        client.close()
    return True


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    # It may be stopped: a requested fault stops it for some seconds.
    process.send_signal(signal.SIGCONT)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def dead_roles(log: str) -> str:
    """The roles that ended, out of what `headrace up` logged."""
    died = [line for line in log.splitlines() if '"event":"role_died"' in line]
    names = {match[1] for line in died if (match := re.search(r'"name":"(\w+)"', line))}
    return f"{', '.join(sorted(names))} ended and was started again" if names else "the roles"


def _text(file: Path, begins_at: int) -> str:
    with file.open("rb") as log:
        log.seek(begins_at)
        return log.read().decode(errors="replace")


def _tail(file: Path, begins_at: int = 0) -> str:
    lines = _text(file, begins_at).splitlines()[-15:]
    return "\n".join(["  " + line for line in lines] + [f"  (all of it: {file})"])
