"""The `headrace` command: global options, command lookup, exit codes.

`--json`, `--config` and `--data` may appear anywhere before a lone `--`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

import click

import headrace
from headrace.cli.app_context import App, CommandLine
from headrace.kernel.errors import ExtraMissing, Forbidden, HeadraceError, InvalidInput, installing

ROOMS: Final = {
    "headrace.cli.up": "uvloop",
    "headrace.cli.roles": "uvloop",
    "headrace.cli.setup": "uvloop",
    "headrace.cli.capacity": "click",
    "headrace.cli.demo": "click",
    "headrace.cli.backup": "uvloop",
    "headrace.cli.console": "litestar",
    "headrace.jobs.cli": "asyncpg",
    "headrace.views.cli": "asyncpg",
    "headrace.feed.cli": "asyncpg",
    "headrace.fetch.cli": "pycurl",
    "headrace.media.cli": "asyncpg",
    "headrace.web.cli": "litestar",
}
"""Modules with `COMMANDS`, and a library that shows whether their extra is installed."""

NAMES: Final = {
    "headrace.cli.up": ("up",),
    "headrace.cli.roles": ("api", "agent", "work", "zygote", "scheduler", "flusher", "media"),
    "headrace.cli.setup": ("init", "migrate", "config", "doctor", "blobs"),
    "headrace.cli.capacity": ("size",),
    "headrace.cli.demo": ("demo",),
    "headrace.cli.backup": ("backup", "restore", "standby", "promote"),
    "headrace.cli.console": ("console",),
    "headrace.jobs.cli": ("jobs", "workflows", "queues", "lanes", "crons", "fleet"),
    "headrace.views.cli": ("views",),
    "headrace.feed.cli": ("feed",),
    "headrace.fetch.cli": ("fetch",),
    "headrace.media.cli": ("media",),
    "headrace.web.cli": ("tokens", "audit", "history"),
}
"""Commands of each module, so a command line imports only the module that it needs."""


class OptionWithoutValue(InvalidInput):
    """A global option has no value."""

    code = "cli.option_without_value"


class FileRefused(Forbidden):
    """The user lacks permission for a file or folder that the command needs."""

    code = "cli.file_refused"


def run(
    arguments: Sequence[str], *, make_app: Callable[[str | None], App], packages: tuple[str, ...]
) -> int:
    """Run one command line; return the exit code."""
    line = CommandLine(make_app, packages)
    try:
        words = take_global_options(arguments, line)
        # Outside standalone mode, click returns the exit code instead of raising.
        group = build_group(words[0] if words else None)
        ended = group.main(words, prog_name="headrace", standalone_mode=False, obj=line)
        return ended if isinstance(ended, int) else 0
    except HeadraceError as error:
        return line.show_error(error)
    except PermissionError as error:
        if error.filename is None:
            raise
        return line.show_error(file_refused(error))
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        print("headrace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def file_refused(error: PermissionError) -> FileRefused:
    """The error for a path without permission."""
    return FileRefused(
        f"{error.filename}: permission denied for uid {os.geteuid()}: run as its owner or grant"
        " access"
    )


def take_global_options(arguments: Sequence[str], line: CommandLine) -> list[str]:
    """Store `--json`, `--config FILE` and `--data FOLDER` in `line`; return the other words.

    Raises: OptionWithoutValue.
    """
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    kept: list[str] = []
    heads = iter(words[:end])
    for word in heads:
        name, equals, value = word.partition("=")
        if name == "--json" and not equals:
            line.is_json = True
        elif name in ("--config", "--data"):
            given = value if equals else next(heads, "")
            if not given:
                raise OptionWithoutValue(f"{name} needs a value, such as {name} path")
            if name == "--config":
                line.config_file = given
            else:
                line.flags["data.folder"] = given
        else:
            kept.append(word)
    return kept + words[end:]


def build_group(word: str | None = None) -> click.Group:
    """Command tree of the modules that provide command `word`; of all modules if none does."""
    group = click.Group(
        "headrace",
        help=(
            "Backend for content platforms: jobs, fetch, views, feed, media.\n\n"
            "Global options, allowed anywhere: --json prints one JSON document; --config FILE"
            " replaces"
            " headrace.toml; --data FOLDER replaces the data folder."
        ),
        epilog=(
            "Exit codes: 0 success, 1 internal error, 2 invalid input, 3 forbidden, 4 not found,"
            " 5 conflict, 6 limit exceeded, 7 dependency unavailable, 8 corrupt data, 130"
            " interrupted."
        ),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    click.version_option(headrace.__version__, message="headrace %(version)s")(group)
    wanted = {module for module, names in NAMES.items() if word in names} or ROOMS.keys()
    for module, library in ROOMS.items():
        if module not in wanted:
            continue
        if find_spec(library) is not None:
            for command in importlib.import_module(module).COMMANDS:
                add_command(group, command)
        else:
            for name in NAMES[module]:
                group.add_command(command_of_missing(name, module.split(".")[1]))
    return group


def command_of_missing(noun: str, room: str) -> click.Command:
    """A placeholder command that raises ExtraMissing."""

    def fail(**_: object) -> None:
        raise ExtraMissing(room)

    return click.Command(
        noun,
        callback=fail,
        params=[click.Argument(["words"], nargs=-1)],
        help=f"Not installed: {installing(room)}.",
        context_settings={"ignore_unknown_options": True},
    )


def add_command(group: click.Group, command: click.Command) -> None:
    """Add `command`; merge its verbs if the group exists, as rooms and roles share nouns."""
    present = group.commands.get(command.name or "")
    if isinstance(present, click.Group) and isinstance(command, click.Group):
        for verb in command.commands.values():
            present.add_command(verb)
    else:
        group.add_command(command)
