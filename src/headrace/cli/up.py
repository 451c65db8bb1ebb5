"""`headrace up`: engines and roles of one machine under one supervisor.

With nothing configured it starts the embedded engines in the data folder; with URLs configured it starts
none and the same roles stand on what the URLs name. Either way it migrates, makes the secret and the root
token on the first run, prints where everything answers, and ends without leaving a process behind.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from headrace.cli.console import base_url, link_at, make_code, open_browser, opens_browser
from headrace.cli.house import App
from headrace.cli.roles import APP_ARGUMENT, headrace_command, require_libraries
from headrace.cli.supervisor import Event, Role, Supervisor
from headrace.cli.terminal import CommandLine
from headrace.engines.embedded import EmbeddedEngines
from headrace.engines.embedded.data_folder import require_owner
from headrace.engines.embedded.settings import POSTGRES_SOCKET, VALKEY_SOCKET
from headrace.engines.endpoints import Endpoints
from headrace.engines.functions import load_libraries
from headrace.engines.migrate import apply_migrations
from headrace.kernel.errors import Conflict, InvalidInput
from headrace.kernel.logs import configure_logs, logger
from headrace.web.tokens import RootToken, dead_token, ensure_root_token, remedy_for

READY_S: Final = 60.0
SEEN_NOTE: Final = (
    "(logs one browser in, within 10 minutes; `headrace console link` prints another)"
)
UNSEEN_NOTE: Final = "(`headrace console link` prints a one-time link that logs you in)"
REFUSALS: Final = (InvalidInput.exit_code, Conflict.exit_code)
log = logger(__name__)


@click.command("up", short_help="Start engines and all roles on this machine.")
@APP_ARGUMENT
@click.option(
    "--engines-only",
    is_flag=True,
    help="Start the embedded engines alone, to restore a backup or look inside; migrates nothing.",
)
@click.pass_obj
def up(line: CommandLine, application: str | None, *, engines_only: bool) -> None:
    """Start everything on this machine and keep it running until Ctrl-C or SIGTERM.

    MODULE:APP is your application, such as shop.site:app; without it the rooms run alone.
    """
    for room in () if engines_only else ("web", "media"):
        require_libraries(room)
    app = line.app(application)
    configure_logs("up", level=app.config.sections["data"].log_level)
    require_owner(app.data_folder)
    asyncio.run(run_engines(line, app) if engines_only else run_up(line, app, application))


async def run_engines(line: CommandLine, app: App) -> None:
    """Start the embedded engines, print where they answer, supervise them until told to stop."""
    if not app.uses_embedded:
        raise NoEngines(
            "postgres.url and valkey.url are both set, so there is no engine to start: leave"
            " --engines-only out, or unset a URL"
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
            "The engines are up, without any role; Ctrl-C stops them.\n"
            f"  PostgreSQL   {run / POSTGRES_SOCKET}   (user headrace, database headrace)\n"
            f"  Valkey       {run / VALKEY_SOCKET}\n"
            f"  try:         cd {shlex.quote(str(run))} && psql -h /proc/self/cwd -U headrace headrace"
        )
        line.show(answer, text)
        sys.stdout.flush()
        await supervisor.run()


def embedded_of(app: App) -> EmbeddedEngines:
    """The engines of the data folder, as safe as the rooms are configured to be.

    Durable hits wait for the append-only file, which is then synced with each write.
    """
    views = app.config.sections["views"]
    needs_file = views.durability == "durable" and not views.durable_replicas
    return EmbeddedEngines(
        app.data_folder, valkey_extra={"appendfsync": "always"} if needs_file else {}
    )


class NoEngines(InvalidInput):
    """`--engines-only` where every engine is elsewhere."""

    code = "cli.no_engines"


async def run_up(line: CommandLine, app: App, application: str | None) -> None:
    """Start, print the addresses, supervise until told to stop."""
    embedded = embedded_of(app) if app.uses_embedded else None
    watch = StartWatch()
    supervisor = Supervisor(embedded, roles_of(line, application), on_event=watch.note)
    watch.give_up = supervisor.request_stop
    async with supervisor.started_engines() as started:
        if started is not None:
            app.use_endpoints(merged(app.configured_urls(), started))
        token = await prepare(app, line.packages)
        code = await make_code(app, token)
        await app.close()
        announcing = asyncio.create_task(announce(line, app, supervisor, token=token, code=code))
        try:
            await supervisor.run()
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
    if watch.refused:
        raise RoleRefused(
            f"role {watch.refused} cannot start: its message stands above; mend it and try again"
        )


class RoleRefused(Conflict):
    """A role ended over something that a restart does not mend: a setting, a port that is taken."""

    code = "cli.role_refused"


class StartWatch:
    """Tells a role that crashed (restart it) from one that was refused before it ever served."""

    def __init__(self) -> None:
        self.refused = ""
        self.give_up: Callable[[], None] = lambda: None
        self._ready: set[str] = set()

    def note(self, event: Event) -> None:
        """Stop everything over a role that was never ready and ended by its user's fault."""
        if event.kind == "role_ready":
            self._ready.add(event.name)
        is_final = event.kind == "role_died" and event.facts["exit_code"] in REFUSALS
        if is_final and event.name not in self._ready and not self.refused:
            self.refused = event.name
            self.give_up()


def roles_of(line: CommandLine, application: str | None) -> list[Role]:
    """The roles of one machine, each as the command that a user would type."""
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
    """What was configured, and the embedded engines for the rest."""
    return Endpoints(
        postgres_url=configured.postgres_url or started.postgres_url,
        valkey_url=configured.valkey_url or started.valkey_url,
        blobs_url=configured.blobs_url,
    )


async def prepare(app: App, packages: tuple[str, ...]) -> RootToken:
    """Migrate, load function libraries, make secret and root token; returns the token."""
    applied = await apply_migrations(app.engines.postgres, packages)
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
    """Print where everything answers, once every role is ready, and the one-time link of `code`.

    On a desktop's terminal the link is opened. A late role is only reported.
    """
    try:
        facts = await supervisor.wait_ready(READY_S)
    except TimeoutError as error:
        log.warning("roles_not_ready", error=str(error))
        return
    addresses = {role: base_url(told["listen"]) for role, told in facts.items() if "listen" in told}
    console = f"{addresses['api']}/console"
    # Elsewhere standard output is kept in a file or a journal, where others may read the link in time.
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
    text = (
        "Headrace is up; Ctrl-C stops it.\n"
        f"  console      {link or console}\n"
        f"               {SEEN_NOTE if link else UNSEEN_NOTE}\n"
        f"  API          {addresses['api']}   (description: {addresses['api']}/openapi.json)\n"
        f"  media        {addresses['media']}/m/KEY\n"
        f"  data folder  {app.data_folder}\n"
        f"{token_lines(token, addresses['api'])}"
    )
    line.show(answer, text)
    sys.stdout.flush()
    if link and not line.is_json and opens_browser():
        await open_browser(link, app.data_folder)


def token_lines(token: RootToken, api: str) -> str:
    """How to call the API with the root token; or, if it opens nothing, that and how to mend it."""
    if token.state != "valid":
        return f"  token        {dead_token(token)}, the API refuses it:\n    {remedy_for(token)}"
    return (
        f"  token        in {token.file}, try:\n"
        f'    curl -H "Authorization: Bearer $(cat {shlex.quote(str(token.file))})" {api}/v1/queues'
    )


COMMANDS: Final[list[Any]] = [up]
