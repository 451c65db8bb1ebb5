"""The command `headrace media hottest`: what clients ask this machine's node for most."""

from __future__ import annotations

from typing import Final

import click

from headrace.kernel.terminal import Terminal, table
from headrace.media.service import Media
from headrace.media.service.hottest import OBJECTS_MAX


@click.command("hottest", short_help="List the objects asked for most.")
@click.option(
    "--max", "objects_max", default=20, show_default=True, type=click.IntRange(1, OBJECTS_MAX),
    help="List at most so many.",
)  # fmt: skip
@click.pass_obj
def hottest(terminal: Terminal, objects_max: int) -> None:
    """List the objects that clients ask the node of this data folder for most: requests a second, the last minutes
    counting most, out of a sample.
    """
    found = terminal.run(Media, lambda media: media.hottest(objects_max=objects_max))
    rows = [(one.key, f"{one.requests_per_s:,.1f}") for one in found]
    terminal.show(found, table(("object", "requests/s"), rows) if rows else "nothing was asked for")


COMMANDS: Final[list[click.Command]] = [hottest]
