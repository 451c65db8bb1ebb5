"""The command `headrace fetch catalogue errors`."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.fetch.i18n import DEFAULT
from headrace.fetch.model import PhotoProblem, RowProblem
from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal


@click.command("errors", short_help="List the problems of a run's rows and photos.")
@click.argument("run_id", type=click.IntRange(min=1), metavar="RUN")
@click.option("--lang", default=DEFAULT, show_default=True, help="Language of the sentences.")
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all of it to this file, for a spreadsheet.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page for a browser to this file.",
)
@click.pass_obj
def list_errors(
    terminal: Terminal, run_id: int, *, lang: str, csv_file: Path | None, html_file: Path | None
) -> None:
    """List the problems of RUN's rows and the photos that failed or were refused.

    At most the first 1,000 of each; the CSV has all.
    """
    if csv_file is not None:
        count = terminal.run(Fetch, lambda fetch: _write_csv(fetch, run_id, lang, file=csv_file))
        terminal.show({"file": str(csv_file), "bytes": count}, f"{csv_file}: {count:,} bytes")
    if html_file is not None:
        page = terminal.run(Fetch, lambda fetch: fetch.reports.page(run_id, lang=lang))
        html_file.write_text(page, encoding="utf-8")
        terminal.show({"file": str(html_file)}, f"{html_file}: {len(page):,} characters")
    if csv_file is None and html_file is None:
        _show_errors(terminal, run_id, lang)


def _show_errors(terminal: Terminal, run_id: int, lang: str) -> None:
    async def ask(fetch: Fetch) -> tuple[str, list[RowProblem], list[PhotoProblem]]:
        reason = await fetch.reports.reason(run_id, lang=lang)
        problems = await fetch.problems(run_id, lang=lang)
        photos = await fetch.photo_problems(run_id, lang=lang)
        return reason, [problem for _, problem in problems], [photo for _, photo in photos]

    reason, problems, photos = terminal.run(Fetch, ask)
    lines = [f"file: {reason}"] if reason else []
    lines += [
        f"row {p.row} (line {p.line}) {p.item or '-'}: {p.field}: {p.text} [{p.code}]"
        for p in problems
    ]
    lines += [f"photo of {p.item}: {p.url}: {p.text} [{p.outcome}]" for p in photos]
    found = {"file": reason, "problems": problems, "photos": photos}
    terminal.show(found, "\n".join(lines) or f"run {run_id}: no problems")


async def _write_csv(fetch: Fetch, run_id: int, lang: str, *, file: Path) -> int:
    """Write the report page by page; how many bytes."""
    await fetch.run(run_id)
    with file.open("wb") as out:
        async for part in fetch.reports.csv(run_id, lang=lang):
            out.write(part.encode())
        return out.tell()
