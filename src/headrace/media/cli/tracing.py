"""Commands `headrace media trace ...`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from headrace.kernel.terminal import Terminal, table
from headrace.media.cli.signing import DURATION
from headrace.media.service import Media
from headrace.media.tracing import Watch


@click.group("trace")
def trace() -> None:
    """Follow the requests of one user, request or object through all nodes."""


@trace.command("on", short_help="Log certain requests for a while.")
@click.option(
    "--tag", "selector", required=True,
    help="Which: user=42, request=r7, object=tracks/a.mp3 or trace=<32 hex digits>.",
)  # fmt: skip
@click.option("--for", "for_s", type=DURATION, default="10m", show_default=True, help="How long.")
@click.pass_obj
def start(terminal: Terminal, selector: str, for_s: float) -> None:
    """Let every node log each request with this tag: a line an answer, with the time of each stage.

    The lines are events `request_traced` in the logs of the nodes; one trace id finds those of all nodes.
    """
    watch = terminal.run(Media, lambda media: media.traces.start(selector, for_s=for_s))
    terminal.show(watch, describe([watch]))


@trace.command("off", short_help="Log them no more.")
@click.option("--tag", "selector", help="Which; all, if left out.")
@click.pass_obj
def stop(terminal: Terminal, selector: str | None) -> None:
    """End one watch, or all; each ends by itself at its time."""
    ended = terminal.run(Media, lambda media: media.traces.stop(selector))
    terminal.show(ended, describe(ended) if ended else "nothing was traced")


@trace.command("show", short_help="Show what is traced.")
@click.pass_obj
def show(terminal: Terminal) -> None:
    """Show which requests all nodes log now, and until when."""
    found = terminal.run(Media, lambda media: media.traces.list())
    terminal.show(found, describe(found) if found else "nothing is traced")


def describe(watches: Sequence[Watch]) -> str:
    """Watches as a table."""
    rows = [(f"{w.name}={w.value}", f"{w.ends_at:%Y-%m-%d %H:%M:%S} UTC") for w in watches]
    return table(("tag", "until"), rows)


COMMANDS: Final[list[click.Command]] = [trace]
