"""Everything that can be done to jobs from their screens."""

from __future__ import annotations

from typing import Final

from headrace.console.actions import Action
from headrace.console.screens.jobs.actions import crons, lanes, queues, work

ACTIONS: Final[tuple[Action, ...]] = (
    *queues.ACTIONS,
    *work.ACTIONS,
    *lanes.ACTIONS,
    *crons.ACTIONS,
)
