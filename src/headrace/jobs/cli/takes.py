"""Commands `headrace jobs take|ack|extend`: for people and scripts that do jobs by hand."""

from __future__ import annotations

from typing import Any, Final

import click

from headrace.jobs.cli.text import describe_taken, duration_s
from headrace.jobs.errors import InvalidTake
from headrace.jobs.model import TakenOutcome
from headrace.jobs.service import Jobs
from headrace.kernel.terminal import Terminal

SEND_TO: Final = "A job and the queue that it moves to, as it is."


@click.command("take", short_help="Take jobs of a queue.")
@click.argument("queue")
@click.option("-n", "n", default=1, show_default=True, type=int, help="How many at most.")
@click.option("--lease", default="5m", show_default=True, help="How long they are yours.")
@click.option("--wait", default="0s", show_default=True, help="Wait so long where none is due.")
@click.pass_obj
def take(terminal: Terminal, queue: str, *, n: int, lease: str, wait: str) -> None:
    """Take due jobs of QUEUE; unless they are acked in time, they go back."""
    lease_s = duration_s("--lease", lease, InvalidTake)
    wait_s = duration_s("--wait", wait, InvalidTake)
    taken = terminal.run(
        Jobs, lambda jobs: jobs.takes.take(queue, n, lease_s=lease_s, wait_s=wait_s)
    )
    terminal.show(taken, describe_taken(taken))


@click.command("ack", short_help="Say what became of taken jobs.")
@click.argument("lease_id", type=int)
@click.option("--done", multiple=True, type=int, help="A job that is done.")
@click.option("--retry", multiple=True, type=int, help="A job to run again.")
@click.option("--snooze", multiple=True, type=int, help="A job to run later, without an attempt.")
@click.option("--after", default=None, help="When to run those again, such as 1m.")
@click.option("--fail", multiple=True, type=int, help="A job that failed for good.")
@click.option("--cancel", multiple=True, type=int, help="A job that nobody wants any more.")
@click.option("--send-to", multiple=True, type=(int, str), metavar="JOB QUEUE", help=SEND_TO)
@click.option("--back", multiple=True, type=int, help="A job to give back as it was.")
@click.option("--why", default="", help="Why they are retried, failed or cancelled.")
@click.pass_obj
def ack(terminal: Terminal, /, lease_id: int, **told: Any) -> None:
    """Say what became of jobs of LEASE_ID; without options all that is left of it is done."""
    after = told["after"]
    after_s = None if after is None else duration_s("--after", after, InvalidTake)
    given = {
        "done": TakenOutcome(outcome="done"),
        "retry": TakenOutcome(outcome="retry", after_s=after_s, why=told["why"]),
        "snooze": TakenOutcome(outcome="snooze", after_s=after_s),
        "fail": TakenOutcome(outcome="fail", why=told["why"]),
        "cancel": TakenOutcome(outcome="cancel", why=told["why"]),
        "back": TakenOutcome(outcome="return"),
    }
    named = [(job_id, outcome) for option, outcome in given.items() for job_id in told[option]]
    named += [
        (job_id, TakenOutcome(outcome="send_to", queue=queue)) for job_id, queue in told["send_to"]
    ]
    outcomes = dict(named)
    if len(outcomes) < len(named):
        raise InvalidTake("a job is named twice: say one thing of each")
    if not named and (after is not None or told["why"]):
        raise InvalidTake("--after and --why go with --retry ID or --fail ID: name the jobs")
    rest = None if named else TakenOutcome(outcome="done")
    terminal.run(Jobs, lambda jobs: jobs.takes.ack(lease_id, outcomes, rest=rest))
    shown = {str(job_id): outcome.outcome for job_id, outcome in outcomes.items()}
    text = ", ".join(f"job {job_id}: {word}" for job_id, word in shown.items()) or "all done"
    terminal.show({"lease_id": lease_id, "outcomes": shown or "done"}, text)


@click.command("extend", short_help="Keep taken jobs for longer.")
@click.argument("lease_id", type=int)
@click.option("--lease", default="5m", show_default=True, help="How long from now.")
@click.pass_obj
def extend(terminal: Terminal, lease_id: int, lease: str) -> None:
    """Let LEASE_ID end later."""
    lease_s = duration_s("--lease", lease, InvalidTake)
    expires_at = terminal.run(Jobs, lambda jobs: jobs.takes.extend(lease_id, lease_s))
    text = f"lease {lease_id} until {expires_at:%Y-%m-%d %H:%M:%S} UTC"
    terminal.show({"lease_id": lease_id, "expires_at": expires_at}, text)


COMMANDS: Final[list[click.Command]] = [take, ack, extend]
