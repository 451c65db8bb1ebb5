"""The commands `headrace media ...`. Each calls one service method and prints the result.

`headrace media serve` is in `headrace.cli.roles`.
"""

from __future__ import annotations

from typing import Final

import click

from headrace.media.cli import cluster, objects

__all__ = ["COMMANDS", "media"]


@click.group("media")
def media() -> None:
    """Objects served by range."""


for _command in (*objects.COMMANDS, *cluster.COMMANDS):
    media.add_command(_command)

COMMANDS: Final[list[click.Command]] = [media]
