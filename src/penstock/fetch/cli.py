"""Commands: `penstock fetch customer|catalogue|run|consumer|photo|why`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

import click

from penstock.fetch.model import (
    FINAL_STATES,
    Customer,
    Link,
    PhotoProblem,
    PhotoReport,
    RowProblem,
    Run,
    RunState,
    UrlReport,
    parse_rate,
)
from penstock.fetch.outcomes import is_bad
from penstock.fetch.service import Fetch
from penstock.kernel.errors import Conflict, Unavailable
from penstock.kernel.terminal import Terminal

WATCH_EVERY_S: Final = 0.5
QUIET_S: Final = 15.0


class RunHeld(Conflict):
    """The command ended with a run that a person must confirm."""

    code = "fetch.run_held"


class RunUnfinished(Unavailable):
    """The run is applied; its photos were not decided in the time the command waited."""

    code = "fetch.run_unfinished"


@click.group("fetch")
def fetch() -> None:
    """Catalogues and photos of sellers."""


@fetch.group("customer")
def customer_group() -> None:
    """Whose catalogues, and how fast their hosts may be asked."""


@customer_group.command("set", short_help="Make a customer or change its limits.")
@click.argument("customer")
@click.option(
    "--rate", default="600/m", show_default=True, help="Requests, such as 10/s, 20/5s or 600/m."
)
@click.option("--connections", default=8, show_default=True, help="Requests at once.")
@click.pass_obj
def set_customer(terminal: Terminal, customer: str, rate: str, connections: int) -> None:
    """Make CUSTOMER or change its limits."""
    starts_max, window_s = parse_rate(rate)
    found = terminal.run(
        Fetch,
        lambda fetch: fetch.set_customer(
            customer, starts_max=starts_max, window_s=window_s, connections=connections
        ),
    )
    terminal.show(found, _customer_line(found))


@customer_group.command("show", short_help="Show a customer, or all.")
@click.argument("customer", required=False)
@click.pass_obj
def show_customer(terminal: Terminal, customer: str | None) -> None:
    """Show the limits of CUSTOMER, or of every customer."""
    if customer is None:
        _show_customers(terminal)
    else:
        found = terminal.run(Fetch, lambda fetch: fetch.customer(customer))
        terminal.show(found, _customer_line(found))


@customer_group.command("ls", short_help="List customers.")
@click.pass_obj
def list_customers(terminal: Terminal) -> None:
    """List every customer with its limits."""
    _show_customers(terminal)


def _show_customers(terminal: Terminal) -> None:
    everyone = terminal.run(Fetch, lambda fetch: fetch.customers())
    text = "\n".join(_customer_line(found) for found in everyone)
    terminal.show(everyone, text or "no customers")


@fetch.group("catalogue")
def catalogue_group() -> None:
    """Catalogue files and their runs."""


@catalogue_group.command("run", short_help="Read a catalogue file and apply it.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--customer", required=True, help="Whose catalogue it is.")
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the photos.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
@click.pass_obj
def run_catalogue(
    terminal: Terminal, file: Path, *, customer: str, dry_run: bool, no_wait: bool, wait_s: float
) -> None:
    """Read FILE (CSV, TSV or YML, gzip or not) as CUSTOMER's whole catalogue and apply it."""

    async def run(fetch: Fetch) -> Run:
        found = await fetch.run_catalogue(file, customer, is_dry_run=dry_run)
        return found if no_wait else await _wait_done(terminal, fetch, found, wait_s)

    _finish(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)


@catalogue_group.command("confirm", short_help="Apply a held run.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.option("--no-wait", is_flag=True, help="Do not wait for the photos.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
@click.pass_obj
def confirm_run(terminal: Terminal, run_id: int, *, no_wait: bool, wait_s: float) -> None:
    """Apply RUN, which was held because it was empty, truncated or much smaller than the last."""

    async def run(fetch: Fetch) -> Run:
        found = await fetch.confirm_run(run_id)
        return found if no_wait else await _wait_done(terminal, fetch, found, wait_s)

    _finish(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)


@catalogue_group.command("ls", short_help="List runs.")
@click.option("--customer", help="Only this customer's.")
@click.pass_obj
def list_runs(terminal: Terminal, customer: str | None) -> None:
    """List the newest runs."""
    found = terminal.run(Fetch, lambda fetch: fetch.runs(customer))
    lines = [
        f"{run.run:>6}  {run.customer:<20} {run.state:<10} {run.started_at:%Y-%m-%d %H:%M:%S}"
        f"  {run.rows} rows  {run.file_name}"
        for run in found
    ]
    terminal.show(found, "\n".join(lines) or "no runs")


@catalogue_group.command("errors", short_help="List the problems of a run's rows and photos.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.pass_obj
def list_errors(terminal: Terminal, run_id: int) -> None:
    """List the problems of RUN's rows and the photos that failed or were refused.

    At most the first 1,000 of each; over HTTP all photos can be paged.
    """

    async def ask(fetch: Fetch) -> tuple[list[RowProblem], list[PhotoProblem]]:
        problems = await fetch.problems(run_id)
        photos = await fetch.photo_problems(run_id)
        return [problem for _, problem in problems], [photo for _, photo in photos]

    problems, photos = terminal.run(Fetch, ask)
    lines = [
        f"row {p.row} (line {p.line}) {p.item or '-'}: {p.field}: {p.text} [{p.code}]"
        for p in problems
    ]
    lines += [f"photo of {p.item}: {p.url}: {p.text} [{p.outcome}]" for p in photos]
    found = {"problems": problems, "photos": photos}
    terminal.show(found, "\n".join(lines) or f"run {run_id}: no problems")


@fetch.group("run")
def run_group() -> None:
    """Runs of catalogues."""


@run_group.command("show", short_help="Show how far a run is.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.pass_obj
def show_run(terminal: Terminal, run_id: int) -> None:
    """Show the counts of RUN."""
    found = terminal.run(Fetch, lambda fetch: fetch.run(run_id))
    terminal.show(found, describe_run(found))


run_group.add_command(list_runs, "ls")


@fetch.group("consumer")
def consumer_group() -> None:
    """The on_item handlers that items are told to."""


@consumer_group.command("ls", short_help="List consumers.")
@click.pass_obj
def list_consumers(terminal: Terminal) -> None:
    """List every consumer that a worker recorded."""
    found = terminal.run(Fetch, lambda fetch: fetch.consumers())
    lines = [
        f"{consumer.name}: since {consumer.added_at:%Y-%m-%d %H:%M:%S}, told of {consumer.items} items"
        for consumer in found
    ]
    terminal.show(found, "\n".join(lines) or "no consumers: no worker ran with an on_item handler")


@consumer_group.command("rm", short_help="Forget a consumer.")
@click.argument("name")
@click.pass_obj
def remove_consumer(terminal: Terminal, name: str) -> None:
    """Forget consumer NAME and drop what waits for it.

    A worker that starts with a handler of that name records it anew.
    """
    terminal.run(Fetch, lambda fetch: fetch.remove_consumer(name))
    terminal.show({"removed": name}, f"{name} is forgotten; what waited for it is dropped")


@consumer_group.command("replay", short_help="Tell a consumer every item once more.")
@click.argument("name")
@click.option("--customer", help="Only this customer's items.")
@click.pass_obj
def replay_consumer(terminal: Terminal, name: str, customer: str | None) -> None:
    """Tell consumer NAME the newest version of every item once more.

    For a handler that came when items were published already, or that lost what it was told.
    """
    items = terminal.run(Fetch, lambda fetch: fetch.replay(name, customer=customer))
    terminal.show({"consumer": name, "items": items}, f"{items} items are on their way to {name}")


@fetch.command("photo", short_help="Download one photo now.")
@click.argument("url")
@click.pass_obj
def try_photo(terminal: Terminal, url: str) -> None:
    """Download URL now and say what becomes of it; nothing is stored."""
    found = terminal.run(Fetch, lambda fetch: fetch.photo(url))
    terminal.show(found, _describe_photo(found))
    if found.outcome != "stored":
        raise click.exceptions.Exit(1)


@fetch.command("why", short_help="Say why a photo is there or not.")
@click.argument("url")
@click.pass_obj
def why(terminal: Terminal, url: str) -> None:
    """Say whether URL may be asked and what every customer's last run made of it."""
    found = terminal.run(Fetch, lambda fetch: fetch.why(url))
    terminal.show(found, _describe_url(found))


async def _wait_done(terminal: Terminal, fetch: Fetch, run: Run, wait_s: float) -> Run:
    """Show progress until the run's items are published, or the wait is over."""
    ends_s = time.monotonic() + wait_s
    moved_s, last = time.monotonic(), run
    while run.state not in FINAL_STATES and time.monotonic() < ends_s:
        if (run.items_pending, run.photos_pending) != (last.items_pending, last.photos_pending):
            moved_s, last = time.monotonic(), run
        is_quiet = time.monotonic() - moved_s > QUIET_S
        hint = "  (nothing moves: is `penstock up` running?)" if is_quiet else ""
        terminal.progress(_progress_line(run) + hint)
        await asyncio.sleep(WATCH_EVERY_S)
        run = await fetch.run(run.run)
    return run


def _finish(terminal: Terminal, run: Run, *, may_be_unfinished: bool) -> None:
    """Show the run; held and unfinished ones end with their exit codes."""
    terminal.show(run, describe_run(run))
    if run.state is RunState.HELD:
        raise RunHeld(
            f"run {run.run} is held ({run.reason}): look at the file, then"
            f" `penstock fetch catalogue confirm {run.run}` or run a better one"
        )
    if run.state not in FINAL_STATES and not may_be_unfinished:
        raise RunUnfinished(
            f"run {run.run} is applied and {run.items_pending} items wait for their photos: see"
            f" `penstock fetch run show {run.run}`, and that `penstock up` is running"
        )


def _progress_line(run: Run) -> str:
    decided = run.photos - run.photos_pending
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in run.photos_by_outcome.items())
    return f"run {run.run}: photos {decided}/{run.photos}, items waiting {run.items_pending}; {outcomes}"


def describe_run(run: Run) -> str:
    """The counts of a run as a few lines of text."""
    rows = f"{run.new} new, {run.changed} changed, {run.unchanged} unchanged, {run.invalid} invalid"
    lines = [
        f"run {run.run} of {run.customer}: {run.state}"
        + (f" ({run.reason})" if run.reason else ""),
        f"  {run.rows} rows of {run.format}: {rows}; {run.gone} gone",
        f"  {run.photos} photos, {run.photos_pending} "
        + ("would be asked" if run.state is RunState.DRY else "waiting"),
    ]
    lines += [f"    {count:>8} {outcome}" for outcome, count in run.photos_by_outcome.items()]
    if run.problems:
        lines.append(
            f"  {run.problems} problems in rows: `penstock fetch catalogue errors {run.run}`"
        )
    bad = sum(count for outcome, count in run.photos_by_outcome.items() if is_bad(outcome))
    if bad:
        lines.append(
            f"  {bad} photos failed or were refused: `penstock fetch catalogue errors {run.run}`"
        )
    return "\n".join(lines)


def _customer_line(found: Customer) -> str:
    return (
        f"{found.customer}: {found.starts_max} requests in {found.window_s:g} s,"
        f" {found.connections} connections"
    )


def _describe_photo(found: PhotoReport) -> str:
    lines = [f"{found.outcome}: {found.text}", f"  took {found.took_s:.3f} s"]
    lines += [f"  asked {hop}" for hop in found.hops]
    lines += [f"  sha256 {found.sha256}"] if found.sha256 else []
    return "\n".join(lines)


def _describe_url(found: UrlReport) -> str:
    lines = [found.judgement, *(_link_line(link, is_allowed=found.allowed) for link in found.links)]
    return "\n".join(lines if found.links else [*lines, "  no run has asked it"])


def _link_line(link: Link, *, is_allowed: bool) -> str:
    """What a customer's last try gave, and whether there will be another."""
    if link.sha256:
        ahead = "; a good copy is stored"
    elif is_allowed:
        ahead = "; the next run whose catalogue has it asks again"
    else:
        ahead = "; not asked while it is refused as above"
    return (
        f"  {link.customer}: {link.outcome} ({link.text}), run {link.run} at"
        f" {link.checked_at:%Y-%m-%d %H:%M:%S}, {link.failures} failures{ahead}"
    )


COMMANDS: Final[list[click.Command]] = [fetch]
