"""Commands that remove, move and check: `headrace views rm|reclassify|verify|lag`."""

from __future__ import annotations

from typing import Any, Final

import click

from headrace.kernel.errors import Corrupt
from headrace.kernel.terminal import Terminal, table
from headrace.views.cli.text import Moment, describe_totals
from headrace.views.model import CLASSES
from headrace.views.service import Views

CLASS: Final = click.Choice([str(one.value) for one in CLASSES])


@click.command("rm", short_help="Remove all views of an item.")
@click.argument("id")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.pass_obj
def remove_item(terminal: Terminal, id: str, *, dry_run: bool) -> None:  # noqa: A002 - as it is called everywhere
    """Remove totals and series of ID; for 30 days nothing is counted for it."""
    if dry_run:
        found = terminal.run(Views, lambda views: views.totals([id], fields=("total", "classes")))
        terminal.show(found[0], f"would remove\n{describe_totals(found)}")
        return
    gone = terminal.run(Views, lambda views: views.delete(id))
    until = f"{gone.until_at:%Y-%m-%d %H:%M} UTC"
    terminal.show(
        gone, f"removed {gone.id} with {gone.total} views; nothing is counted until {until}"
    )


@click.command("verify", short_help="Prove that totals are the sums of their hours.")
@click.pass_obj
def verify(terminal: Terminal) -> int:
    """Compare every total with its hours; ends with exit code 8 where one differs."""
    found = terminal.run(Views, lambda views: views.verify())
    lines = [f"{found.entities} items with {found.views} views"]
    if found.differences:
        rows = [(row.id, row.traffic.value, row.total, row.hours) for row in found.differences]
        lines.append(table(("id", "class", "total", "hours"), rows))
    else:
        lines.append("every total is the sum of its hours")
    terminal.show(found, "\n".join(lines))
    return Corrupt.exit_code if found.differences else 0


@click.command("reclassify", short_help="Move views between classes.")
@click.argument("id")
@click.option("--from", "from_at", type=Moment(), required=True, help="From this hour on.")
@click.option("--to", "to_at", type=Moment(), required=True, help="Until before this hour.")
@click.option("--source", type=CLASS, required=True, help="The class to take from.")
@click.option("--target", type=CLASS, required=True, help="The class to give to.")
@click.pass_obj
def reclassify(terminal: Terminal, /, id: str, **options: Any) -> None:  # noqa: A002 - as it is called everywhere
    """Move the views of ID in whole hours from one class to another, as a job."""
    job = terminal.run(Views, lambda views: views.reclassify(id, **options))
    terminal.show({"job": job}, f"job {job} moves them: `headrace jobs show {job}`")


@click.command("lag", short_help="Show how far the flush is.")
@click.pass_obj
def show_lag(terminal: Terminal) -> None:
    """Show for each shard what is counted and not yet in PostgreSQL."""
    found = terminal.run(Views, lambda views: views.lag())
    rows = [
        (row.shard, row.pending, f"{row.oldest_s:.1f} s", row.through, row.flusher or "nobody")
        for row in found
    ]
    terminal.show(found, table(("shard", "pending", "oldest", "through", "flusher"), rows))
