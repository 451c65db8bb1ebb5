"""Commands `headrace fetch catalogue ...`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Final

import click

from headrace.fetch.cli.reports import list_errors
from headrace.fetch.cli.text import describe_change, describe_run, describe_source, run_line
from headrace.fetch.cli.waiting import finish_run, wait_done
from headrace.fetch.errors import InvalidSource
from headrace.fetch.model import Change, Run, Source
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.terminal import Terminal

_URLS: Final = ("http://", "https://")


@click.group("catalogue")
def catalogue_group() -> None:
    """Catalogue files and their runs."""


def _reading_options(command: Any) -> Any:
    """The options that say how a file is read."""
    for option in (
        click.option("--mapping", help="The mapping that says what its names mean."),
        click.option("--format", "format_name", help="Its format, instead of what it looks like."),
        click.option("--customer", required=True, help="Whose catalogue it is."),
    ):
        command = option(command)
    return command


@catalogue_group.command("run", short_help="Read a catalogue file and apply it.")
@click.argument("file")
@_reading_options
@click.option("--dry-run", is_flag=True, help="Only say what would change, and try some photos.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the photos.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
@click.pass_obj
def run_catalogue(terminal: Terminal, /, file: str, **options: Any) -> None:
    """Read FILE, gzip or not, as CUSTOMER's whole catalogue and apply it; a URL is brought by a worker."""
    no_wait, wait_s = options.pop("no_wait"), options.pop("wait_s")

    async def run(fetch: Fetch) -> Run:
        found = await _run(fetch, file, **options)
        return found if no_wait else await wait_done(terminal, fetch, found, wait_s)

    finish_run(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)


async def _run(fetch: Fetch, file: str, *, customer: str, dry_run: bool, **options: Any) -> Run:
    if file.startswith(_URLS):
        return await fetch.bring_catalogue(customer, file, is_dry_run=dry_run, **options)
    return await fetch.run_catalogue(_require_file(file), customer, is_dry_run=dry_run, **options)


def _require_file(name: str) -> Path:
    path = Path(name)
    if not path.exists() or path.is_dir():
        raise InvalidSource(f"{name[:200]!r} is no file and no URL: give the catalogue's name")
    return path


@catalogue_group.command("diff", short_help="Show what a file would change, or a run changed.")
@click.argument("what", metavar="FILE|RUN")
@click.option("--customer", help="Whose catalogue FILE is.")
@click.option("--format", "format_name", help="FILE's format, instead of what it looks like.")
@click.option("--mapping", help="The mapping that says what FILE's names mean.")
@click.option("--after", default="", help="Go on behind this item.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, PAGE_ROWS_MAX))
@click.pass_obj
def show_diff(terminal: Terminal, /, what: str, **options: Any) -> None:
    """Show what FILE would change of CUSTOMER's items, or what RUN changed, item by item."""
    after, limit, customer = options.pop("after"), options.pop("limit"), options.pop("customer")
    if not what.isdigit() and customer is None:
        raise InvalidSource("catalogue diff FILE needs --customer: whose catalogue it is")

    async def ask(fetch: Fetch) -> tuple[Run, list[Change]]:
        if what.isdigit():
            run = await fetch.run(int(what))
        else:
            run = await fetch.run_catalogue(
                _require_file(what), customer, is_dry_run=True, is_sampled=False, **options
            )
        return run, await fetch.changes(run.run, after=after, rows_max=limit)

    run, changes = terminal.run(Fetch, ask)
    lines = [describe_run(run), *(describe_change(change) for change in changes)]
    if len(changes) == limit:
        last = shlex.quote(f"--after={changes[-1].item}")
        lines.append(f"more: `headrace fetch catalogue diff {run.run} {last}`")
    terminal.show({"run": run, "changes": changes}, "\n".join(lines))


@catalogue_group.command("confirm", short_help="Apply a held run.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.option("--no-wait", is_flag=True, help="Do not wait for the photos.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
@click.pass_obj
def confirm_run(terminal: Terminal, run_id: int, *, no_wait: bool, wait_s: float) -> None:
    """Apply RUN, which was held because its file looks like an accident."""

    async def run(fetch: Fetch) -> Run:
        found = await fetch.confirm_run(run_id)
        return found if no_wait else await wait_done(terminal, fetch, found, wait_s)

    finish_run(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)


@catalogue_group.command("discard", short_help="Do not apply a held run.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.pass_obj
def discard_run(terminal: Terminal, run_id: int) -> None:
    """End RUN, which was held because its file looks like an accident; nothing of it is applied."""
    found = terminal.run(Fetch, lambda fetch: fetch.discard_run(run_id))
    terminal.show(found, describe_run(found))


@catalogue_group.command("add", short_help="Bring a catalogue from a URL on a schedule.")
@click.argument("url")
@_reading_options
@click.option("--cron", required=True, help="When, such as '0 * * * *' for every hour.")
@click.option("--tz", default="UTC", show_default=True, help="Time zone such as Europe/Moscow.")
@click.pass_obj
def add_source(terminal: Terminal, /, url: str, customer: str, **options: Any) -> None:
    """Bring CUSTOMER's catalogue from URL at every moment of CRON; replaces the source there was."""
    found = terminal.run(Fetch, lambda fetch: fetch.sources.set(customer, url=url, **options))
    terminal.show(found, describe_source(found))


@catalogue_group.command("bring", short_help="Bring a customer's catalogue now.")
@click.argument("customer")
@click.pass_obj
def bring_source(terminal: Terminal, customer: str) -> None:
    """Bring the catalogue of CUSTOMER's source now, besides its moments."""
    job = terminal.run(Fetch, lambda fetch: fetch.sources.bring(customer))
    terminal.show({"customer": customer, "job": job}, f"job {job} brings it")


@catalogue_group.command("rm", short_help="Bring a customer's catalogue no more.")
@click.argument("customer")
@click.pass_obj
def remove_source(terminal: Terminal, customer: str) -> None:
    """Bring CUSTOMER's catalogue no more; its items stay."""
    terminal.run(Fetch, lambda fetch: fetch.sources.remove(customer))
    terminal.show({"removed": customer}, f"the source of {customer} is removed; its items stay")


@catalogue_group.command("ls", short_help="List sources and runs.")
@click.option("--customer", help="Only this customer's.")
@click.pass_obj
def list_catalogues(terminal: Terminal, customer: str | None) -> None:
    """List where catalogues are brought from, what came of it last, and the newest runs."""

    async def ask(fetch: Fetch) -> tuple[list[Source], list[Run]]:
        runs = await fetch.runs(customer)
        sources = await fetch.sources.all()
        return [s for s in sources if customer in (None, s.customer)], runs

    sources, runs = terminal.run(Fetch, ask)
    lines = [*(describe_source(source) for source in sources), *map(run_line, runs)]
    terminal.show({"sources": sources, "runs": runs}, "\n".join(lines) or "no sources, no runs")


catalogue_group.add_command(list_errors)
