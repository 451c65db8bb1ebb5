"""The command `headrace`: global options, the commands of the house and of its rooms, exit codes.

`--json`, `--config` and `--data` may stand anywhere before a lone `--`, since nobody remembers which side
of the verb a global option goes. click was chosen for its help pages and its shell completion.
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
from headrace.cli.house import App
from headrace.cli.terminal import CommandLine
from headrace.kernel.errors import ExtraMissing, Forbidden, HeadraceError, InvalidInput, installing

ROOMS: Final = {
    "headrace.cli.init": "uvloop",
    "headrace.cli.up": "uvloop",
    "headrace.cli.roles": "uvloop",
    "headrace.cli.upkeep": "uvloop",
    "headrace.cli.console": "litestar",
    "headrace.jobs.cli": "asyncpg",
    "headrace.views.cli": "asyncpg",
    "headrace.feed.cli": "asyncpg",
    "headrace.fetch.cli": "pycurl",
    "headrace.media.cli": "asyncpg",
    "headrace.web.cli": "litestar",
}
"""Modules with `COMMANDS`, and the library that tells whether the room's extra is installed."""

NAMES: Final = {
    "headrace.cli.init": ("init",),
    "headrace.cli.up": ("up",),
    "headrace.cli.roles": ("api", "agent", "work", "zygote", "scheduler", "flusher", "media"),
    "headrace.cli.upkeep": ("migrate", "config", "doctor", "blobs"),
    "headrace.cli.console": ("console",),
    "headrace.jobs.cli": ("jobs", "queues", "lanes", "crons", "fleet"),
    "headrace.views.cli": ("views",),
    "headrace.feed.cli": ("feed",),
    "headrace.fetch.cli": ("fetch",),
    "headrace.media.cli": ("media",),
    "headrace.web.cli": ("tokens", "audit"),
}
"""The commands of each, so that a line imports its own alone: half the time until a role begins."""


class OptionWithoutValue(InvalidInput):
    """A global option stands last on the line, without its value."""

    code = "cli.option_without_value"


class FileRefused(Forbidden):
    """This user may not read or write a file or folder that the command needs."""

    code = "cli.file_refused"


def run(
    arguments: Sequence[str], *, make_app: Callable[[str | None], App], packages: tuple[str, ...]
) -> int:
    """Run one command line; returns the exit code."""
    line = CommandLine(make_app, packages)
    try:
        words = take_global_options(arguments, line)
        # Outside its standalone mode click returns the code of a command's own Exit.
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
    """The path that was refused, to whom, and what to do."""
    return FileRefused(
        f"{error.filename}: permission denied to uid {os.geteuid()}: run as the user whom it belongs to,"
        " or give this user the right"
    )


def take_global_options(arguments: Sequence[str], line: CommandLine) -> list[str]:
    """Note `--json`, `--config FILE` and `--data FOLDER` in `line`; return the other words.

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
    """The command tree of the rooms that are installed; of the modules that have command `word`, where some have."""
    group = click.Group(
        "headrace",
        help=(
            "The high-load backbone of a content platform: jobs, fetch, views, feed, media.\n\n"
            "Anywhere on the line: --json prints one JSON document; --config FILE reads another file"
            " than headrace.toml; --data FOLDER uses another data folder."
        ),
        epilog=(
            "Exit codes: 0 done, 1 a fault of ours, 2 wrong input, 3 not allowed, 4 not found, 5 in"
            " conflict with the present state, 6 over a limit, 7 something needed is down, 8 stored"
            " data is corrupt, 130 interrupted."
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
    """A command that takes any words and says which extra it needs."""

    def tell(**_: object) -> None:
        raise ExtraMissing(room)

    return click.Command(
        noun,
        callback=tell,
        params=[click.Argument(["words"], nargs=-1)],
        help=f"Not installed: {installing(room)}.",
        context_settings={"ignore_unknown_options": True},
    )


def add_command(group: click.Group, command: click.Command) -> None:
    """Add `command`, or its verbs where the noun is there already (a room's and a role's)."""
    present = group.commands.get(command.name or "")
    if isinstance(present, click.Group) and isinstance(command, click.Group):
        for verb in command.commands.values():
            present.add_command(verb)
    else:
        group.add_command(command)
