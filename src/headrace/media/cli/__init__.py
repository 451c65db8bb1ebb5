"""The commands `headrace media ...`. Each calls one service method and prints the result.

`headrace media serve` is in `headrace.cli.roles`.
"""

from __future__ import annotations

from typing import Final

import click

from headrace.media.cli import cluster, objects

__all__ = ["COMMANDS", "cluster", "objects"]
COMMANDS: Final[list[click.Command]] = [objects.media]
