"""`headrace completion`: complete commands and options in bash, zsh and fish.

The shell calls `headrace` for each completion, so that the names are always those of the installed
version. No site has to run.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from headrace.cli.app_context import CommandLine
from headrace.kernel.errors import InvalidInput
from headrace.kernel.terminal import writing

VARIABLE: Final = "_HEADRACE_COMPLETE"
SHELLS: Final = ("bash", "zsh", "fish")
START_FILES: Final = {"bash": ".bashrc", "zsh": ".zshrc"}
"""Files in which a shell must load the script; fish loads its folder of completions."""


class ShellUnknown(InvalidInput):
    """The shell is not named and cannot be found, or there is no completion for it."""

    code = "cli.shell_unknown"


@click.group("completion")
def completion() -> None:
    """Complete commands with the Tab key."""


@completion.command("install", short_help="Install completion for your shell.")
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_obj
def install(line: CommandLine, shell: str | None) -> None:
    """Write the completion script of SHELL, and load it in the shell's start file.

    SHELL is by default the one of $SHELL. Calling it again replaces the script.
    """
    name = shell or shell_of(os.environ.get("SHELL", ""))
    home = Path.home()
    if name == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        script, start = config / "fish" / "completions" / "headrace.fish", None
    else:
        data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        folder = Path(os.environ.get("ZDOTDIR") or home) if name == "zsh" else home
        script, start = data / "headrace" / f"completion.{name}", folder / START_FILES[name]
    with writing(script):
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(script_of(name))
    if start is not None:
        load_in(start, script)
    document = {"shell": name, "script": str(script), "start_file": str(start) if start else None}
    loads = f", which {start} loads" if start is not None else ""
    line.show(document, f"wrote {script}{loads}: open a new {name} to use it")


@completion.command("show", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_obj
def show(line: CommandLine, shell: str) -> None:
    """Print the completion script of SHELL, such as for a package."""
    text = script_of(shell)
    line.show({"shell": shell, "script": text}, text.rstrip("\n"))


def shell_of(path: str) -> str:
    """The name of the shell at `path`. Raises: ShellUnknown."""
    name = Path(path).name
    if name not in SHELLS:
        raise ShellUnknown(
            f"no completion for the shell {path!r} of $SHELL: name one of {', '.join(SHELLS)}, such"
            " as `headrace completion install bash`"
        )
    return name


def script_of(shell: str) -> str:
    """The completion script of a shell."""
    make = get_completion_class(shell)
    assert make is not None
    script = make(click.Command("headrace"), {}, "headrace", VARIABLE)
    # click's `source` starts bash to check its version; the script is the same.
    text = script.source_template % script.source_vars()
    if shell == "zsh":
        return f"autoload -Uz compinit && (( $+functions[compdef] )) || compinit\n{text}"
    return text


def load_in(start: Path, script: Path) -> None:
    """Add a line to the start file of a shell that loads `script`, unless it has one."""
    quoted = shlex.quote(str(script))
    line = f"[ -f {quoted} ] && . {quoted}  # headrace completion"
    with writing(start):
        text = start.read_text() if start.exists() else ""
        if line not in text.splitlines():
            gap = "" if text.endswith("\n") or not text else "\n"
            with start.open("a") as file:
                file.write(f"{gap}{line}\n")


COMMANDS: Final[list[Any]] = [completion]
