"""The roles of a running system: `api`, `agent` (or `work`), `scheduler`, `flusher`, `media serve`.

Each role waits for PostgreSQL where it needs it, checks the schema, announces itself to its supervisor (where it has one), writes its metrics
every two seconds and ends cleanly on SIGTERM or Ctrl-C. `headrace up` starts them all; on several
machines each is started where it is wanted.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import click
import uvloop

from headrace.cli.house import App
from headrace.cli.media_processes import orders_of
from headrace.cli.supervisor import announce_ready, watch_parent
from headrace.cli.terminal import CommandLine
from headrace.engines.blobs import BlobsDown
from headrace.engines.migrate import check_schema
from headrace.engines.postgres import PostgresDown, PostgresRefused
from headrace.kernel import metrics
from headrace.kernel.errors import ExtraMissing
from headrace.kernel.ids import require_id
from headrace.kernel.logs import SparseLogger, configure_logs, logger
from headrace.kernel.resilience import Backoff

Body = Callable[[App, asyncio.Event], Awaitable[None]]
log = logger(__name__)
often = SparseLogger(log)
RECONNECT: Final = Backoff(0.1, 3.0)
AGENT_CONNECTIONS: Final = "4"
"""Unless the setting says otherwise; one more listens. Its slots need none for their jobs."""
LIBRARIES: Final = {
    "web": ("litestar", "jinja2", "uvicorn", "httptools"),
    "media": ("httptools", "xxhash"),
}
"""What the roles of a room need of its extra."""
APP_ARGUMENT: Final = click.argument("application", metavar="[MODULE:APP]", required=False)


def run_role(
    line: CommandLine,
    role: str,
    body: Body,
    *,
    application: str | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    needs_schema: bool = True,
) -> None:
    """Run `body` until SIGTERM or SIGINT, with metrics written beside it."""
    app = line.app(application)
    configure_logs(role, level=app.config.sections["data"].log_level)
    watch_parent()

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        writing = asyncio.create_task(write_metrics(app, role))
        try:
            if needs_schema:
                await wait_for_schema(app, line.packages, stop)
            if not stop.is_set():
                await body(app, stop)
        finally:
            writing.cancel()
            # What stopped the role is told, not that its series could not be taken away as well.
            with suppress(OSError):
                metrics.remove_snapshot(app.metrics_folder, role)
            await app.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def wait_for_schema(app: App, packages: tuple[str, ...], stop: asyncio.Event) -> None:
    """Check the schema; while PostgreSQL is down, wait and check again until `stop`.

    Raises: SchemaBehind, SchemaAhead, PostgresRefused.
    """
    failures = 0
    while not stop.is_set():
        try:
            await check_schema(app.engines.postgres, packages, version=app.version)
        except PostgresDown as error:
            if isinstance(error, PostgresRefused):
                raise
            failures += 1
            wait_s = RECONNECT.delay_s(failures)
            often.warning("role_waits", error=error.text, wait_s=round(wait_s, 1))
        else:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await stop.wait()


async def write_metrics(app: App, role: str) -> None:
    """Leave this process's series for the API to merge, until cancelled."""
    while True:
        try:
            metrics.write_snapshot(app.metrics_folder, role)
        except OSError as error:
            log.warning("metrics_not_written", error=str(error))
        await asyncio.sleep(metrics.WRITE_EVERY_S)


def host_name() -> str:
    """How this worker's host is shown: machine and process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def headrace_command(line: CommandLine) -> list[str]:
    """How to run another command of this program on the same configuration."""
    options = ["--data", line.flags["data.folder"]] if "data.folder" in line.flags else []
    options += ["--config", line.config_file] if line.config_file else []
    # Unbuffered: what an application prints is seen when it happens, also in a file.
    return [sys.executable, "-u", "-m", "headrace", *options]


async def declare(app: App) -> dict[str, int]:
    """Store what the code says of its queues and consumers; ids of the queues by name."""
    queues = await app.jobs.declare_queues()
    if "fetch" in (services := app.services()):
        await services["fetch"].declare_consumers()
    return {name: queue.id for name, queue in queues.items()}


def require_libraries(room: str) -> None:
    """Raises: ExtraMissing where libraries of `room` are not installed."""
    if not all(find_spec(library) for library in LIBRARIES[room]):
        raise ExtraMissing(room)


@click.command("api", short_help="Serve the HTTP API and the console.")
@APP_ARGUMENT
@click.pass_obj
def api(line: CommandLine, application: str | None) -> None:
    """Serve the HTTP API of all rooms and the console on `web.listen`, until SIGTERM or Ctrl-C."""
    require_libraries("web")
    from headrace.cli.console import address_noted
    from headrace.web.server import run_api

    async def body(app: App, stop: asyncio.Event) -> None:
        with ExitStack() as noted:

            def on_ready(host: str, port: int) -> None:
                # What is here now stays: looked through each 3,500 requests, it held up all others for 80 ms.
                gc.collect()
                gc.freeze()
                noted.enter_context(address_noted(app.data_folder, f"{host}:{port}"))
                announce_ready(listen=f"{host}:{port}")

            await run_api(app, stop, on_ready, app.pages())

    run_role(line, "api", body, application=application)


@click.command("agent", short_help="Run jobs in forked slots: one agent a host.")
@APP_ARGUMENT
@click.option(
    "--name", help="Of the host in the fleet; several agents on one machine need several."
)
@click.option("--tag", "tags", multiple=True, help="Take tasks that ask for this tag too.")
@click.option("--reload", is_flag=True, help="In development: start anew when the code changes.")
@click.pass_obj
def agent(
    line: CommandLine,
    application: str | None,
    *,
    name: str | None,
    tags: tuple[str, ...],
    reload: bool,
) -> int:
    """Claim jobs of every queue that MODULE:APP knows for slots forked from one import of it."""
    from headrace.cli.reloading import watch_code
    from headrace.jobs.agent.agent import Agent

    if name is not None:
        require_id("host", name)
    if reload:
        return watch_code()

    async def body(app: App, stop: asyncio.Event) -> None:
        opened: list[App] = []

        async def open_app(settings: dict[str, str]) -> App:
            """The app as it is configured where its code is, without its code."""
            inner = line.make_app(None)
            opened.append(inner)
            inner.use_flags({"postgres.connections_max": AGENT_CONNECTIONS, **settings})
            await wait_for_schema(inner, line.packages, stop)
            return inner

        host = Agent(
            name or socket.gethostname(),
            app.data_folder / "run" / "agents",
            partial(zygote_command, line, application),
            open_app,
            tags=tags,
        )
        host.on_ready = announce_ready
        try:
            await host.run(stop, lease_s=app.config.sections["jobs"].lease_s)
        finally:
            for inner in opened:
                await inner.close()

    # Only its zygote imports the application.
    run_role(line, "agent", body, needs_schema=False)
    return 0


def zygote_command(line: CommandLine, application: str | None, options: Sequence[str]) -> list[str]:
    """The command line of an agent's zygote."""
    named = [application] if application else []
    return [*headrace_command(line), "zygote", *options, *named]


@click.command("zygote", hidden=True)
@APP_ARGUMENT
@click.option("--control", type=int, required=True)
@click.option("--board", type=int, required=True)
@click.option("--lock", type=int, required=True)
@click.pass_obj
def zygote(
    line: CommandLine, application: str | None, *, control: int, board: int, lock: int
) -> int:
    """Import MODULE:APP and fork slots from it for the agent that started this."""
    from headrace.jobs.agent.zygote import Inherited, serve

    def load() -> LoadedApp:
        app = line.app(application)
        app.use_as_slot()
        configure_logs("slot", level=app.config.sections["data"].log_level)
        app.load_rooms()
        return LoadedApp(app)

    inherited = Inherited(control=control, board=board, lock=lock)
    return serve(inherited, application or "headrace", load)


class LoadedApp:
    """An app as zygote and slots need it; implements `jobs.slots.process.Application`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.registry = app.registry
        self.jobs_config = app.jobs.config
        self.settings = {
            key: text for key, (text, source) in app.config.written.items() if source != "default"
        }

    async def declare(self) -> dict[str, int]:
        """Store what the code says of its queues and consumers; ids of the queues by name."""
        return await declare(self._app)

    async def close(self) -> None:
        """Close what was opened."""
        await self._app.close()


@click.command("work", short_help="Run jobs: agent and slots in one process.")
@APP_ARGUMENT
@click.option("--reload", is_flag=True, help="In development: start anew when the code changes.")
@click.pass_obj
def work(line: CommandLine, application: str | None, *, reload: bool) -> int:
    """Take jobs of every queue that MODULE:APP knows and run their handlers."""
    from headrace.cli.reloading import watch_code
    from headrace.jobs.worker import Worker

    if reload:
        return watch_code()

    async def body(app: App, stop: asyncio.Event) -> None:
        app.load_rooms()
        config = app.jobs.config
        worker = Worker(app.engines.postgres, app.jobs, config, host_name=host_name())
        if "fetch" in (services := app.services()):
            await services["fetch"].declare_consumers()
        announce_ready()
        await worker.run(stop)

    run_role(line, "work", body, application=application)
    return 0


@click.command("scheduler", short_help="Plan the fleet, let crons come, tidy; raise alerts.")
@APP_ARGUMENT
@click.pass_obj
def scheduler(line: CommandLine, application: str | None) -> None:
    """Plan the slots of all hosts, let the crons of MODULE:APP come, return the jobs of dead hosts.

    Any number of schedulers may run: one leads, and another takes over within seconds of its end.
    """
    from headrace.jobs.fleet.scheduler import Scheduler

    async def body(app: App, stop: asyncio.Event) -> None:
        app.load_rooms()
        running = Scheduler(app.engines.postgres, app.jobs, name=host_name(), secret=app.secret)
        announce_ready()
        await running.run(stop)

    run_role(line, "scheduler", body, application=application)


@click.command("flusher", short_help="Keep PostgreSQL and Valkey together: views and feeds.")
@APP_ARGUMENT
@click.pass_obj
def flusher(line: CommandLine, application: str | None) -> None:
    """Count the hits of views in PostgreSQL, and bring to the feed's index what it lacks, until SIGTERM or Ctrl-C.

    Any number may run: the shards of views are divided among them, and taken over from one that ends.
    """
    from headrace.feed.worker import Sweeper
    from headrace.views.worker import Flusher

    async def body(app: App, stop: asyncio.Event) -> None:
        engines, config = app.engines, app.config.sections["views"]
        running = Flusher(engines, config, name=host_name())
        sweeper = Sweeper.of(app.feed)
        announce_ready()
        await asyncio.gather(running.run(stop), sweeper.run(stop))

    run_role(line, "flusher", body, application=application)


@click.group("media")
def media() -> None:
    """Objects served by range."""


@media.command("serve", short_help="Serve objects by range.")
@APP_ARGUMENT
@click.pass_obj
def serve_media(line: CommandLine, application: str | None) -> None:
    """Serve `GET /m/KEY` by range on `media.listen`, by several processes; needs the object store alone."""
    require_libraries("media")
    from headrace.media.worker.crew import run_node

    async def body(app: App, stop: asyncio.Event) -> None:
        def on_ready(host: str, port: int) -> None:
            log.info("media_serves", listen=f"{host}:{port}")
            announce_ready(listen=f"{host}:{port}")

        try:
            await app.blobs.verify_store()
        except BlobsDown as error:
            # What is on the node's own disks is served, and the rest once the folder is there.
            log.warning("object_store_not_there", error=error.text)
        await run_node(app.media, stop, on_ready, orders=orders_of(app))

    # The standard loop: uvloop has no sendfile.
    run_role(
        line,
        "media",
        body,
        application=application,
        loop_factory=asyncio.new_event_loop,
        needs_schema=False,
    )


@media.command("metrics", short_help="Print the series of this machine's node.")
@click.pass_obj
def media_metrics(line: CommandLine) -> None:
    """Print what the node of this data folder counts, as Prometheus reads it; nothing while it is stopped.

    For a machine without `headrace api`: let a timer write it to a file of node_exporter's textfile collector.
    """
    click.echo(metrics.merged_metrics(line.app().metrics_folder, None).decode(), nl=False)


COMMANDS: Final[list[Any]] = [api, agent, work, zygote, scheduler, flusher, media]
