"""Maintenance commands: `migrate`, `config show`, `doctor`, `blobs adopt`."""

from __future__ import annotations

from typing import Any, Final

import click

from headrace.cli.app_context import App, CommandLine
from headrace.cli.doctor import check_up
from headrace.engines.endpoints import masked_text, masked_url
from headrace.engines.migrate import apply_migrations, plan_migrations
from headrace.kernel.config import setting_rows
from headrace.kernel.errors import InvalidInput
from headrace.kernel.terminal import table


@click.command("migrate", short_help="Upgrade the database to this version's schema.")
@click.option("--plan", is_flag=True, help="Only list missing migrations.")
@click.option("--check", is_flag=True, help="Only check; exit with code 5 if any is missing.")
@click.option(
    "--phase",
    type=click.Choice(["pre", "post", "all"]),
    default="all",
    help="pre: safe while old code runs; post: after old code has stopped.",
)
@click.pass_obj
def migrate(line: CommandLine, *, plan: bool, check: bool, phase: str) -> None:
    """Apply missing migrations, each in one transaction, under a lock."""
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
    """Effective settings."""


@config.command("show")
@click.argument("application", metavar="[MODULE:APP]", required=False)
@click.pass_obj
def show_config(line: CommandLine, application: str | None) -> None:
    """Print every setting with its value and source. Secrets and passwords are masked."""
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
    line.show(shown, table(("setting", "value", "source", "description"), rows))


@click.command("doctor", short_help="Check engines, settings, clock, disk and limits.")
@click.pass_obj
def doctor(line: CommandLine) -> None:
    """Check engines, settings and machine, and print a fix for each problem.

    Exits with code 7 if a check failed, with 0 if there are only warnings.
    """
    findings = line.run_app(lambda app: check_up(app, line.packages), checked=False)
    marks = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.state]}  {finding.subject}: {finding.text}")
        if finding.fix:
            lines.append(f"      fix: {finding.fix}")
    line.show(findings, "\n".join(lines))
    if any(finding.state == "fail" for finding in findings):
        raise click.exceptions.Exit(7)


@click.group("blobs")
def blobs() -> None:
    """Object store."""


@blobs.command("adopt", short_help="Accept the object store folder as it is now.")
@click.pass_obj
def adopt_blobs(line: CommandLine) -> None:
    """Accept the object store folder as it is now, even if it is new, empty or from a backup.

    After its first use, Headrace treats a missing or different folder as an unmounted disk and
    refuses it. This command creates the folder and its marker if they are missing. Objects are not
    changed.
    """

    async def work(app: App) -> tuple[str, str]:
        mark = await app.blobs.adopt()
        if mark is None:
            raise NoFolder("blobs.url is not a folder, and only folders can be adopted")
        return str(app.blobs.folder), mark

    folder, mark = line.run_app(work, checked=False)
    line.show(
        {"folder": folder, "store": mark}, f"accepted {folder} as the object store (marker {mark})"
    )


class NoFolder(InvalidInput):
    """`blobs adopt` requires a folder, but objects are in a bucket."""

    code = "cli.no_folder"


COMMANDS: Final[list[Any]] = [migrate, config, doctor, blobs]
