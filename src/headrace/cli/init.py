"""`headrace init`: write a commented `headrace.toml` and a starter application.

The configuration is generated from the declared settings, so it lists every setting with its
default. The starters are package files, `starters/KIND/NAME.txt`, and are copied unchanged. The
suffix keeps linters from treating them as code of this project.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import click

from headrace.cli.app_context import CommandLine
from headrace.kernel.config import SettingRow, setting_rows
from headrace.kernel.errors import Conflict

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
    texts = starter(kind)
    present = [folder / name for name in (CONFIG_NAME, *texts) if (folder / name).exists()]
    if present:
        raise FileExists(present)
    sections = {name: type(section) for name, section in line.app().config.sections.items()}
    texts[CONFIG_NAME] = commented_config(sections)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    steps = [] if folder == Path() else [f"cd {folder}"]
    steps += NEXT_STEPS[kind].splitlines()
    lines = "\n".join(f"  {step}" for step in steps)
    names = sorted(texts)
    answer = {"folder": str(folder.absolute()), "files": names, "next": steps}
    line.show(answer, f"created {', '.join(names)}; next steps:\n{lines}")


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


COMMANDS: Final[list[Any]] = [init]
