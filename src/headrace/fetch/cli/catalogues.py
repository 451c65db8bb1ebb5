"""Commands of catalogues and runs, and waiting for a run."""

from __future__ import annotations

import asyncio
import shlex
import time
from pathlib import Path
from typing import Any, Final

import click

from headrace.fetch.cli.text import (
    describe_change,
    describe_run,
    describe_source,
    progress_line,
    progress_share,
    runs_table,
    sources_table,
)
from headrace.fetch.errors import InvalidSource, RunHeld, RunRefused, RunUnfinished
from headrace.fetch.i18n import DEFAULT
from headrace.fetch.model import (
    FINAL_STATES,
    Change,
    PhotoProblem,
    RowProblem,
    Run,
    RunState,
)
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.terminal import (
    CommandGroup,
    Terminal,
    cursor_after,
    listing,
    pluralize,
    writing,
)

_URLS: Final = ("http://", "https://")
WATCH_EVERY_S: Final = 0.5
QUIET_S: Final = 15.0


@click.group("catalogue", cls=CommandGroup)
def catalogue_group() -> None:
    """Catalogue files and their runs."""


_supplemental_option: Final = click.option(
    "--supplemental",
    "is_supplemental",
    is_flag=True,
    help="FILE only overrides price and stock of items, by their id (a supplemental feed).",
)


def _reading_options(command: Any) -> Any:
    """Add the options that determine how a file is read."""
    for option in (
        click.option(
            "--mapping", help="Name of a mapping of its column names; see `fetch mapping`."
        ),
        click.option("--format", "format_name", help="Its format; default: detected."),
        click.option("--customer", required=True, help="Owner of the catalogue."),
    ):
        command = option(command)
    return command


@catalogue_group.command("run", short_help="Read a catalogue file and apply it.")
@click.argument("file")
@_reading_options
@_supplemental_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Change nothing: only report the changes, and download sample photos.",
)
@click.option(
    "--review", is_flag=True, help="Apply nothing until `headrace fetch catalogue confirm RUN`."
)
@click.option("--no-wait", is_flag=True, help="Do not wait for the photos.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
def run_catalogue(terminal: Terminal, /, file: str, **options: Any) -> None:
    """Import FILE as CUSTOMER's complete catalogue; items that it lacks are removed.

    FILE may be compressed with gzip, or be a URL, which a worker fetches.
    """
    no_wait, wait_s = options.pop("no_wait"), options.pop("wait_s")
    if not file.startswith(_URLS):
        _require_file(file)

    async def run(fetch: Fetch) -> Run:
        found = await _run(fetch, file, **options)
        return found if no_wait else await wait_done(terminal, fetch, found, wait_s)

    finish_run(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)


async def _run(
    fetch: Fetch, file: str, *, customer: str, dry_run: bool, review: bool, **options: Any
) -> Run:
    if file.startswith(_URLS):
        if review:
            raise InvalidSource("--review needs a file, not a URL: download the file first")
        return await fetch.bring_catalogue(customer, file, is_dry_run=dry_run, **options)
    return await fetch.run_catalogue(
        _require_file(file), customer, is_dry_run=dry_run, is_review=review, **options
    )


def _require_file(name: str) -> Path:
    path = Path(name)
    if not path.exists() or path.is_dir():
        raise InvalidSource(
            f"{name[:200]!r} is not a file or an http:// or https:// URL: give the path of the"
            " catalogue"
        )
    return path


@catalogue_group.command("diff", short_help="Show the changes of a file or run.")
@click.argument("what", metavar="FILE|RUN")
@click.option("--customer", help="Owner of FILE.")
@click.option("--format", "format_name", help="Format of FILE; default: detected.")
@click.option("--mapping", help="Name of a mapping of FILE's column names; see `fetch mapping`.")
@_supplemental_option
@click.option("--after", default="", help="Continue after this item.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, PAGE_ROWS_MAX))
def show_diff(terminal: Terminal, /, what: str, **options: Any) -> None:
    """Show the changes that FILE would make to CUSTOMER's items, or that RUN made."""
    after, limit, customer = options.pop("after"), options.pop("limit"), options.pop("customer")
    if not what.isdigit() and customer is None:
        raise InvalidSource("catalogue diff FILE needs --customer: the owner of the catalogue")

    async def ask(fetch: Fetch) -> tuple[Run, list[Change]]:
        if what.isdigit():
            run = await fetch.runs.get(int(what))
        else:
            run = await fetch.run_catalogue(
                _require_file(what), customer, is_dry_run=True, is_sampled=False, **options
            )
        return run, await fetch.runs.changes(run.run, after=after, rows_max=limit)

    run, changes = terminal.run(Fetch, ask)
    cursor = cursor_after(changes, limit, "item")
    lines = [describe_run(run), *(describe_change(change) for change in changes)]
    if cursor is not None:
        last = shlex.quote(f"--after={cursor}")
        lines.append(f"more: `headrace fetch catalogue diff {run.run} {last}`")
    terminal.show(listing(changes, next_cursor=cursor, run=run), "\n".join(lines))


@catalogue_group.command("confirm", short_help="Apply a run that waits for a confirmation.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.option("--no-wait", is_flag=True, help="Do not wait for the photos.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
def confirm_run(terminal: Terminal, run_id: int, *, no_wait: bool, wait_s: float) -> None:
    """Apply RUN, which is held for a confirmation.

    A run is held if it was uploaded for review, or if its file looks truncated or wrong.
    """

    async def run(fetch: Fetch) -> Run:
        found = await fetch.runs.confirm(run_id)
        return found if no_wait else await wait_done(terminal, fetch, found, wait_s)

    finish_run(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)


@catalogue_group.command("discard", short_help="Discard a run that waits for a confirmation.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
def discard_run(terminal: Terminal, run_id: int) -> None:
    """Discard RUN, which is held for a confirmation; nothing of it is applied."""
    found = terminal.run(Fetch, lambda fetch: fetch.runs.discard(run_id))
    terminal.show(found, describe_run(found))


@catalogue_group.command("add", short_help="Fetch a catalogue from a URL on a schedule.")
@click.argument("url")
@_reading_options
@click.option("--cron", required=True, help="When, such as '0 * * * *' for every hour.")
@click.option("--tz", default="UTC", show_default=True, help="Time zone such as Europe/Moscow.")
def add_source(terminal: Terminal, /, url: str, customer: str, **options: Any) -> None:
    """Fetch CUSTOMER's catalogue from URL on a schedule; replaces its former URL and schedule."""
    found = terminal.run(Fetch, lambda fetch: fetch.sources.set(customer, url=url, **options))
    terminal.show(found, describe_source(found))


@catalogue_group.command("bring", short_help="Fetch a customer's catalogue now.")
@click.argument("customer")
def bring_source(terminal: Terminal, customer: str) -> None:
    """Fetch CUSTOMER's catalogue from its URL now, in addition to its schedule."""
    job = terminal.run(Fetch, lambda fetch: fetch.sources.bring(customer))
    terminal.show({"customer": customer, "job": job}, f"job {job} fetches it")


@catalogue_group.command("rm", short_help="Stop fetching a customer's catalogue.")
@click.argument("customer")
def remove_source(terminal: Terminal, customer: str) -> None:
    """Stop fetching CUSTOMER's catalogue; its items stay."""
    terminal.run(Fetch, lambda fetch: fetch.sources.remove(customer))
    terminal.show({"removed": customer}, f"the source of {customer} is removed; its items stay")


@catalogue_group.command("ls", short_help="List sources: the URLs that are read on a schedule.")
@click.option("--customer", help="Only this customer's.")
def list_catalogues(terminal: Terminal, customer: str | None) -> None:
    """List the catalogues that are fetched on a schedule, each with its URL and last result."""
    every = terminal.run(Fetch, lambda fetch: fetch.sources.all())
    found = [source for source in every if customer in (None, source.customer)]
    text = sources_table(found) if found else "no sources; `headrace fetch run ls` lists runs"
    terminal.show(listing(found), text)


@click.group("run", cls=CommandGroup)
def run_group() -> None:
    """Imports of catalogues (runs), from a file, a URL or the API."""


@run_group.command("ls", short_help="List runs.")
@click.option("--customer", help="Only this customer's.")
def list_runs(terminal: Terminal, customer: str | None) -> None:
    """List the newest imports of catalogues (runs) with their states."""
    found = terminal.run(Fetch, lambda fetch: fetch.runs.newest(customer))
    terminal.show(listing(found), runs_table(found) if found else "no runs")


@run_group.command("show", short_help="Show a run.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
def show_run(terminal: Terminal, run_id: int) -> None:
    """Show state and counts of RUN: its rows, items and photos."""
    found = terminal.run(Fetch, lambda fetch: fetch.runs.get(run_id))
    terminal.show(found, describe_run(found))


@run_group.command("undo", short_help="Undo an applied run.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.option("--no-wait", is_flag=True, help="Do not wait for the results.")
@click.option(
    "--wait", "wait_s", default=3600.0, show_default=True, help="Longest wait, in seconds."
)
def undo_run(terminal: Terminal, run_id: int, *, no_wait: bool, wait_s: float) -> None:
    """Restore the customer's items to their state before RUN, an applied catalogue.

    Items that RUN added are unpublished; items that it changed or removed are published as before.
    Items uploaded since stay. Undo the newest catalogue first; the last 5 can be undone. A run that
    changed no items cannot be undone.
    """

    async def run(fetch: Fetch) -> Run:
        found = await fetch.runs.undo(run_id)
        return found if no_wait else await wait_done(terminal, fetch, found, wait_s)

    finish_run(terminal, terminal.run(Fetch, run), may_be_unfinished=no_wait)


@catalogue_group.command("errors", short_help="List the problems of a run's rows and photos.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.option("--lang", default=DEFAULT, show_default=True, help="Language of the messages.")
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all problems to this CSV file.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write an HTML page to this file.",
)
def list_errors(
    terminal: Terminal, run_id: int, *, lang: str, csv_file: Path | None, html_file: Path | None
) -> None:
    """List the problems of RUN's rows and the photos that failed or were refused.

    At most the first 1,000 of each; the CSV has all.
    """
    if csv_file is not None:
        count = terminal.run(Fetch, lambda fetch: _write_csv(fetch, run_id, lang, file=csv_file))
        terminal.show({"file": str(csv_file), "size_bytes": count}, f"{csv_file}: {count:,} bytes")
    if html_file is not None:
        page = terminal.run(Fetch, lambda fetch: fetch.reports.page(run_id, lang=lang))
        with writing(html_file):
            html_file.write_text(page, encoding="utf-8")
        terminal.show({"file": str(html_file)}, f"{html_file}: {len(page):,} characters")
    if csv_file is None and html_file is None:
        _show_errors(terminal, run_id, lang)


def _show_errors(terminal: Terminal, run_id: int, lang: str) -> None:
    async def ask(fetch: Fetch) -> tuple[str, list[RowProblem], list[PhotoProblem]]:
        reason = await fetch.reports.reason(run_id, lang=lang)
        problems = await fetch.reports.problems(run_id, lang=lang)
        photos = await fetch.reports.photo_problems(run_id, lang=lang)
        return reason, [problem for _, problem in problems], [photo for _, photo in photos]

    reason, problems, photos = terminal.run(Fetch, ask)
    lines = [f"file: {reason}"] if reason else []
    lines += [
        f"row {p.row} (line {p.line}) {p.item or '-'}: {p.field}: {p.text} [{p.code}]"
        for p in problems
    ]
    lines += [f"photo of {p.item}: {p.url}: {p.text} [{p.outcome}]" for p in photos]
    found = listing(problems, photos=photos, file=reason)
    terminal.show(found, "\n".join(lines) or f"run {run_id}: no problems")


async def _write_csv(fetch: Fetch, run_id: int, lang: str, *, file: Path) -> int:
    """Write the report page by page; return the number of bytes."""
    await fetch.runs.get(run_id)
    with writing(file), file.open("wb") as out:
        async for part in fetch.reports.csv(run_id, lang=lang):
            out.write(part.encode())
        return out.tell()


async def wait_done(terminal: Terminal, fetch: Fetch, run: Run, wait_s: float) -> Run:
    """Show progress until the run's items are published or the wait limit is reached."""
    ends_s = time.monotonic() + wait_s
    moved_s, last = time.monotonic(), run
    while run.state not in FINAL_STATES and time.monotonic() < ends_s:
        if (run.items_pending, run.photos_pending) != (last.items_pending, last.photos_pending):
            moved_s, last = time.monotonic(), run
        is_quiet = time.monotonic() - moved_s > QUIET_S
        hint = "  (no progress: is `headrace up` running?)" if is_quiet else ""
        terminal.progress(progress_line(run) + hint, *progress_share(run))
        await asyncio.sleep(WATCH_EVERY_S)
        run = await fetch.runs.get(run.run)
    return run


def finish_run(terminal: Terminal, run: Run, *, may_be_unfinished: bool) -> None:
    """Show the run; a held, refused or unfinished one ends with its exit code."""
    terminal.show(run, describe_run(run))
    if run.state is RunState.HELD and not (run.reason or "").startswith("review:"):
        raise RunHeld(
            f"run {run.run} is held ({run.reason}): check the file, then"
            f" `headrace fetch catalogue confirm {run.run}` or run a correct one"
        )
    if run.state is RunState.REFUSED:
        raise RunRefused(f"run {run.run} is refused ({run.reason}): correct the file or its URL")
    if run.state not in FINAL_STATES and not may_be_unfinished:
        ahead = "for their photos" if run.photos_pending else "to be published"
        raise RunUnfinished(
            f"run {run.run} is applied and"
            f" {pluralize(run.items_pending, 'item waits', 'items wait')} {ahead}: see"
            f" `headrace fetch run show {run.run}` and check that `headrace up` is running"
        )
