"""Commands `penstock queues ...`."""

from __future__ import annotations

import click

from penstock.jobs.cli.text import QUEUE_HEAD, queue_row, table
from penstock.jobs.service import Jobs
from penstock.kernel.terminal import Terminal


@click.group("queues")
def queues() -> None:
    """Queues: their backlog; pause and resume."""


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
    terminal.show(found, table(QUEUE_HEAD, [queue_row(found)]))


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
