"""Commands `headrace crons ...`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from headrace.jobs.crons import Cron, NewCron
from headrace.jobs.errors import InvalidCron
from headrace.jobs.service import Jobs
from headrace.kernel.terminal import Terminal, table


@click.group("crons")
def crons() -> None:
    """Crons: jobs that come again and again."""


@crons.command("ls", short_help="List the crons.")
@click.pass_obj
def list_crons(terminal: Terminal) -> None:
    """List every cron with its next moment and its last job."""
    found = terminal.run(Jobs, lambda jobs: jobs.crons.all())
    terminal.show(found, _table(found))


@crons.command("add", short_help="Add a cron.")
@click.argument("name")
@click.argument("spec")
@click.argument("queue")
@click.argument("payload", default="null")
@click.option("--tz", default="UTC", show_default=True, help="Time zone such as Europe/Moscow.")
@click.option("--priority", default=5, show_default=True, type=int, help="0 first to 9 last.")
@click.pass_obj
def add(terminal: Terminal, /, payload: str, **fields: Any) -> None:
    """Add cron NAME that enqueues into QUEUE at each moment of SPEC, such as '0 4 * * *'; PAYLOAD is JSON."""
    try:
        decoded = msgspec.json.decode(payload)
    except RecursionError as error:
        raise InvalidCron("PAYLOAD: the JSON is nested too deep: flatten it") from error
    except ValueError as error:
        raise InvalidCron(f"PAYLOAD is JSON: {error}") from error
    cron = NewCron(payload=decoded, **fields)
    found = terminal.run(Jobs, lambda jobs: jobs.crons.add(cron))
    terminal.show(found, _table([found]))


@crons.command("run", short_help="Run a cron now.")
@click.argument("name")
@click.pass_obj
def run(terminal: Terminal, name: str) -> None:
    """Enqueue the job of cron NAME now, besides its moments."""
    job_id = terminal.run(Jobs, lambda jobs: jobs.crons.run(name))
    terminal.show({"id": job_id}, f"job {job_id}")


@crons.command("pause", short_help="Let a cron rest.")
@click.argument("name")
@click.pass_obj
def pause(terminal: Terminal, name: str) -> None:
    """Let cron NAME rest."""
    found = terminal.run(Jobs, lambda jobs: jobs.crons.pause(name))
    terminal.show(found, f"cron {name} is paused")


@crons.command("resume", short_help="Let a cron come again.")
@click.argument("name")
@click.pass_obj
def resume(terminal: Terminal, name: str) -> None:
    """Let cron NAME come again from its next moment on; what it missed at rest is not made up for."""
    found = terminal.run(Jobs, lambda jobs: jobs.crons.resume(name))
    terminal.show(found, f"cron {name} comes next at {found.next_at:%Y-%m-%d %H:%M:%S} UTC")


@crons.command("rm", short_help="Remove a cron.")
@click.argument("name")
@click.pass_obj
def remove(terminal: Terminal, name: str) -> None:
    """Remove cron NAME, unless running code declares it."""
    terminal.run(Jobs, lambda jobs: jobs.crons.remove(name))
    terminal.show({"name": name, "removed": True}, f"cron {name} is removed")


def _table(found: Sequence[Cron]) -> str:
    rows = [
        (
            cron.name,
            cron.spec,
            cron.tz,
            cron.queue,
            f"{cron.next_at:%Y-%m-%d %H:%M:%S}" if not cron.paused else cron.error or "paused",
            "" if cron.last_job is None else cron.last_job,
            cron.source,
        )
        for cron in found
    ]
    return table(("name", "spec", "tz", "queue", "next (UTC)", "last job", "from"), rows)
