"""Commands `headrace fetch run ...`."""

from __future__ import annotations

import click

from headrace.fetch.cli.text import describe_run, run_line
from headrace.fetch.cli.waiting import finish_run, wait_done
from headrace.fetch.model import Run
from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal


@click.group("run")
def run_group() -> None:
    """Runs of catalogues."""


@run_group.command("ls", short_help="List runs.")
@click.option("--customer", help="Only this customer's.")
@click.pass_obj
def list_runs(terminal: Terminal, customer: str | None) -> None:
    """List the newest runs."""
    found = terminal.run(Fetch, lambda fetch: fetch.runs(customer))
    terminal.show(found, "\n".join(run_line(run) for run in found) or "no runs")


@run_group.command("show", short_help="Show how far a run is.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.pass_obj
def show_run(terminal: Terminal, run_id: int) -> None:
    """Show the counts of RUN."""
    found = terminal.run(Fetch, lambda fetch: fetch.run(run_id))
    terminal.show(found, describe_run(found))


@run_group.command("undo", short_help="Undo an applied run.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.option("--no-wait", is_flag=True, help="Do not wait for the results.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
@click.pass_obj
def undo_run(terminal: Terminal, run_id: int, *, no_wait: bool, wait_s: float) -> None:
    """Put the customer's items back to their state before RUN, a catalogue that was applied.

    Items that RUN added are unpublished, those that it changed or removed are published as they were.
    Items sent by themselves since stay. Undo the newest catalogue first; the last 5 can be undone.
    """

    async def run(fetch: Fetch) -> Run:
        found = await fetch.undo_run(run_id)
        return found if no_wait else await wait_done(terminal, fetch, found, wait_s)

    finish_run(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)
