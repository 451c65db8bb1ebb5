"""Crons: what comes when, and its last job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.console.seeing import Ask
from headrace.jobs.crons import Cron


@dataclass(frozen=True, slots=True, kw_only=True)
class CronsView:
    """Every cron, by name."""

    crons: Sequence[Cron]


async def see_crons(ask: Ask) -> CronsView:
    """Every cron."""
    return CronsView(crons=await ask.service("jobs").crons.all())
