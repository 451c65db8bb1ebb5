"""Commands `headrace jobs|workflows|queues|lanes|crons|fleet ...`. Each calls one verb."""

from __future__ import annotations

from typing import Final

import click

from headrace.jobs.cli.fleet import crons, fleet
from headrace.jobs.cli.jobs import jobs
from headrace.jobs.cli.queues import lanes, queues
from headrace.jobs.cli.workflows import workflows

COMMANDS: Final[list[click.Command]] = [jobs, workflows, queues, lanes, crons, fleet]
