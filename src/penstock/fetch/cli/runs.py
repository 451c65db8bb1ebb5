"""Commands `penstock fetch run ...`."""

from __future__ import annotations

import click

from penstock.fetch.cli.text import describe_run, run_line
from penstock.fetch.service import Fetch
from penstock.kernel.terminal import Terminal


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
