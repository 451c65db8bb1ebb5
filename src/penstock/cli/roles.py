"""The roles of a running system, one process each: `api`, `work`, `scheduler`, `media serve`.

Each role checks the schema, announces itself to its supervisor (where it has one), writes its metrics
every two seconds and ends cleanly on SIGTERM or Ctrl-C. `penstock up` starts them all; on several
machines each is started where it is wanted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import click
import uvloop

from penstock.cli.house import App
from penstock.cli.supervisor import announce_ready, watch_parent
from penstock.cli.terminal import CommandLine
from penstock.engines.migrate import check_schema
from penstock.kernel import metrics
from penstock.kernel.logs import configure_logs, logger

Body = Callable[[App, asyncio.Event], Awaitable[None]]
log = logger(__name__)
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
                await check_schema(app.engines.postgres, line.packages, version=app.version)
            await body(app, stop)
        finally:
            writing.cancel()
            # What stopped the role is told, not that its series could not be taken away as well.
            with suppress(OSError):
                metrics.remove_snapshot(app.metrics_folder, role)
            await app.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


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


@click.command("api", short_help="Serve the HTTP API.")
@APP_ARGUMENT
@click.pass_obj
def api(line: CommandLine, application: str | None) -> None:
    """Serve the HTTP API of all rooms on `web.listen`, until SIGTERM or Ctrl-C."""
    from penstock.web.server import run_api

    async def body(app: App, stop: asyncio.Event) -> None:
        await run_api(app, stop, lambda host, port: announce_ready(listen=f"{host}:{port}"))

    run_role(line, "api", body, application=application)


@click.command("work", short_help="Run jobs: agent and slots in one process.")
@APP_ARGUMENT
@click.pass_obj
def work(line: CommandLine, application: str | None) -> None:
    """Take jobs of every queue that MODULE:APP knows and run their handlers."""
    from penstock.jobs.worker import Worker

    async def body(app: App, stop: asyncio.Event) -> None:
        app.load_rooms()
        config = app.jobs.config
        worker = Worker(app.engines.postgres, app.jobs, config, host_name=host_name())
        if "fetch" in (services := app.services()):
            await services["fetch"].declare_consumers()
        announce_ready()
        await worker.run(stop)

    run_role(line, "work", body, application=application)


@click.command("scheduler", short_help="Return the jobs of dead hosts, wake delayed lane jobs.")
@APP_ARGUMENT
@click.pass_obj
def scheduler(line: CommandLine, application: str | None) -> None:
    """Run the sweeps of the queue; any number of schedulers may run, they share the work."""
    from penstock.jobs.worker import Sweeper

    async def body(app: App, stop: asyncio.Event) -> None:
        announce_ready()
        await Sweeper(app.jobs).run(stop)

    run_role(line, "scheduler", body, application=application)


@click.group("media")
def media() -> None:
    """Objects served by range."""


@media.command("serve", short_help="Serve objects by range.")
@APP_ARGUMENT
@click.pass_obj
def serve_media(line: CommandLine, application: str | None) -> None:
    """Serve `GET /m/KEY` by range on `media.listen`; needs the object store alone."""
    from penstock.media.worker import serve

    async def body(app: App, stop: asyncio.Event) -> None:
        def on_ready(host: str, port: int) -> None:
            announce_ready(listen=f"{host}:{port}")

        await serve(app.media, stop, on_ready)

    # The standard loop: uvloop has no sendfile.
    run_role(
        line,
        "media",
        body,
        application=application,
        loop_factory=asyncio.new_event_loop,
        needs_schema=False,
    )


COMMANDS: Final[list[Any]] = [api, work, scheduler, media]
