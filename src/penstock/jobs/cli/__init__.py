"""Commands of jobs: `penstock jobs|queues|lanes|crons|fleet ...`; each calls one verb and prints."""

from __future__ import annotations

from typing import Final

import click

from penstock.jobs.cli.crons import crons
from penstock.jobs.cli.fleet import fleet
from penstock.jobs.cli.jobs import jobs
from penstock.jobs.cli.lanes import lanes, parse_rate
from penstock.jobs.cli.queues import queues

__all__ = ["COMMANDS", "parse_rate"]
COMMANDS: Final[list[click.Command]] = [jobs, queues, lanes, crons, fleet]
