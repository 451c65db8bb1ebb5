"""Commands of jobs: `headrace jobs|queues|lanes|crons|fleet ...`; each calls one verb and prints."""

from __future__ import annotations

from typing import Final

import click

from headrace.jobs.cli.crons import crons
from headrace.jobs.cli.fleet import fleet
from headrace.jobs.cli.jobs import jobs
from headrace.jobs.cli.lanes import lanes, parse_rate
from headrace.jobs.cli.queues import queues

__all__ = ["COMMANDS", "parse_rate"]
COMMANDS: Final[list[click.Command]] = [jobs, queues, lanes, crons, fleet]
