"""A site on several hosts, set up as docs/several-hosts.md shows it, under the load of its clients.

Settings and HAProxy's configuration are the blocks of that page with other addresses; commands are
those of the units in `deploy/systemd`. What a unit does for its host, this module does: it starts
the commands of a host, also after a power cut, and restarts one for an upgrade.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from site_clients import SiteClients
from tests.kit.hosts import Host, Hosts
from tests.kit.processes import ROOT, HeadraceProcess, is_alive, wait_until

from headrace.app import PACKAGES
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig

PAGE: Final = (ROOT / "docs" / "several-hosts.md").read_text()
UNITS: Final = ROOT / "deploy" / "systemd"
CENTRES: Final = ("east", "west", "north")
ENTRY: Final = 21
FIRST: Final = {"front": 31, "work": 41, "media": 51}
"""The last part of the address of the first host of a kind."""
KINDS: Final = {
    "front": ("headrace-api", "headrace-scheduler", "headrace-flusher"),
    "work": ("headrace-agent",),
    "media": ("headrace-media",),
}


def block(language: str, text: str) -> str:
    """The page's only block of a language that contains a text."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)
    [one] = [code for code in found if text in code]
    return textwrap.dedent(one)


def settings_of(text: str) -> dict[str, str]:
    """The settings of an environment file."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def words_of(unit: str, settings: Mapping[str, str]) -> list[str]:
    """The words of a unit's command after `headrace`, filled in as by systemd."""
    [line] = re.findall(r"^ExecStart=/opt/headrace/bin/headrace (.*)$", unit, re.MULTILINE)
    return [
        re.sub(r"\$\{(\w+)\}", lambda name: settings[name[1]], word) for word in shlex.split(line)
    ]


@dataclass(slots=True)
class Machine:
    """A host with its units; `code` is a folder with the package `headrace`."""

    host: Host
    folder: Path
    units: tuple[str, ...]
    settings: dict[str, str]
    code: Path = ROOT / "src"
    running: dict[str, HeadraceProcess] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.host.name

    def boot(self) -> None:
        """Start all its units."""
        for unit in self.units:
            self.start(unit)

    def start(self, unit: str) -> None:
        """Start a unit as it is now."""
        text = (UNITS / f"{unit}.service").read_text()
        env = {**self.settings, "PYTHONPATH": f"{self.code}:{Path(__file__).parent}"}
        self.running[unit] = HeadraceProcess(
            words_of(text, self.settings),
            folder=self.folder,
            env=env,
            python=self.host.python(self.folder),
        )

    def restart(self, unit: str, code: Path | None = None) -> None:
        """Stop a unit and start it, with other code if it was upgraded."""
        self.code = code or self.code
        self.running.pop(unit).end()
        self.start(unit)

    def kill(self) -> None:
        """Kill all its processes, as a power cut does."""
        self.host.kill()
        for process in self.running.values():
            process.wait_exit()
        self.running.clear()

    def require_running(self) -> None:
        """No unit ended."""
        for unit, process in list(self.running.items()):
            if not is_alive(process.pid):
                text = f"{process.wait_exit()}: {process.out[-800:]}{process.err[-3000:]}"
                raise AssertionError(f"{unit} of {self.name} ended with {text}")


class EntryHost:
    """HAProxy with the page's configuration, and the unit that keeps its second file."""

    def __init__(self, host: Host, folder: Path, prefix: str, settings: dict[str, str]) -> None:
        self.host, self._folder, self._settings = host, folder, settings
        self._prefix = prefix
        self.watch: HeadraceProcess | None = None
        self._haproxy: subprocess.Popen | None = None
        folder.mkdir(parents=True)
        text = block("haproxy", "headrace_api").replace("10.0.0.", prefix)
        self._files = (folder / "haproxy.cfg", folder / "media.cfg")
        self._files[0].write_text(text.replace("/run/haproxy/admin.sock", str(self._socket)))

    @property
    def _socket(self) -> Path:
        return self._folder / "s"

    def boot(self) -> None:
        """Start both."""
        reload = self._folder / "reload"
        pid = self._folder / "pid"
        reload.write_text(f"#!/bin/sh\nexec kill -USR2 $(cat {pid})\n")
        reload.chmod(0o755)
        unit = block("ini", "headrace media entry").replace("10.0.0.", self._prefix)
        words = words_of(unit, self._settings)
        words[words.index("--watch") + 1] = str(self._files[1])
        words[words.index("--run") + 1] = str(reload)
        python = self.host.python(self._folder)

        def wrote() -> bool:
            # Restart=always: it ends while no node is registered.
            if self.watch is None or not is_alive(self.watch.pid):
                self.watch = HeadraceProcess(
                    words, folder=self._folder, env=self._settings, python=python
                )
            return self._files[1].exists()

        wait_until(wrote, what="the entry wrote its file")
        files = [word for file in self._files for word in ("-f", file)]
        with (self._folder / "haproxy.log").open("ab") as log:
            self._haproxy = subprocess.Popen(
                [*self.host.inside, "haproxy", "-W", "-p", pid, *files],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def set_state(self, server: str, state: str) -> None:
        """Run the page's command for a server of the API."""
        commands = block("sh", "set server headrace_api").replace("front1", server)
        [command] = [line for line in commands.splitlines() if f" state {state}" in line]
        text = re.findall(r'"(.*?)"', command)[0]
        self.ask(text)

    def is_up(self, server: str) -> bool:
        """Whether HAProxy sends requests for the API to a front host."""
        rows = [line.split(",") for line in self.ask("show stat").splitlines()]
        return any(row[:2] == ["headrace_api", server] and row[17].startswith("UP") for row in rows)

    def is_out(self, node: str) -> bool:
        """Whether a draining media node gets no clients."""
        found = re.search(rf"server {node} \S+ weight (\d+)", self._files[1].read_text())
        return found is not None and found[1] == "0"

    def ask(self, text: str) -> str:
        """A command of HAProxy's socket, and its reply."""
        client = [sys.executable, "-c", ASK, str(self._socket), text]
        return subprocess.run(client, capture_output=True, text=True, check=True).stdout

    def kill(self) -> None:
        self.host.kill()
        for process in (self.watch, self._haproxy):
            if isinstance(process, HeadraceProcess):
                process.wait_exit()
            elif process is not None:
                process.wait(10)
        self.watch = None
        (self._folder / "pid").unlink(missing_ok=True)


ASK: Final = """
import socket, sys
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    client.sendall(sys.argv[2].encode() + b"\\n")
    while data := client.recv(65536):
        sys.stdout.write(data.decode())
"""


class SeveralHosts(SiteClients):
    """The hosts, and the clients of all rooms. `engines` are the settings that name the engines."""

    rooms = ("jobs", "fetch", "photos", "views", "feed", "media")

    def __init__(
        self,
        folder: Path,
        net: Hosts,
        engines: Mapping[str, str],
        *,
        centres: int = 1,
        photos_url: str,
        code: Path = ROOT / "src",
        **settings: str,
    ) -> None:
        super().__init__(folder, Postgres(engines["HEADRACE_POSTGRES_URL"], PostgresConfig()))
        self.photos_url = photos_url
        self._net = net
        port = photos_url.rpartition(":")[2]
        self._settings = {
            **settings_of(block("ini", "HEADRACE_APP=")),
            "HEADRACE_APP": "site_app:app",
            "HEADRACE_FETCH_ALLOW_NETWORKS": f"{net.prefix}0/24",
            "HEADRACE_FETCH_ALLOW_PORTS": f"80,443,{port}",
            "RECEIVED": str(folder),
            **engines,
            **{f"HEADRACE_{name}": value for name, value in settings.items()},
        }
        self.machines: dict[str, Machine] = {}
        for kind, count in (("front", 2), ("work", 2), ("media", 2 * centres)):
            for number in range(count):
                self._add(kind, number, code)
        entry = net.add("entry1", ENTRY)
        own = {**self._settings, "HEADRACE_DATA_FOLDER": str(folder / "entry1" / "data")}
        self.entry = EntryHost(entry, folder / "entry1", net.prefix, own)
        self.api_url = f"http://{entry.address}:8080"
        self.media_url = f"http://{entry.address}:8081"

    def _add(self, kind: str, number: int, code: Path) -> None:
        """Add a host of a kind with the page's settings of the first one."""
        host = self._net.add(f"{kind}{number + 1}", FIRST[kind] + number)
        folder = self.received / host.name
        text = block("ini", f"HEADRACE_DATA_METRICS_LISTEN=10.0.0.{FIRST[kind]}:")
        text = text.replace(f"10.0.0.{FIRST[kind]}", host.address).replace("media1", host.name)
        settings = {
            **self._settings,
            **settings_of(text.replace("=east", f"={CENTRES[number // 2]}")),
            "HEADRACE_DATA_FOLDER": str(folder / "data"),
        }
        if kind == "media":
            (folder / "cache").mkdir(parents=True)
            settings |= {"HEADRACE_MEDIA_DISKS": f"{folder / 'cache'}:64MiB"}
            settings |= {"HEADRACE_MEDIA_WORKERS": "1"}
        folder.mkdir(parents=True, exist_ok=True)
        self.machines[host.name] = Machine(host, folder, KINDS[kind], settings, code)

    async def start(self, packages: tuple[str, ...] = PACKAGES) -> None:
        """Migrate, start all units and wait until every room answers through the entry."""
        await apply_migrations(self.postgres, packages)
        await self.make_token()
        for machine in self.machines.values():
            machine.boot()
        await asyncio.to_thread(self.entry.boot)
        await self.begin()

    def require_running(self) -> None:
        """No unit ended that was not killed with its host."""
        for machine in self.machines.values():
            machine.require_running()

    async def document(self, path: str) -> Any:
        """What the API returns to the operator; None while it cannot."""
        async with self.client() as client:
            try:
                answer = await client.get(path)
            except httpx.TransportError:
                return None
            return answer.json() if answer.is_success else None

    async def run(self, *words: str) -> None:
        """Run a command of Headrace on a front host."""
        machine = self.machines["front1"]
        settings = {**machine.settings, "PYTHONPATH": str(machine.code)}
        python = machine.host.python(machine.folder)
        command = HeadraceProcess(list(words), folder=machine.folder, env=settings, python=python)
        assert await asyncio.to_thread(command.wait_exit) == 0, command.err

    async def is_healthy(self, machine: Machine) -> bool:
        """Whether the API of a front host answers HAProxy's check."""
        try:
            async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
                url = f"http://{machine.settings['HEADRACE_WEB_LISTEN']}/healthz"
                return (await client.get(url)).is_success
        except httpx.TransportError:
            return False

    async def has_alert(self, host: str) -> bool:
        """Whether an open alert names a host."""
        found = await self.document("/v1/fleet/alerts?open=true")
        return host in {alert["subject"] for alert in found or ()}

    async def hosts_shown(self) -> dict[str, bool]:
        """The hosts of the fleet, and whether each is silent."""
        found = await self.document("/v1/fleet")
        return {host["name"]: host["is_silent"] for host in (found or {}).get("hosts", ())}

    async def is_whole(self) -> bool:
        """Whether every host takes part, as fleet and media nodes show it."""
        hosts, nodes = await self.hosts_shown(), await self.nodes_shown()
        works = {name for name in self.machines if name.startswith("work")}
        return works == {name for name, is_silent in hosts.items() if not is_silent} and (
            nodes == {name: True for name in self.machines if name.startswith("media")}
        )

    async def nodes_shown(self) -> dict[str, bool]:
        """The media nodes, and whether each answers."""
        found = await self.document("/v1/media/nodes")
        return {node["name"]: node["is_alive"] for node in found or ()}

    async def end(self) -> None:
        for machine in self.machines.values():
            for process in machine.running.values():
                with suppress(ProcessLookupError):
                    process.signal(signal.SIGTERM)
        self.entry.kill()
        for machine in self.machines.values():
            for process in machine.running.values():
                process.end()
        await self.postgres.close()


def metrics_of(machine: Machine) -> str:
    """The series of a host, as Prometheus reads them."""
    listen = machine.settings["HEADRACE_DATA_METRICS_LISTEN"]
    return httpx.get(f"http://{listen}/metrics", timeout=10, trust_env=False).text
