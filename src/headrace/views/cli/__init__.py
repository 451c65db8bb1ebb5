"""Commands: `headrace views hit|get|series|viewers|top|rm|verify|reclassify|lag`; each calls one verb and prints."""

from __future__ import annotations

from typing import Final

import click

from headrace.views.cli.counts import (
    get_totals,
    hit_items,
    show_series,
    show_top,
    show_viewers,
)
from headrace.views.cli.upkeep import reclassify, remove_item, show_lag, verify


@click.group("views")
def views() -> None:
    """Views of items: count, read, check."""


for _command in (
    hit_items,
    get_totals,
    show_series,
    show_viewers,
    show_top,
    remove_item,
    verify,
    reclassify,
    show_lag,
):
    views.add_command(_command)

COMMANDS: Final[list[click.Command]] = [views]
