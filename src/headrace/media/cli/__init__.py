"""Commands of media: `headrace media ...`; each calls one verb and prints. The role is the cli floor's."""

from __future__ import annotations

from typing import Final

import click

from headrace.media.cli import disks, hottest, nodes, objects, partitions, purging, signing, tracing

__all__ = ["COMMANDS", "media"]


@click.group("media")
def media() -> None:
    """Objects served by range."""


for _module in (objects, purging, nodes, partitions, disks, hottest, signing, tracing):
    for _command in _module.COMMANDS:
        media.add_command(_command)

COMMANDS: Final[list[click.Command]] = [media]
