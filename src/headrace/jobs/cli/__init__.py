"""Commands `headrace jobs|queues|lanes|crons|fleet ...`. Each calls one verb and prints."""

from __future__ import annotations

from typing import Final

import click

from headrace.jobs.cli.fleet import crons, fleet
from headrace.jobs.cli.jobs import jobs
from headrace.jobs.cli.queues import lanes, parse_rate, queues

__all__ = ["COMMANDS", "parse_rate"]
COMMANDS: Final[list[click.Command]] = [jobs, queues, lanes, crons, fleet]
