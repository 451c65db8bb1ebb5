"""Commands `penstock lanes ...`."""

from __future__ import annotations

import re
from typing import Any

import click

from penstock.jobs.cli.text import describe_lane
from penstock.jobs.errors import InvalidJob
from penstock.jobs.model import Lane
from penstock.jobs.service import Jobs
from penstock.kernel.config import parse_duration_s
from penstock.kernel.terminal import Terminal


@click.group("lanes")
def lanes() -> None:
    """Lanes: limits on the jobs of one customer, host or whatever a lane stands for."""


@lanes.command("show", short_help="Show a lane.")
@click.argument("limiter")
@click.argument("lane")
@click.pass_obj
def show_lane(terminal: Terminal, limiter: str, lane: str) -> None:
    """Show LANE of LIMITER: its limits and what it is doing."""
    found = terminal.run(Jobs, lambda jobs: jobs.get_lane(limiter, lane))
    terminal.show(found, describe_lane(found))


@lanes.command("set", short_help="Set a lane's limits, live.")
@click.argument("limiter")
@click.argument("lane")
@click.option("--rate", default=None, help="Starts per window such as 600/m or 10/30s.")
@click.option("--concurrency", default=None, type=int, help="Jobs at once.")
@click.option("--weight", default=1, show_default=True, type=int, help="Share against other lanes.")
@click.option("--paused", is_flag=True, help="Hand out none.")
@click.pass_obj
def set_lane(terminal: Terminal, /, limiter: str, lane: str, **options: Any) -> None:
    """Set the limits of LANE of LIMITER; what is left out is without limit."""
    starts_max, window_s = parse_rate(options.pop("rate"))

    async def change(jobs: Jobs) -> Lane:
        await jobs.set_lane(limiter, lane, starts_max=starts_max, window_s=window_s, **options)
        return await jobs.get_lane(limiter, lane)

    found = terminal.run(Jobs, change)
    terminal.show(found, describe_lane(found))


def parse_rate(text: str | None) -> tuple[int | None, float | None]:
    """Starts and window in seconds of `600/m` or `10/30s`; nothing of None. Raises: InvalidJob."""
    if text is None:
        return None, None
    match = re.fullmatch(r"([0-9]{1,9})/([0-9.]*)([a-z]{1,2})", text)
    try:
        if match is not None:
            return int(match[1]), parse_duration_s(f"{match[2] or 1}{match[3]}")
        reason = "a rate such as 600/m or 10/30s"
    except ValueError as error:
        reason = str(error)
    raise InvalidJob(f"--rate: expected {reason}, got {text[:80]!r}")
