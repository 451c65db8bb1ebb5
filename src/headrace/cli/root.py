"""The root of all commands: grouped help, and advice for a name that is not a command.

Neither needs the rooms: a room is imported only for its own commands.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import click
from click.shell_completion import CompletionItem

import headrace
from headrace.cli.examples import EXAMPLES
from headrace.kernel.errors import InvalidInput

SECTIONS: Final = {
    "Start": (
        ("up, init, demo", "Run a site; write a starter; try the demo site."),
        ("doctor, config, size", "Check this machine; show settings; plan machines."),
    ),
    "Rooms": (
        ("jobs, queues, lanes", "Background jobs, and limits per customer or host."),
        ("crons, workflows, fleet", "Recurring jobs; jobs in steps; hosts and alerts."),
        ("fetch", "Catalogues and photos of sellers."),
        ("views", "Views of items: count, read, export."),
        ("feed", "Feeds of followed authors."),
        ("media", "Serve photos and audio; cache nodes and their disks."),
    ),
    "Operate": (
        ("migrate, blobs", "Upgrade the database; accept a moved object folder."),
        ("tokens, console", "API tokens; login link of the console."),
        ("audit, history", "Who did what in the console; statistics by minute."),
        ("backup, restore", "Back up and restore the embedded PostgreSQL."),
        ("standby, promote", "Follow a primary on a second machine; take over."),
        ("completion", "Complete commands in bash, zsh or fish."),
    ),
    "Single processes; `up` runs all but `work`": (
        ("api, agent, scheduler", "HTTP API; workers; crons and the plan of workers."),
        ("flusher, work", "Write views to PostgreSQL; run jobs in one process."),
    ),
}
"""The first page of help: names of commands, and what they do."""
OPTIONS: Final = ("--json", "--config", "--data", "--help", "--version")
SYNONYMS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("list", "all", "index"), ("ls", "show")),
    **dict.fromkeys(("get", "info", "describe", "status", "view", "cat"), ("show", "get", "info")),
    **dict.fromkeys(("delete", "remove", "del", "drop", "destroy"), ("rm", "remove", "revoke")),
    **dict.fromkeys(("create", "new", "insert", "push"), ("add", "create", "set", "put", "send")),
    **dict.fromkeys(("enqueue", "send", "submit", "start"), ("add", "start", "send", "up")),
    **dict.fromkeys(("update", "change", "modify"), ("set", "edit")),
    **dict.fromkeys(("run", "serve", "server", "runserver", "dev"), ("up", "run")),
    **dict.fromkeys(("worker", "workers", "celery"), ("agent", "work")),
    **dict.fromkeys(("stop", "down", "kill"), ("cancel", "pause", "drain")),
    **dict.fromkeys(("check", "health", "ping", "diagnose"), ("doctor", "verify")),
    **dict.fromkeys(("settings", "configuration"), ("config",)),
    **dict.fromkeys(("schedule", "beat", "cron"), ("crons", "scheduler")),
    **dict.fromkeys(("login", "dashboard", "admin", "ui"), ("console",)),
    **dict.fromkeys(("token", "key", "keys", "auth"), ("tokens",)),
    **dict.fromkeys(("upload", "store"), ("put", "send")),
}
"""Names of other tools, with ours in the order of preference."""


class UnknownCommand(InvalidInput):
    """The command line names no command."""

    code = "cli.unknown_command"


class Root(click.Group):
    """The root group. `load` returns the commands of a name; all others are only named."""

    def __init__(self, load: Callable[[str], Iterable[click.Command]]) -> None:
        super().__init__(
            "headrace",
            help="Backend for content platforms: jobs, fetch, views, feed, media.",
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        )
        self._load = load
        self._loaded = set[str]()
        click.version_option(headrace.__version__, message="headrace %(version)s")(self)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command on first use."""
        # The group `media` of the roles is not all of `media`.
        if cmd_name not in self._loaded:
            self._loaded.add(cmd_name)
            for command in self._load(cmd_name):
                add_command(self, command)
        return super().get_command(ctx, cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the first page, on at most 24 lines."""
        formatter.write("Usage: headrace COMMAND [OPTIONS] [--json] [--config FILE] [--data DIR]\n")
        formatter.write(f"{self.help}\n")
        width = max(len(names) for rows in SECTIONS.values() for names, _ in rows)
        for title, rows in SECTIONS.items():
            formatter.write(f"{title}\n")
            for names, text in rows:
                formatter.write(f"  {names:<{width}}  {text}\n")
        formatter.write("Example: headrace up shop:app, then: headrace queues ls --json\n")
        formatter.write(
            "`headrace COMMAND --help` explains a command. Exit codes: docs/scripting.md\n"
        )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Names of commands, without an import of their modules."""
        found = {
            name: text
            for rows in SECTIONS.values()
            for names, text in rows
            for name in names.split(", ")
        }
        found |= dict.fromkeys(OPTIONS, "")
        return [
            CompletionItem(name, help=text or None)
            for name, text in sorted(found.items())
            if name.startswith(incomplete) and name.startswith("-") == incomplete.startswith("-")
        ]


def add_command(group: click.Group, command: click.Command) -> None:
    """Add `command`; merge its verbs if the group exists, as rooms and roles share nouns."""
    present = group.commands.get(command.name or "")
    if isinstance(present, click.Group) and isinstance(command, click.Group):
        for verb in command.commands.values():
            present.add_command(verb)
    else:
        group.add_command(command)


def suggestion(words: Sequence[str]) -> str:
    """The command that `words` probably mean, if a name in them is unknown; else empty.

    In this order: words that changed places, the name of another tool, a group of a room without
    the room, a misspelled name.
    """
    named = [word for word in words if not word.startswith("-")][:3]
    for length in (3, 2):
        swapped = " ".join(reversed(named[:length]))
        if len(named) >= length and swapped in EXAMPLES:
            return swapped
    path, is_corrected = "", False
    for word in named:
        if path in EXAMPLES:
            break
        choices = _names_below(path)
        if word not in choices:
            meant = [one for one in SYNONYMS.get(word.lower(), ()) if one in choices]
            meant += _below_one_group(word, choices) if not path else []
            meant += difflib.get_close_matches(word.lower(), choices, n=1)
            if not meant:
                break
            word, is_corrected = meant[0], True  # noqa: PLW2901
        path = f"{path} {word}".strip()
    return path if is_corrected else ""


def unknown_command(words: Sequence[str]) -> UnknownCommand:
    """The error of a command line that names no command."""
    text = f"{' '.join(words[:3])!r} is not a command"
    verbs = [path for path in EXAMPLES if path.endswith(f" {words[-1]}")]
    if meant := suggestion(words):
        return UnknownCommand(f"{text}: did you mean `headrace {meant}`?")
    if len(words) == 1 and verbs:
        known = ", ".join(f"`headrace {path}`" for path in verbs[:4])
        return UnknownCommand(f"{text}: name what it applies to, such as {known}")
    below = " ".join(words[:-1])
    names = f": expected {', '.join(_names_below(below))}" if below else ""
    return UnknownCommand(f"{text}{names}: see `{f'headrace {below}'.strip()} --help`")


def _below_one_group(word: str, groups: Sequence[str]) -> list[str]:
    """`fetch customer` for `customer`, if one group alone has a group of this name."""
    found = {one for one in groups if any(p.startswith(f"{one} {word} ") for p in EXAMPLES)}
    return [f"{one} {word}" for one in found] if len(found) == 1 else []


def _names_below(path: str) -> list[str]:
    """The names that may follow `path`."""
    prefix = f"{path} ".lstrip()
    below = [one.removeprefix(prefix) for one in EXAMPLES if one.startswith(prefix)]
    return list(dict.fromkeys(name.split()[0] for name in below))
