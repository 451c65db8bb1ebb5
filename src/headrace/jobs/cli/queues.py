"""Commands `headrace queues ...` and `headrace lanes ...`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import click
from msgspec import UNSET

from headrace.jobs.cli.jobs import duration
from headrace.jobs.errors import InvalidJob, InvalidSetting
from headrace.jobs.model import Lane, Limiter, QueueStatus
from headrace.jobs.service import Jobs
from headrace.jobs.service.lanes import SLACK_S, Lanes
from headrace.jobs.tasks.options import SLOTS_MAX
from headrace.kernel import config
from headrace.kernel.terminal import (
    CommandGroup,
    Lines,
    Parsed,
    Terminal,
    age_cell,
    cursor_after,
    listing,
    paged,
    table,
)

NO_RATE: Final = (None, None)
RATE: Final = click.option(
    "--rate",
    type=Parsed(config.parse_rate, InvalidJob),
    default=NO_RATE,
    help="Starts per window such as 600/m or 10/30s.",
)
"""The command receives the number of starts and the window in seconds, or NO_RATE."""
DECISIONS: Final = (
    "Decisions that people can make on its jobs, each with the queue that a job then moves to."
)


@click.group("queues", cls=CommandGroup)
def queues() -> None:
    """Queues: show the backlog; pause, resume, set."""


@queues.command("ls", short_help="List the queues.")
def list_queues(terminal: Terminal) -> None:
    """List every queue with its jobs by state and its slots.

    `oldest` is the age of the oldest ready job. A slot is a worker process: `2 (1-8)` are 2 slots
    now, of at least 1 and at most 8.
    """
    found = terminal.run(Jobs, lambda jobs: jobs.queues.all())
    terminal.show(listing(found), table(QUEUE_HEAD, map(_queue_row, found)))


@queues.command("show", short_help="Show a queue.")
@click.argument("queue")
def show_queue(terminal: Terminal, queue: str) -> None:
    """Show QUEUE with its backlog."""
    found = terminal.run(Jobs, lambda jobs: jobs.queues.get(queue))
    terminal.show(found, describe_queue(found))


@queues.command("pause", short_help="Start no more jobs of a queue.")
@click.argument("queue")
def pause(terminal: Terminal, queue: str) -> None:
    """Start no more jobs of QUEUE; running jobs continue."""
    terminal.run(Jobs, lambda jobs: jobs.queues.pause(queue))
    terminal.show({"queue": queue, "paused": True}, f"queue {queue} is paused")


@queues.command("resume", short_help="Start jobs of a queue again.")
@click.argument("queue")
def resume(terminal: Terminal, queue: str) -> None:
    """Start jobs of QUEUE again."""
    terminal.run(Jobs, lambda jobs: jobs.queues.resume(queue))
    terminal.show({"queue": queue, "paused": False}, f"queue {queue} is running")


def _number(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit():
        raise ValueError("a whole number of at least 0, or none")
    return int(text)


def _decisions(text: str) -> dict[str, str | None] | None:
    if text == "none":
        return None
    pairs = [one.partition("=") for one in text.split(",")]
    given = {decision: target or None for decision, _, target in pairs}
    if len(given) < len(pairs):
        raise ValueError("each decision once")
    return given


def _setting(
    option: str, parse: Callable[[str], Any], help_text: str, **more: Any
) -> Callable[[Any], Any]:
    """An option with a setting. The command receives UNSET if it is left out."""
    kind = Parsed(parse, InvalidSetting)
    return click.option(option, type=kind, default=UNSET, help=help_text, **more)


@queues.command("set", short_help="Override settings of a queue.")
@click.argument("queue")
@_setting(
    "--importance", _number, "Order of queues when worker processes are scarce: 0 first to 9 last."
)
@_setting("--slots-min", _number, "Minimum of worker processes on all hosts together.")
@_setting("--slots-max", _number, "Maximum of worker processes on all hosts together.")
@_setting("--retries", _number, "Retries of a failed job.")
@_setting("--decisions", _decisions, DECISIONS, metavar="DECISION[=QUEUE],...")
@click.option("--create", is_flag=True, help="Create the queue if it does not exist.")
def set_queue(terminal: Terminal, /, queue: str, *, create: bool, **options: Any) -> None:
    """Override settings of QUEUE; `none` restores what its code declares."""
    changes = {name: value for name, value in options.items() if value is not UNSET}

    async def change(jobs: Jobs) -> QueueStatus:
        await jobs.queues.set(queue, create=create, **changes)
        return await jobs.queues.get(queue)

    found = terminal.run(Jobs, change)
    text = describe_queue(found)
    if create and not found.is_known:
        text += f"\nNo code declares it; `headrace queues rm {queue}` removes it."
    terminal.show(found, text)


@queues.command("rm", short_help="Remove an empty queue.")
@click.argument("queue")
def remove_queue(terminal: Terminal, queue: str) -> None:
    """Remove QUEUE, which must have no jobs, no cron and no code that runs it."""
    terminal.run(Jobs, lambda jobs: jobs.queues.remove(queue))
    terminal.show({"queue": queue, "removed": True}, f"queue {queue} is removed")


@click.group("lanes", cls=CommandGroup)
def lanes() -> None:
    """Limits on the jobs of one customer, host or other key (a lane of a limiter)."""


@lanes.command("ls", short_help="List lanes of a limiter.")
@click.argument("limiter")
@click.option("--after", default="", help="Only names after this one.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000))
def list_lanes(terminal: Terminal, limiter: str, after: str, limit: int) -> None:
    """List lanes of LIMITER by name."""
    found = terminal.run(Jobs, lambda jobs: jobs.lanes.list(limiter, after=after, lanes_max=limit))
    head = ("lane", "rate", "concurrency", "weight", "waiting", "in flight", "")
    cursor = cursor_after(found, limit, "lane")
    text = paged(table(head, map(_lane_row, found)), cursor, "more: --after")
    terminal.show(listing(found, next_cursor=cursor), text)


@lanes.command("show", short_help="Show a lane.")
@click.argument("limiter")
@click.argument("lane")
def show_lane(terminal: Terminal, limiter: str, lane: str) -> None:
    """Show LANE of LIMITER: its limits and current counts."""
    found = terminal.run(Jobs, lambda jobs: jobs.lanes.get(limiter, lane))
    terminal.show(found, describe_lane(found))


@lanes.command("set", short_help="Set a lane's limits.")
@click.argument("limiter")
@click.argument("lane")
@RATE
@click.option("--concurrency", default=None, type=int, help="Jobs at once.")
@click.option(
    "--weight", default=1, show_default=True, type=int, help="Weight relative to other lanes."
)
@click.option("--paused", is_flag=True, help="Pause it; the limits are those given here.")
@click.option("--create", is_flag=True, help="Create LIMITER if it does not exist.")
def set_lane(terminal: Terminal, /, limiter: str, lane: str, **options: Any) -> None:
    """Set the limits of LANE itself; an omitted limit is unlimited, an omitted weight is 1.

    To stop a lane and keep its limits, use `lanes pause` and `lanes resume`.
    """
    starts_max, window_s = options.pop("rate")
    limits = {"starts_max": starts_max, "window_s": window_s, **options}
    _change_lane(terminal, limiter, lane, lambda lanes: lanes.set(limiter, lane, **limits))


def _change_lane(
    terminal: Terminal, limiter: str, lane: str, change: Callable[[Lanes], Awaitable[None]]
) -> None:
    """Change a lane and show it."""

    async def run(jobs: Jobs) -> Lane:
        await change(jobs.lanes)
        return await jobs.lanes.get(limiter, lane)

    found = terminal.run(Jobs, run)
    terminal.show(found, describe_lane(found))


@lanes.command("reset", short_help="Remove a lane's own limits.")
@click.argument("limiter")
@click.argument("lane")
def reset_lane(terminal: Terminal, limiter: str, lane: str) -> None:
    """Remove the limits, pause and weight of LANE itself; LIMITER's limits apply again."""
    _change_lane(terminal, limiter, lane, lambda lanes: lanes.reset(limiter, lane))


@lanes.command("pause", short_help="Start no more jobs of a lane.")
@click.argument("limiter")
@click.argument("lane")
def pause_lane(terminal: Terminal, limiter: str, lane: str) -> None:
    """Start no more jobs of LANE of LIMITER; running jobs continue, limits stay."""
    _change_lane(terminal, limiter, lane, lambda lanes: lanes.pause(limiter, lane))


@lanes.command("resume", short_help="Start jobs of a lane again.")
@click.argument("limiter")
@click.argument("lane")
def resume_lane(terminal: Terminal, limiter: str, lane: str) -> None:
    """Start jobs of LANE of LIMITER again, within its limits."""
    _change_lane(terminal, limiter, lane, lambda lanes: lanes.resume(limiter, lane))


@lanes.command("spend", short_help="Use up starts of a lane's rate.")
@click.argument("limiter")
@click.argument("lane")
@click.option("--starts", default=1, show_default=True, type=int, help="Number of starts.")
@duration("--wait", "Longest wait for them.", default="0s")
def spend(terminal: Terminal, limiter: str, lane: str, *, starts: int, wait_s: float) -> None:
    """Use up starts of LANE's rate for work outside jobs; print how long to wait before it.

    If the wait would be longer than --wait, it is refused and uses up nothing.
    """
    begin_s = terminal.run(
        Jobs, lambda jobs: jobs.lanes.spend(limiter, lane, starts, wait_max_s=wait_s)
    )
    text = "refused: nothing was consumed" if begin_s is None else f"begin in {begin_s:.3f} s"
    terminal.show({"wait_s": begin_s}, text)


@lanes.command("limiters", short_help="List limiters.")
def list_limiters(terminal: Terminal) -> None:
    """List every limiter with its limits and queues."""
    found = terminal.run(Jobs, lambda jobs: jobs.lanes.limiters())
    terminal.show(listing(found), _limiters(found))


@lanes.command("limiter", short_help="Show or set a limiter's limits.")
@click.argument("limiter")
@RATE
@click.option("--concurrency", default=None, type=int, help="Jobs at once.")
@duration("--slack", "Longest time between the claim of a job and its start, such as 250ms.")
@click.option("--unlimited", is_flag=True, help="Remove all limits.")
@click.option("--as-declared", is_flag=True, help="Restore what its code declares, or no limits.")
def limiter_limits(
    terminal: Terminal, /, limiter: str, *, as_declared: bool, unlimited: bool, **options: Any
) -> None:
    """Show the limits of LIMITER; with options override them.

    These limits replace those that code declares, until --as-declared removes them.
    """
    starts_max, window_s = rate = options["rate"]
    concurrency, slack_s = options["concurrency"], options["slack_s"]
    is_given = unlimited or (rate, concurrency, slack_s) != (NO_RATE, None, None)
    if as_declared and is_given:
        raise InvalidJob("--as-declared removes what the other options set: use it without them")

    async def change(jobs: Jobs) -> Limiter:
        if as_declared:
            await jobs.lanes.reset_limiter(limiter)
        elif is_given:
            await jobs.lanes.set_limiter(
                limiter,
                starts_max=starts_max,
                window_s=window_s,
                concurrency=concurrency,
                slack_s=SLACK_S if slack_s is None else slack_s,
            )
        return await jobs.lanes.get_limiter(limiter)

    found = terminal.run(Jobs, change)
    terminal.show(found, _limiters([found]))


@lanes.command("rm-limiter", short_help="Remove an unused limiter.")
@click.argument("limiter")
def remove_limiter(terminal: Terminal, limiter: str) -> None:
    """Remove LIMITER with its lanes; no queue, job or code may use it."""
    terminal.run(Jobs, lambda jobs: jobs.lanes.remove_limiter(limiter))
    terminal.show({"limiter": limiter, "removed": True}, f"limiter {limiter} is removed")


def _lane_row(lane: Lane) -> tuple[Any, ...]:
    notes = ["paused"] if lane.paused else []
    notes += ["own limits"] if not lane.follows_limiter else []
    limits = (_rate(lane.starts_max, lane.window_s), _count(lane.concurrency))
    return (lane.lane, *limits, lane.weight, lane.waiting, lane.inflight, ", ".join(notes))


def _limiters(found: Sequence[Limiter]) -> str:
    rows = [
        (
            one.limiter,
            _rate(one.starts_max, one.window_s),
            _count(one.concurrency),
            f"{one.slack_s:g} s",
            "override" if one.is_set else "code",
            " ".join(one.queues),
        )
        for one in found
    ]
    return table(("limiter", "rate", "concurrency", "slack", "set by", "queues"), rows)


def _rate(starts_max: int | None, window_s: float | None) -> str:
    return "none" if window_s is None else f"{starts_max} in {window_s:g} s"


def _count(concurrency: int | None) -> str:
    return "none" if concurrency is None else str(concurrency)


def describe_lane(lane: Lane) -> str:
    """A lane in lines of text."""
    lines = [
        f"lane        {lane.limiter} / {lane.lane}{' (paused)' if lane.paused else ''}",
        f"rate        {_rate(lane.starts_max, lane.window_s)}",
        f"concurrency {_count(lane.concurrency)}",
        f"weight      {lane.weight}",
        f"waiting     {lane.waiting}",
        f"in flight   {lane.inflight}",
        f"started     {lane.starts_live} in the current window",
    ]
    if lane.next_at is not None:
        lines.append(f"next        {lane.next_at:%Y-%m-%d %H:%M:%S} UTC")
    return "\n".join(lines)


def _queue_row(status: QueueStatus) -> tuple[Any, ...]:
    """A queue as a row of the table."""
    age = "" if status.oldest_ready_age_s is None else age_cell(status.oldest_ready_age_s)
    notes = ["paused"] if status.paused else []
    notes += [] if status.is_known else ["people decide" if status.decisions else "no code runs"]
    counts = (
        _capped(status.ready, is_capped=status.ready_is_capped),
        _capped(status.scheduled, is_capped=status.scheduled_is_capped),
        status.leased,
        _capped(status.failed, is_capped=status.failed_is_capped),
    )
    most = "any" if status.slots_max >= SLOTS_MAX else status.slots_max
    slots = f"{status.slots} ({status.slots_min}-{most})"
    return (status.queue, *counts, age, slots, status.importance, ", ".join(notes))


QUEUE_HEAD: Final = (
    "queue",
    "ready",
    "scheduled",
    "leased",
    "failed",
    "oldest",
    "slots",
    "importance",
    "",
)


def describe_queue(status: QueueStatus) -> str:
    """A queue in lines of text."""
    by_hand = status.overridden
    held = {
        name: getattr(status, name) for name in ("importance", "slots_min", "slots_max", "retries")
    }
    lines: list[str] = [table(QUEUE_HEAD, [_queue_row(status)]), ""]
    lines += [
        f"{name:<12}{value}{' (override)' if name in by_hand else ''}"
        for name, value in held.items()
    ]
    kept = "not kept" if status.keep_done_s is None else f"kept for {status.keep_done_s:g} s"
    lines += [
        f"batch       {status.batch}",
        f"timeout     {status.timeout_s:g} s",
        f"limiter     {status.limiter}{', a lane is required' if status.needs_lane else ''}",
        f"done jobs   {kept}",
    ]
    if status.tag is not None:
        lines.append(f"tag         {status.tag}")
    if status.decisions:
        shown = [f"{name}={queue}" if queue else name for name, queue in status.decisions.items()]
        lines.append(f"decisions   {', '.join(shown)}")
    if status.aliases:
        lines.append(f"aliases     {' '.join(status.aliases)}")
    return Lines(*lines)


def _capped(count: int, *, is_capped: bool) -> str:
    return f"{count}+" if is_capped else str(count)
