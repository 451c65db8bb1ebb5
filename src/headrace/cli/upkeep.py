"""The commands that look after an installation: `migrate`, `config show`, `doctor`, `blobs adopt`."""

from __future__ import annotations

from typing import Any, Final

import click

from headrace.cli.checkup import check_up
from headrace.cli.house import App
from headrace.cli.terminal import CommandLine
from headrace.engines.endpoints import masked_text, masked_url
from headrace.engines.migrate import apply_migrations, plan_migrations
from headrace.kernel.config import setting_rows
from headrace.kernel.errors import InvalidInput
from headrace.kernel.terminal import table


@click.command("migrate", short_help="Bring the database to this version's schema.")
@click.option("--plan", is_flag=True, help="Only list what would be applied.")
@click.option("--check", is_flag=True, help="Only tell, by exit code 5, whether any is missing.")
@click.option(
    "--phase",
    type=click.Choice(["pre", "post", "all"]),
    default="all",
    help="pre: safe beside old code; post: once no old code runs.",
)
@click.pass_obj
def migrate(line: CommandLine, *, plan: bool, check: bool, phase: str) -> None:
    """Apply the migrations that the database lacks, each in one transaction, under lock."""
    phases = ("pre", "post") if phase == "all" else (phase,)

    async def work(app: App) -> list[str]:
        if plan or check:
            missing = await plan_migrations(app.engines.postgres, line.packages)
            return [m.label for m in missing if m.phase in phases]
        done = await apply_migrations(app.engines.postgres, line.packages, phases=phases)
        return [m.label for m in done]

    labels = line.run_app(work, checked=False)
    word = "missing" if plan or check else "applied"
    text = "\n".join(f"{word}: {label}" for label in labels) or "the schema is up to date"
    line.show({word: labels}, text)
    if check and labels:
        raise click.exceptions.Exit(5)


@click.group("config")
def config() -> None:
    """The settings in force."""


@config.command("show")
@click.argument("application", metavar="[MODULE:APP]", required=False)
@click.pass_obj
def show_config(line: CommandLine, application: str | None) -> None:
    """Print every setting with its value and where it came from; secrets and passwords are masked."""
    loaded = line.app(application).config
    shown: list[dict[str, Any]] = []
    for row in setting_rows({name: type(value) for name, value in loaded.sections.items()}):
        key = f"{row.section}.{row.name}"
        value, source = loaded.written[key]
        value = masked_url(value) if row.secret and value else masked_text(value)
        shown.append(
            {"name": key, "value": value, "source": source, "env": row.env, "help": row.help}
        )
    rows = [(s["name"], s["value"], s["source"], s["help"]) for s in shown]
    line.show(shown, table(("setting", "value", "source", "what it is"), rows))


@click.command("doctor", short_help="Check engines, settings, clock, disk and limits.")
@click.pass_obj
def doctor(line: CommandLine) -> None:
    """Check what this installation stands on, and say how to mend what is wrong.

    Exit code 7 when a check failed; warnings alone give 0.
    """
    findings = line.run_app(lambda app: check_up(app, line.packages), checked=False)
    marks = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.state]}  {finding.subject}: {finding.text}")
        if finding.mend:
            lines.append(f"      mend: {finding.mend}")
    line.show(findings, "\n".join(lines))
    if any(finding.state == "fail" for finding in findings):
        raise click.exceptions.Exit(7)


@click.group("blobs")
def blobs() -> None:
    """The object store."""


@blobs.command("adopt", short_help="Begin with the object store's folder as it is now.")
@click.pass_obj
def adopt_blobs(line: CommandLine) -> None:
    """Expect the object store's folder as it is now, also where it is new, empty or of a backup.

    After its first use Headrace makes that folder never again: one that is missing or another is taken for a disk
    that is not mounted. This makes it if it is missing and marks it if it has no mark. No object is changed.
    """

    async def work(app: App) -> tuple[str, str]:
        mark = await app.blobs.adopt()
        if mark is None:
            raise NoFolder(
                "blobs.url names no folder, and a bucket has no mark: there is nothing to adopt"
            )
        return str(app.blobs.folder), mark

    folder, mark = line.run_app(work, checked=False)
    line.show({"folder": folder, "store": mark}, f"{folder} is the object store now: {mark}")


class NoFolder(InvalidInput):
    """`blobs adopt` where objects are kept in a bucket."""

    code = "cli.no_folder"


COMMANDS: Final[list[Any]] = [migrate, config, doctor, blobs]
