"""Watching a run from the command line until its items are published."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from headrace.fetch.cli.text import describe_run, progress_line
from headrace.fetch.errors import RunHeld, RunUnfinished
from headrace.fetch.model import FINAL_STATES, Run, RunState
from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal

WATCH_EVERY_S: Final = 0.5
QUIET_S: Final = 15.0


async def wait_done(terminal: Terminal, fetch: Fetch, run: Run, wait_s: float) -> Run:
    """Show progress until the run's items are published, or the wait is over."""
    ends_s = time.monotonic() + wait_s
    moved_s, last = time.monotonic(), run
    while run.state not in FINAL_STATES and time.monotonic() < ends_s:
        if (run.items_pending, run.photos_pending) != (last.items_pending, last.photos_pending):
            moved_s, last = time.monotonic(), run
        is_quiet = time.monotonic() - moved_s > QUIET_S
        hint = "  (nothing moves: is `headrace up` running?)" if is_quiet else ""
        terminal.progress(progress_line(run) + hint)
        await asyncio.sleep(WATCH_EVERY_S)
        run = await fetch.run(run.run)
    return run


def finish_run(terminal: Terminal, run: Run, *, may_be_unfinished: bool) -> None:
    """Show the run; held and unfinished ones end with their exit codes."""
    terminal.show(run, describe_run(run))
    if run.state is RunState.HELD:
        raise RunHeld(
            f"run {run.run} is held ({run.reason}): look at the file, then"
            f" `headrace fetch catalogue confirm {run.run}` or run a better one"
        )
    if run.state not in FINAL_STATES and not may_be_unfinished:
        ahead = "for their photos" if run.photos_pending else "to be published"
        raise RunUnfinished(
            f"run {run.run} is applied and {run.items_pending} items wait {ahead}: see"
            f" `headrace fetch run show {run.run}`, and that `headrace up` is running"
        )
