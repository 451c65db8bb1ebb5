"""Commands that set up and check an installation: `init`, `migrate`, `config`, `doctor`, `blobs`.

`headrace init` writes a commented `headrace.toml` and a starter application. The file is generated
from the declared settings, so it lists every setting with its default. The starters are package
files, `starters/KIND/NAME.txt`, and are copied unchanged. The suffix keeps linters from treating
them as code of this project.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import click

from headrace.cli.app_context import App, CommandLine
from headrace.cli.doctor import check_up
from headrace.cli.screen import is_screen
from headrace.engines.endpoints import masked_text, masked_url
from headrace.engines.migrate import apply_migrations, plan_migrations
from headrace.kernel.config import SettingRow, setting_rows
from headrace.kernel.config_schema import config_schema
from headrace.kernel.errors import Conflict, InvalidInput
from headrace.kernel.terminal import listing, table

CONFIG_NAME: Final = "headrace.toml"
HEAD: Final = """\
# Settings of this site. Each is listed with its default; uncomment a line to change it.
# Environment variables override this file, such as HEADRACE_POSTGRES_URL for [postgres] url.
# Write durations as 30s, 10m, 2h, sizes as 64KiB, 25MiB, lists with commas.
# `headrace config show` prints the effective settings.
# Keep secrets out of this file: set HEADRACE_SECRET and URLs with passwords in the environment.
"""
BARE: Final = re.compile(r"[0-9]+|true|false")
COMMENT_WIDTH: Final = 100
NEXT_STEPS: Final = {
    "plain": "headrace up site_app:app        # engines and all roles, until Ctrl-C",
    "fastapi": (
        "pip install fastapi uvicorn\n"
        "headrace up site_app:app        # engines and all roles, until Ctrl-C\n"
        "# then, in a second terminal:\n"
        "uvicorn site_web:web --port 8000\n"
        "curl -X POST 'localhost:8000/users?name=ann'"
    ),
    "django": (
        "pip install django 'psycopg[binary]'\n"
        "headrace up site_app:app        # engines and all roles, until Ctrl-C\n"
        "# then, in a second terminal:\n"
        "python manage.py migrate\n"
        "python manage.py runserver\n"
        "curl -X POST localhost:8000/users/ann"
    ),
}
"""Commands to run after writing each kind of starter."""


class FolderNotWritable(InvalidInput):
    """`headrace init` cannot write into the folder."""

    code = "cli.folder_not_writable"

    def __init__(self, folder: Path, error: OSError) -> None:
        super().__init__(
            f"{folder}: {error.strerror or error}: choose a folder that you can write to"
        )


class FileExists(Conflict):
    """`headrace init` would overwrite a file, so it wrote nothing."""

    code = "cli.file_exists"

    def __init__(self, paths: list[Path]) -> None:
        names = ", ".join(str(path) for path in paths)
        super().__init__(
            f"{names} already exist, so no file was written: use another folder or move them"
        )


@click.command("init", short_help="Write a configuration and a starter application.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@click.option(
    "--for",
    "kind",
    type=click.Choice(sorted(NEXT_STEPS)),
    default="plain",
    show_default=True,
    help="Web framework of the site, or plain for none.",
)
@click.pass_obj
def init(line: CommandLine, folder: Path, *, kind: str) -> None:
    """Write headrace.toml with all settings explained, and a starter application, to FOLDER.

    Existing files are never overwritten.
    """
    require_folder(folder)
    texts = starter(kind)
    present = [folder / name for name in (CONFIG_NAME, *texts) if (folder / name).exists()]
    if present:
        raise FileExists(present)
    sections = {name: type(section) for name, section in line.app().config.sections.items()}
    texts[CONFIG_NAME] = commented_config(sections)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise FolderNotWritable(folder, error) from error
    steps = [] if folder == Path() else [f"cd {folder}"]
    steps += NEXT_STEPS[kind].splitlines()
    lines = "\n".join(f"  {step}" for step in steps)
    names = sorted(texts)
    answer = {"folder": str(folder.absolute()), "files": names, "next": steps}
    line.show(answer, f"created {', '.join(names)}; next steps:\n{lines}")


class FrameworkAsFolder(InvalidInput):
    """The folder for `headrace init` has the name of a framework, or nearly."""

    code = "cli.framework_as_folder"


def require_folder(folder: Path) -> None:
    """Raise FrameworkAsFolder if FOLDER seems to be meant as --for."""
    near = get_close_matches(folder.name, NEXT_STEPS, n=1, cutoff=0.8)
    if near and len(folder.parts) == 1 and not folder.exists():
        raise FrameworkAsFolder(
            f"{str(folder)!r} is read as the folder to create: for a starter with {near[0]}, use"
            f" `headrace init FOLDER --for {near[0]}`; for a folder of this name, create it first"
        )


def starter(kind: str) -> dict[str, str]:
    """Files of a starter: name -> text."""
    folder = files("headrace.cli").joinpath("starters", kind)
    return {
        file.name.removesuffix(".txt"): file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".txt")
    }


def commented_config(sections: Mapping[str, type[Any]]) -> str:
    """A `headrace.toml` with every setting commented out."""
    lines = [HEAD]
    section = ""
    for row in setting_rows(sections):
        if row.section != section:
            section = row.section
            lines.append(f"[{section}]")
        lines += [*_wrapped(row.help), _assignment(row), ""]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, COMMENT_WIDTH, initial_indent="## ", subsequent_indent="## ", break_long_words=False
    )


def _assignment(row: SettingRow) -> str:
    if not row.default:
        return f'# {row.name} = "..."   # not set; in the environment {row.env}'
    value = row.default
    if not BARE.fullmatch(value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"# {row.name} = {value}"


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
    line.show(listing(labels, state=word), text)
    if check and labels:
        raise click.exceptions.Exit(5)


@click.group("config")
def config() -> None:
    """Effective settings, and the schema of their file."""


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
    line.show(listing(shown), table(("setting", "value", "source", "description"), rows))


@config.command("schema")
@click.pass_obj
def show_schema(line: CommandLine) -> None:
    """Print the JSON Schema of `headrace.toml`, to validate the file in editors and CI."""
    sections = {name: type(section) for name, section in line.app().config.sections.items()}
    schema = config_schema(sections)
    line.show(schema, json.dumps(schema, indent=2))


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
    rows = [
        (one.state.upper(), one.subject, one.text + (f"\nfix: {one.fix}" if one.fix else ""))
        for one in findings
    ]
    # Without a terminal a fix has its own line, as a table there has one line per row.
    grid = table(("", "check", "result"), rows) if is_screen(sys.stdout) else "\n".join(lines)
    line.show(listing(findings), grid)
    if any(finding.state == "fail" for finding in findings):
        raise click.exceptions.Exit(7)


@click.group("blobs")
def blobs() -> None:
    """Object store."""


@blobs.command("adopt", short_help="Accept a moved or restored object folder.")
@click.option(
    "--empty",
    "is_empty",
    is_flag=True,
    help="Also accept a folder without objects: every stored object is lost.",
)
@click.pass_obj
def adopt_blobs(line: CommandLine, *, is_empty: bool) -> None:
    """Accept the folder of `blobs.url` as it is now, such as one restored from a backup.

    On first use Headrace writes a marker file into the folder. If the marker is missing or another
    one later, the folder is taken for an unmounted disk, and every host refuses it. This command
    ends that: it writes a missing marker and makes all hosts accept the folder. It changes no
    objects. With --empty it also accepts an empty or missing folder: all former objects are lost.
    """

    async def work(app: App) -> tuple[str, str]:
        mark = await app.blobs.adopt(is_empty=is_empty)
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


COMMANDS: Final[list[Any]] = [init, migrate, config, doctor, blobs]
