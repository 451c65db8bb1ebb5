"""The `headrace` command: global options, command lookup, exit codes.

`--json`, `--config` and `--data` may appear anywhere before a lone `--`.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Final

import click

from headrace.cli.app_context import (
    App,
    CommandLine,
    discard_output,
    hiding_file,
    module_hidden,
)
from headrace.cli.examples import EXAMPLES, add_examples
from headrace.cli.root import Root, suggestion, unknown_command
from headrace.kernel.errors import (
    Forbidden,
    HeadraceError,
    InvalidInput,
    did_you_mean,
    installing,
    needing,
)

ROOMS: Final = {
    "headrace.cli.up": "uvloop",
    "headrace.cli.roles": "uvloop",
    "headrace.cli.setup": "uvloop",
    "headrace.cli.capacity": "click",
    "headrace.cli.demo": "click",
    "headrace.cli.backup": "uvloop",
    "headrace.cli.console": "litestar",
    "headrace.cli.completion": "click",
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
    "headrace.cli.completion": ("completion",),
    "headrace.jobs.cli": ("jobs", "workflows", "queues", "lanes", "crons", "fleet"),
    "headrace.views.cli": ("views",),
    "headrace.feed.cli": ("feed",),
    "headrace.fetch.cli": ("fetch",),
    "headrace.media.cli": ("media",),
    "headrace.web.cli": ("tokens", "audit", "history"),
}
"""Commands of each module, so a command line imports only the module that it needs."""

GLOBAL_OPTIONS: Final = ("--json", "--config", "--data")


class OptionWithoutValue(InvalidInput):
    """A global option has no value."""

    code = "cli.option_without_value"


class WrongUsage(InvalidInput):
    """The arguments do not fit the command."""

    code = "cli.usage"


class FileRefused(Forbidden):
    """The user lacks permission for a file or folder that the command needs."""

    code = "cli.file_refused"


class FileUnusable(InvalidInput):
    """A file or folder that the command needs cannot be used."""

    code = "cli.file_unusable"


class Interrupted(HeadraceError):
    """Ctrl-C ended the command."""

    code, exit_code = "cli.interrupted", 130


class InternalError(HeadraceError):
    """An error that Headrace does not expect; its traceback is printed above it."""

    code = "cli.internal_error"


FILE_FIXES: Final = {
    errno.EROFS: "choose a folder on a disk that can be written, or mount it so",
    errno.ENOSPC: "free space on its disk, or choose another folder",
    errno.EDQUOT: "free space, or ask for a larger quota",
    errno.EISDIR: "give the path of a file",
    errno.ENOTDIR: "a part of the path is a file: give another path",
    errno.ENOENT: "create it, or correct the path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
}


def run(
    arguments: Sequence[str], *, make_app: Callable[[str | None], App], packages: tuple[str, ...]
) -> int:
    """Run one command line; return the exit code."""
    line = CommandLine(make_app, packages)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A locale that lacks a character must not stop a command.
            stream.reconfigure(errors="backslashreplace")
    try:
        words = take_global_options(arguments, line)
        require_command(words)
        # Outside standalone mode, click returns the exit code instead of raising.
        ended = Root(commands_of).main(words, prog_name="headrace", standalone_mode=False, obj=line)
        sys.stdout.flush()
        return ended if isinstance(ended, int) else 0
    except BrokenPipeError:
        discard_output()
        return 0
    except (click.Abort, KeyboardInterrupt):
        return line.show_error(Interrupted("interrupted"))
    except Exception as error:  # noqa: BLE001 - the last handler of the process
        if isinstance(error, click.exceptions.NoArgsIsHelpError) and not line.is_json:
            print(error.ctx.get_help(), file=sys.stderr)
        return line.show_error(error_of(error))
    finally:
        line.close()


def error_of(error: Exception) -> HeadraceError:
    """The error to show for any exception of a command."""
    if isinstance(error, HeadraceError):
        return error
    if isinstance(error, click.NoSuchCommand) and error.ctx is not None:
        path = error.ctx.command_path.split()[1:]
        return unknown_command([*path, error.command_name])
    if isinstance(error, click.ClickException):
        return wrong_usage(error)
    if isinstance(error, PermissionError) and error.filename is not None:
        return file_refused(error)
    if isinstance(error, OSError) and error.errno in FILE_FIXES:
        what = f"{error.filename}: " if error.filename is not None else ""
        return FileUnusable(f"{what}{error.strerror}: {FILE_FIXES[error.errno]}")
    return unexpected(error)


def unexpected(error: Exception) -> HeadraceError:
    """The error for an exception without a text of its own."""
    if file := hiding_file(error):
        return module_hidden(file)
    traceback.print_exception(error)
    return InternalError(
        f"{type(error).__name__}: {error}: this is a fault of Headrace: report it with the lines"
        " above"
    )


def wrong_usage(error: click.ClickException) -> WrongUsage:
    """The error for arguments that do not fit, with the place of their help."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "headrace"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return WrongUsage(f"`{path}` needs the name of a command: see `{path} --help`")
    if isinstance(error, click.NoSuchOption) and error.option_name in ("-v", "-V"):
        return WrongUsage(
            f"no such option {error.option_name}: for the version run `headrace --version`"
        )
    # click lists choices on lines of their own.
    text = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption) and not error.possibilities:
        text += did_you_mean(error.option_name, GLOBAL_OPTIONS)
    example = EXAMPLES.get(" ".join(path.split()[1:]))
    shown = f" (example: {path} {example})" if example else ""
    return WrongUsage(f"{text}: see `{path} --help`{shown}")


def require_command(words: Sequence[str]) -> None:
    """Raise UnknownCommand if the first word is not a command, without importing the rooms."""
    if words and not words[0].startswith("-") and all(words[0] not in n for n in NAMES.values()):
        is_path = len(words) > 1 and suggestion(words)
        raise unknown_command(words[:3] if is_path else words[:1])


def file_refused(error: PermissionError) -> FileRefused:
    """The error for a path without permission."""
    return FileRefused(
        f"{error.filename}: permission denied for uid {os.geteuid()}: run as its owner or grant"
        " access"
    )


def take_global_options(arguments: Sequence[str], line: CommandLine) -> list[str]:
    """Store `--json`, `--config FILE` and `--data FOLDER` in `line`; return the other words.

    Raises: OptionWithoutValue, WrongUsage.
    """
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    kept: list[str] = []
    heads = iter(words[:end])
    for word in heads:
        name, equals, value = word.partition("=")
        if name == "--json":
            if equals:
                raise WrongUsage(f"{word}: --json takes no value: write --json")
            line.is_json = True
        elif name in GLOBAL_OPTIONS:
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


def build_group(word: str | None = None) -> Root:
    """Command tree of the modules that provide command `word`; of all modules if none does."""
    group = Root(commands_of)
    is_known = any(word in names for names in NAMES.values())
    for name in [word or ""] if is_known else [n for names in NAMES.values() for n in names]:
        group.get_command(click.Context(group), name)
    return group


def commands_of(word: str) -> Iterator[click.Command]:
    """The commands of the modules that provide `word`, with examples."""
    for module, names in NAMES.items():
        if word not in names:
            continue
        if find_spec(ROOMS[module]) is not None:
            for command in importlib.import_module(module).COMMANDS:
                add_examples(command, command.name)
                yield command
        else:
            for name in names:
                yield command_of_missing(name, module.split(".")[1])


def command_of_missing(noun: str, room: str) -> click.Command:
    """A placeholder command that raises ExtraMissing."""

    def fail(**_: object) -> None:
        raise needing(f"headrace {noun}", room)

    return click.Command(
        noun,
        callback=fail,
        params=[click.Argument(["words"], nargs=-1)],
        help=f"Not installed: {installing(room)}.",
        context_settings={"ignore_unknown_options": True},
    )
