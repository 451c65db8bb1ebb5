"""Commands `headrace queues ...`."""

from __future__ import annotations

from typing import Any

import click

from headrace.jobs.cli.text import QUEUE_HEAD, describe_queue, queue_row
from headrace.jobs.errors import InvalidSetting
from headrace.jobs.model import QueueStatus
from headrace.jobs.service import Jobs
from headrace.kernel.terminal import Terminal, table


@click.group("queues")
def queues() -> None:
    """Queues: their backlog; pause, resume, set."""


@queues.command("ls", short_help="List the queues.")
@click.pass_obj
def list_queues(terminal: Terminal) -> None:
    """List every queue with its backlog."""
    found = terminal.run(Jobs, lambda jobs: jobs.queues())
    terminal.show(found, table(QUEUE_HEAD, map(queue_row, found)))


@queues.command("show", short_help="Show a queue.")
@click.argument("queue")
@click.pass_obj
def show_queue(terminal: Terminal, queue: str) -> None:
    """Show QUEUE with its backlog."""
    found = terminal.run(Jobs, lambda jobs: jobs.queue(queue))
    terminal.show(found, describe_queue(found))


@queues.command("pause", short_help="Hand out no more jobs of a queue.")
@click.argument("queue")
@click.pass_obj
def pause(terminal: Terminal, queue: str) -> None:
    """Hand out no more jobs of QUEUE; those in hand go on."""
    terminal.run(Jobs, lambda jobs: jobs.pause_queue(queue))
    terminal.show({"queue": queue, "paused": True}, f"queue {queue} is paused")


@queues.command("resume", short_help="Hand out jobs of a queue again.")
@click.argument("queue")
@click.pass_obj
def resume(terminal: Terminal, queue: str) -> None:
    """Hand out jobs of QUEUE again."""
    terminal.run(Jobs, lambda jobs: jobs.resume_queue(queue))
    terminal.show({"queue": queue, "paused": False}, f"queue {queue} is running")


@queues.command("set", short_help="Set what wins over a queue's code.")
@click.argument("queue")
@click.option("--importance", default=None, help="0 to 9: what the plan gives slots to first.")
@click.option("--slots-min", default=None, help="Fewest slots of the fleet.")
@click.option("--slots-max", default=None, help="Most slots of the fleet.")
@click.option("--retries", default=None, help="How often a job that failed runs again.")
@click.option("--create", is_flag=True, help="Make a queue without code where there is none.")
@click.pass_obj
def set_queue(terminal: Terminal, /, queue: str, *, create: bool, **options: Any) -> None:
    """Set what wins over the code of QUEUE; `none` takes it back to what its code declares."""
    changes = {name: _setting(name, text) for name, text in options.items() if text is not None}

    async def change(jobs: Jobs) -> QueueStatus:
        await jobs.set_queue(queue, create=create, **changes)
        return await jobs.queue(queue)

    found = terminal.run(Jobs, change)
    terminal.show(found, describe_queue(found))


def _setting(name: str, text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit():
        option = name.replace("_", "-")
        raise InvalidSetting(f"--{option}: expected a whole number or none, got {text[:40]!r}")
    return int(text)
