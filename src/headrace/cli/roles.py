"""Commands of the roles: `api`, `agent` (or `work`), `scheduler`, `flusher`, `media serve`.

Each role is one process. It waits for PostgreSQL and checks the schema if it needs them, announces
itself to its supervisor, writes its metrics every two seconds and ends cleanly on SIGTERM or
Ctrl-C. `headrace up` starts all roles of one machine.
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
from typing import TYPE_CHECKING, Any, Final

import click
import uvloop

from headrace.cli.app_context import App, CommandLine
from headrace.cli.extras import require_libraries
from headrace.cli.metrics_listener import serve_metrics
from headrace.cli.supervisor import announce_ready, watch_code, watch_parent
from headrace.engines.blobs import BlobsDown
from headrace.engines.migrate import check_schema
from headrace.engines.mount_guard import RECORD_FILE
from headrace.engines.postgres import Postgres
from headrace.engines.postgres_errors import PostgresDown, PostgresRefused
from headrace.kernel import metrics, spans
from headrace.kernel.ids import require_id
from headrace.kernel.logs import SparseLogger, configure_logs, logger
from headrace.kernel.resilience import Backoff, wait_event
from headrace.web.recorder import Recorder
from headrace.web.role_secrets import fingerprints_of

if TYPE_CHECKING:
    from headrace.jobs import Jobs
    from headrace.media.worker.ipc_reports import ChildConfig


Body = Callable[[App, asyncio.Event], Awaitable[None]]
log = logger(__name__)
RECONNECT: Final = Backoff(0.1, 3.0)
RECORDER_WAIT_S: Final = 20.0
GC_THRESHOLD: Final = 20_000
AGENT_CONNECTIONS: Final = "4"
"""Default pool size of an agent, without its LISTEN connection."""
APP_ARGUMENT: Final = click.argument("application", metavar="[MODULE:APP]", required=False)


def run_role(
    app: App,
    packages: tuple[str, ...],
    role: str,
    body: Body,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    needs_schema: bool = True,
    records_history: bool = True,
) -> None:
    """Run `body` until SIGTERM or SIGINT; write metrics, and history if PostgreSQL accepts it."""
    configure_logs(role, level=app.config.sections["data"].log_level)
    spans.start(role.partition(".")[0])
    metrics.note_start(app.version)
    watch_parent()

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        listen = app.config.sections["data"].metrics_listen
        listener = await serve_metrics(listen, app.metrics_folder) if listen else None
        writing = asyncio.create_task(write_metrics(app, role))
        recorder = recorder_of(app) if records_history else None
        # Roles with a connection to PostgreSQL of their own go first.
        wait_s = 0.0 if needs_schema else RECORDER_WAIT_S
        recording = asyncio.create_task(recorder.run(wait_s=wait_s)) if recorder else None
        try:
            if needs_schema:
                await wait_for_schema(app, packages, stop)
            if not stop.is_set():
                # A standby has its primary's secret, once it restored it.
                if records_history:
                    note_secret(app)
                await body(app, stop)
        finally:
            writing.cancel()
            if recorder is not None and recording is not None:
                recording.cancel()
                await asyncio.gather(recording, return_exceptions=True)
                await recorder.close()
            if listener is not None:
                listener.close()
            # An error here would hide the one that stopped the role.
            with suppress(OSError):
                metrics.remove_snapshot(app.metrics_folder, role)
            await app.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    spans.flush()


def note_secret(app: App) -> None:
    """Add the fingerprint of the root secret to the metrics. Raises: WeakSecret."""
    accepted = app.config.sections["media"].accepted_secrets
    # A role that needs the secret reports a file that cannot be read.
    with suppress(OSError):
        metrics.note_secret(*fingerprints_of(app.secret, accepted))


def recorder_of(app: App) -> Recorder:
    """The recorder of this machine's history."""
    media = app.config.sections.get("media")
    return Recorder(
        app.metrics_folder,
        lambda: app.engines,
        host=socket.gethostname(),
        center=media.dc if media is not None else "",
    )


async def wait_for_schema(app: App, packages: tuple[str, ...], stop: asyncio.Event) -> None:
    """Check the schema; retry while PostgreSQL is down, until `stop`.

    Raises: SchemaBehind, SchemaAhead, PostgresRefused.
    """
    failures, often = 0, SparseLogger(log)
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
        await wait_event(stop, wait_s)


async def write_metrics(app: App, role: str) -> None:
    """Write this process's metrics for the API to merge, until cancelled."""
    while True:
        try:
            metrics.write_snapshot(app.metrics_folder, role)
        except OSError as error:
            log.warning("metrics_not_written", error=str(error))
        await asyncio.sleep(metrics.WRITE_EVERY_S)


def host_name() -> str:
    """Name of this worker: machine and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def headrace_command(line: CommandLine) -> list[str]:
    """Command line prefix that runs this program with the same configuration."""
    options = ["--data", line.flags["data.folder"]] if "data.folder" in line.flags else []
    options += ["--config", line.config_file] if line.config_file else []
    # Unbuffered, so output of the application appears in logs immediately.
    return [sys.executable, "-P", "-u", "-m", "headrace", *options]


async def declare(app: App) -> dict[str, int]:
    """Register the declared queues and consumers; return queue ids by name."""
    queues = await app.jobs.queues.declare()
    if (fetch := app.installed_fetch()) is not None:
        await fetch.declare_consumers()
    return {name: queue.id for name, queue in queues.items()}


@click.command("api", short_help="Serve the HTTP API and the console.")
@APP_ARGUMENT
@click.option("--listener", type=int, hidden=True, help="The listening socket of a worker.")
@click.pass_obj
def api(line: CommandLine, application: str | None, *, listener: int | None) -> None:
    """Serve the HTTP API of all rooms and the console on `web.listen`.

    With `web.processes` of 2 or more, SIGHUP replaces the processes one by one, without a refused
    request.
    """
    require_libraries("web")
    app = line.app(application)
    if listener is not None:
        run_role(
            app, line.packages, "api.worker", partial(_serve_api, socket.socket(fileno=listener))
        )
    elif app.config.sections["web"].processes == 1:
        run_role(app, line.packages, "api", partial(_serve_api, None))
    else:
        # The standard event loop, as uvloop cannot start a process in a group of its own.
        run_role(
            app,
            line.packages,
            "api",
            partial(_keep_api_processes, line, application),
            loop_factory=asyncio.new_event_loop,
            needs_schema=False,
        )


async def _serve_api(listener: socket.socket | None, app: App, stop: asyncio.Event) -> None:
    """Serve in this process; a worker receives its listener and drains on SIGHUP."""
    from headrace.cli.console import address_noted
    from headrace.web.serving import run_api

    drain = asyncio.Event()
    if listener is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, drain.set)
    with ExitStack() as noted:

        def on_ready(host: str, port: int) -> None:
            # Exclude startup objects from garbage collection, which would pause requests. Fast
            # paths leave no cycles, and the default threshold of 700 costs a read 10 % of its CPU.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD, 50, 50)
            if listener is None:
                noted.enter_context(address_noted(app.data_folder, f"{host}:{port}"))
            announce_ready(listen=f"{host}:{port}")

        await run_api(app, stop, on_ready, app.pages(), listener=listener, drain=drain)


async def _keep_api_processes(
    line: CommandLine, application: str | None, app: App, stop: asyncio.Event
) -> None:
    """Keep `web.processes` workers; reload them on SIGHUP."""
    from headrace.cli.api_processes import ApiProcesses
    from headrace.cli.console import address_noted
    from headrace.web.serving import bind

    config = app.config.sections["web"]
    listeners = bind(config.listen, config.processes)
    host, port = listeners[0].getsockname()[:2]
    named = [application] if application else []

    def command(listener: int) -> list[str]:
        return [*headrace_command(line), "api", "--listener", str(listener), *named]

    reload = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload.set)
    with ExitStack() as noted:

        def on_ready() -> None:
            noted.enter_context(address_noted(app.data_folder, f"{host}:{port}"))
            announce_ready(listen=f"{host}:{port}")

        processes = ApiProcesses(listeners, command, graceful_s=config.graceful_stop_s)
        await processes.run(stop, reload, on_ready)


@click.command("agent", short_help="Run jobs in forked worker processes; one agent per host.")
@APP_ARGUMENT
@click.option(
    "--name",
    help="Name of this host in the fleet; default: the machine's. Give each agent"
    " of a machine its own.",
)
@click.option(
    "--tag",
    "tags",
    multiple=True,
    help="Also run tasks that are declared with this tag; repeatable.",
)
@click.option("--reload", is_flag=True, help="Restart when code changes; for development.")
@click.pass_obj
def agent(
    line: CommandLine,
    application: str | None,
    *,
    name: str | None,
    tags: tuple[str, ...],
    reload: bool,
) -> int:
    """Run jobs of all queues of MODULE:APP in forked worker processes."""
    from headrace.jobs.agent.agent import run_agent

    if name is not None:
        require_id("host", name)
    if reload:
        return watch_code()

    async def body(app: App, stop: asyncio.Event) -> None:
        opened: list[App] = []

        async def open_jobs(settings: dict[str, str]) -> tuple[Postgres, Jobs]:
            """Jobs with the zygote's settings, without the application code."""
            inner = line.make_app(None)
            opened.append(inner)
            inner.use_flags({"postgres.connections_max": AGENT_CONNECTIONS, **settings})
            await wait_for_schema(inner, line.packages, stop)
            return inner.engines.postgres, inner.jobs

        try:
            await run_agent(
                stop,
                name=name or socket.gethostname(),
                folder=app.data_folder / "run" / "agents",
                command=partial(zygote_command, line, application),
                open_jobs=open_jobs,
                lease_s=app.config.sections["jobs"].lease_s,
                tags=tags,
                on_ready=announce_ready,
            )
        finally:
            for inner in opened:
                await inner.close()

    # Only the zygote imports the application.
    run_role(line.app(), line.packages, "agent", body, needs_schema=False)
    return 0


def zygote_command(line: CommandLine, application: str | None, options: Sequence[str]) -> list[str]:
    """Command line of an agent's zygote."""
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
    """Import MODULE:APP and fork slots on request of the agent."""
    from headrace.jobs.agent.zygote import serve

    def load() -> LoadedApp:
        app = line.app(application)
        app.use_as_slot()
        configure_logs("slot", level=app.config.sections["data"].log_level)
        spans.load()
        app.load_rooms()
        return LoadedApp(app)

    return serve(application or "headrace", load, control=control, board=board, lock=lock)


class LoadedApp:
    """Adapts an app for zygote and slots; implements `jobs.slots.process.Application`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.jobs = app.jobs
        self.settings = {
            key: text for key, (text, source) in app.config.written.items() if source != "default"
        }

    async def declare(self) -> dict[str, int]:
        """Register the declared queues and consumers; return queue ids by name."""
        return await declare(self._app)

    async def close(self) -> None:
        """Close the app."""
        await self._app.close()


@click.command("work", short_help="Run jobs in a single process.")
@APP_ARGUMENT
@click.option("--reload", is_flag=True, help="Restart when code changes; for development.")
@click.pass_obj
def work(line: CommandLine, application: str | None, *, reload: bool) -> int:
    """Run jobs of all queues of MODULE:APP in this process, such as for development."""
    from headrace.jobs.worker import Worker

    if reload:
        return watch_code()

    async def body(app: App, stop: asyncio.Event) -> None:
        app.load_rooms()
        config = app.jobs.config
        # The worker declares, and retries while PostgreSQL is down.
        worker = Worker(
            app.engines.postgres,
            app.jobs,
            config,
            host_name=host_name(),
            declare=partial(declare, app),
        )
        announce_ready()
        await worker.run(stop)

    run_role(line.app(application), line.packages, "work", body)
    return 0


@click.command("scheduler", short_help="Plan slots, run crons, clean up, raise alerts.")
@APP_ARGUMENT
@click.pass_obj
def scheduler(line: CommandLine, application: str | None) -> None:
    """Share worker processes among queues, run crons, return jobs of dead hosts to their queues.

    Any number may run: one leads, and another takes over within seconds.
    """
    from headrace.jobs.fleet.scheduler import Scheduler

    async def body(app: App, stop: asyncio.Event) -> None:
        app.load_rooms()
        running = Scheduler(app.engines.postgres, app.jobs, name=host_name(), secret=app.secret)
        announce_ready()
        await running.run(stop)

    run_role(line.app(application), line.packages, "scheduler", body)


@click.command("flusher", short_help="Flush views to PostgreSQL, sweep feeds to Valkey.")
@APP_ARGUMENT
@click.pass_obj
def flusher(line: CommandLine, application: str | None) -> None:
    """Write counted views to PostgreSQL, repair the feed index in Valkey, remove expired uploads.

    Any number may run: they share the work and take over from each other.
    """
    from headrace.feed.worker import Sweeper
    from headrace.views.worker import Flusher

    async def body(app: App, stop: asyncio.Event) -> None:
        engines, config = app.engines, app.config.sections["views"]
        running = Flusher(engines, config, name=host_name())
        sweeper = Sweeper(app.feed)
        announce_ready()
        await asyncio.gather(
            running.run(stop), sweeper.run(stop), app.media.uploads.run_sweeps(stop)
        )

    run_role(line.app(application), line.packages, "flusher", body)


@click.group("media")
def media() -> None:
    """Media objects and nodes."""


@media.command("serve", short_help="Serve objects by HTTP range requests.")
@APP_ARGUMENT
@click.pass_obj
def serve_media(line: CommandLine, application: str | None) -> None:
    """Serve `GET /m/KEY` with range requests on `media.listen`. Needs only the object store."""
    require_libraries("media")
    from headrace.media.worker.supervisor import run_node

    async def body(app: App, stop: asyncio.Event) -> None:
        def on_ready(listen: str, listen_tls: str | None) -> None:
            log.info("media_serves", listen=listen, listen_tls=listen_tls)
            announce_ready(listen=listen, listen_tls=listen_tls)

        try:
            await app.blobs.verify_store()
        except BlobsDown as error:
            # Serve cached blocks now, and the rest when the folder is available.
            log.warning("object_store_not_there", error=error.text)
        await run_node(app.media, stop, on_ready, child_config=orders_of(app))

    # The standard event loop, as uvloop has no sendfile.
    run_role(
        line.app(application),
        line.packages,
        "media",
        body,
        loop_factory=asyncio.new_event_loop,
        needs_schema=False,
    )


COMMANDS: Final[list[Any]] = [api, agent, work, zygote, scheduler, flusher, media]


SECTIONS: Final = ("blobs", "media")


def orders_of(app: App) -> ChildConfig:
    """Settings of the child processes: all non-default values of their sections."""
    from headrace.media.worker.ipc_reports import ChildConfig

    settings = {
        key: text
        for key, (text, source) in app.config.written.items()
        if source != "default" and key.partition(".")[0] in SECTIONS
    }
    return ChildConfig(
        settings=settings,
        blobs_url=app.configured_urls().blobs_url,
        store_record=str(app.data_folder / RECORD_FILE),
        data_folder=str(app.data_folder),
        run_folder=str(app.media.folder),
        log_level=app.config.sections["data"].log_level,
    )
