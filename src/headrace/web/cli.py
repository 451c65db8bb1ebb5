"""`headrace tokens`: create, list and revoke API tokens; `headrace audit`: list console actions."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

import click
import msgspec

from headrace.kernel.config import parse_duration_s, parse_moment
from headrace.kernel.terminal import (
    CommandGroup,
    Parsed,
    Terminal,
    cursor_after,
    listing,
    paged,
    table,
    visible,
)
from headrace.web.history import BY, History, HistoryAnswer, InvalidSpan
from headrace.web.model import PUBLISHABLE_SCOPES, SCOPES
from headrace.web.sessions import Audit, AuditLine
from headrace.web.tokens import NewToken, Token, Tokens


@click.group(cls=CommandGroup)
def tokens() -> None:
    """Create, list and revoke API tokens."""


@tokens.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help=f"Scope of the token; repeat the option for each scope: {', '.join(SCOPES)}.",
)
@click.option(
    "--expires",
    "expires_s",
    type=Parsed(parse_duration_s, name="duration"),
    help="Expire the token after this time, such as 90d.",
)
@click.option(
    "--publishable",
    is_flag=True,
    help="Create a publishable key for web pages (?k=), limited to"
    f" {', '.join(sorted(PUBLISHABLE_SCOPES))}.",
)
def create(
    terminal: Terminal,
    name: str,
    *,
    scopes: tuple[str, ...],
    expires_s: float | None,
    publishable: bool,
) -> None:
    """Create a token NAME and print it; it cannot be shown again."""
    if not scopes and not publishable:
        raise click.UsageError("name the scopes of the token with --scope, once for each scope")
    chosen = scopes or tuple(sorted(PUBLISHABLE_SCOPES))
    made: NewToken = terminal.run(
        Tokens,
        lambda service: service.create(name, chosen, expires_s=expires_s, publishable=publishable),
    )
    terminal.show({"token": made.text, **msgspec.structs.asdict(made.token)}, made.text)


@tokens.command("ls")
def list_tokens(terminal: Terminal) -> None:
    """List all tokens, including expired and revoked ones."""
    found: list[Token] = terminal.run(Tokens, lambda service: service.list())
    head = ("name", "state", "last used (UTC)", "scopes")
    rows = [
        (token.name, _state(token), _moment(token.last_used_at), ", ".join(token.scopes))
        for token in found
    ]
    terminal.show(listing(found), table(head, rows))


@tokens.command()
@click.argument("name")
def revoke(terminal: Terminal, name: str) -> None:
    """Revoke the token NAME; servers refuse it within 5 seconds."""
    token: Token = terminal.run(Tokens, lambda service: service.revoke(name))
    terminal.show(token, f"token {token.name} is revoked")


@click.command("audit", short_help="List actions of the console.")
@click.option(
    "--before", default=None, type=int, help="List ids below this one, for the next page."
)
@click.option("--max", "lines_max", default=100, show_default=True, type=click.IntRange(1, 1000))
@click.pass_obj
def audit(terminal: Terminal, before: int | None, lines_max: int) -> None:
    """List actions of users in the web console, newest first: user, command, time and address."""
    found: list[AuditLine] = terminal.run(
        Audit, lambda service: service.lines(before=before, lines_max=lines_max)
    )
    rows = [
        (
            line.id,
            f"{line.at:%Y-%m-%d %H:%M:%S}",
            line.actor,
            line.address,
            line.outcome,
            visible(line.command),
        )
        for line in found
    ]
    cursor = cursor_after(found, lines_max, "id")
    grid = table(("id", "at (UTC)", "who", "from", "outcome", "what"), rows)
    text = paged(grid, cursor, "more: --before")
    terminal.show(listing(found, next_cursor=cursor), text)


MOMENT: Final = Parsed(parse_moment, InvalidSpan, name="moment")


@click.command("history", short_help="Show what the rooms did over time.")
@click.argument("series", nargs=-1, required=True, metavar="SERIES...")
@click.option("--from", "from_at", default=None, type=MOMENT, help="First moment.")
@click.option("--to", "to_at", default=None, type=MOMENT, help="End, not included.")
@click.option(
    "--by",
    default=BY[0],
    show_default=True,
    type=click.Choice(BY),
    help="One column for each key (such as an outcome), host or data center.",
)
@click.pass_obj
def history(terminal: Terminal, /, series: tuple[str, ...], **given: Any) -> None:
    """Show SERIES, such as views_hits, in the last hour or up to 30 days.

    Counts are what was counted in each minute, or the mean per minute of longer steps; times are in
    seconds. docs/console.md lists the series.
    """
    found: HistoryAnswer = terminal.run(
        History, lambda service: service.read(list(series), **given)
    )
    lines = {f"{one.series} {line.label}": line for one in found.series for line in one.lines}
    rows = []
    for n, is_recorded in enumerate(found.is_recorded):
        at = found.from_at + n * timedelta(seconds=found.step_s)
        values = [line.values[n] for line in lines.values()]
        if is_recorded:
            rows.append((f"{at:%m-%d %H:%M}", *("" if v is None else f"{v:.12g}" for v in values)))
    terminal.show(found, table(("at (UTC)", *lines), rows))


COMMANDS: Final[list[click.Command]] = [tokens, audit, history]


def _state(token: Token) -> str:
    if token.revoked_at is not None:
        return f"revoked {_moment(token.revoked_at)}"
    return "valid" if token.expires_at is None else f"until {_moment(token.expires_at)}"


def _moment(at: datetime | None) -> str:
    return "never" if at is None else f"{at:%Y-%m-%d %H:%M}"
