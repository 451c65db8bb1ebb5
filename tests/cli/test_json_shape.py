"""`--json` of every command: one document of one shape, or one error of one shape.

Without `--json` a list is a table.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shlex

import click
import pytest

from headrace.__main__ import main
from headrace.cli.app_context import CommandLine
from headrace.cli.examples import EXAMPLES
from headrace.cli.main import build_group, take_global_options
from headrace.kernel.terminal import Lines, Table

NOT_RUN = {
    **dict.fromkeys(("agent", "api", "flusher", "media serve", "scheduler", "up", "work"), "role"),
    **dict.fromkeys(("demo", "standby"), "runs until it is stopped"),
    **dict.fromkeys(("fetch photo", "fetch webhook test", "fetch why"), "sends requests"),
    "completion show": "prints a script",
}
ARGUMENTS = {
    "fetch catalogue run": "items.csv --customer shop --no-wait",
    "media disks simulate": "--tracks 1600 --plays 1000",
    "queues set": "mail --importance 9 --create",
    "fetch catalogue errors": "1",
    "views export": "--by day",
    "fetch catalogue confirm": "1 --no-wait",
    "fetch run undo": "1 --no-wait",
    "jobs take": "mail -n 5",
}
"""Instead of those of the example."""
FIRST = (
    "queues set",
    "lanes set",
    "jobs add",
    "crons add",
    "fetch customer set",
    "fetch catalogue add",
    "fetch catalogue run",
    "fetch schema set",
    "fetch mapping set",
    "feed post",
    "feed follow",
    "views hit",
    "media put",
    "tokens create",
)
"""They make what the others list. Then come the others; those that remove come last."""
LAST = re.compile(r" (rm|rm-limiter|revoke|unfollow|discard)$")
LISTS = re.compile(
    r"( ls|audit|backup ls|config show|doctor|migrate| limiters| alerts| decisions| minutes| hours"
    r"|feed (author|page|following|followers|muted|blocked|stats)|fetch (results|host show)"
    r"|fetch catalogue (diff|errors)|fetch item send|media (hottest|disks simulate)"
    r"|media trace (show|off)|views (hit|get|series|viewers|marks|top|export|changes|lag))$"
)
PAGED = re.compile(
    r"^(audit|jobs ls|lanes ls|workflows ls|fleet decisions|fetch (results|webhook ls)|feed (author"
    r"|page|following|followers|muted|blocked)|fetch duplicates ls|fetch catalogue diff)$"
)
LINES = re.compile(r"^(doctor|migrate|fetch (host show|catalogue (diff|errors)|item send))$")
"""Reports and effects: lists that are no table."""
FILES = {
    "follows.csv": "viewer,author\nbob,ann\n",
    "items.csv": "id,name,price,photos\na,A,5,\n",
    "items.json": '[{"customer": "shop", "item": "b", "fields": {"name": "B", "price": 5}}]',
    "mapping.toml": 'id = "sku"\n',
    "schema.toml": '[fields.name]\ntype = "text"\n',
    "song.mp3": "sound",
}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")
UNITLESS = re.compile(r"(^|_)(timeout|wait|took|ttl|age|delay|lasts|size|bytes|memory|duration)$")


def leaves(command, path=""):
    """The path of every visible command that does something."""
    if isinstance(command, click.Group) and command.commands:
        if command.invoke_without_command:
            yield path
        for name, inner in command.commands.items():
            yield from leaves(inner, f"{path} {name}".strip())
    elif not command.hidden:
        yield path


def faults_of(value, place=""):
    """The fields of a document that break the rules for names, times and units."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from faults_of(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from faults_of(inner, f"{place}[]")
    name = place.rpartition(".")[2].removesuffix("[]")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and UNITLESS.search(name) and not name.endswith(("_s", "_bytes")):
        yield f"{place} has no unit"
    if isinstance(value, str) and TIME.match(value) and not value.endswith("Z"):
        yield f"{place} is not in UTC: {value}"


def has_table(text):
    """Whether a text has aligned columns below a head."""
    parts = text.parts if isinstance(text, Lines) else [text]
    return any(isinstance(part, Table) or (part is not text and has_table(part)) for part in parts)


def test_every_command_has_an_example_that_its_options_accept():
    group = build_group()
    assert set(leaves(group)) == set(EXAMPLES)
    for path, arguments in EXAMPLES.items():
        command = group
        for name in path.split():
            command = command.commands[name]
        words = shlex.split(re.sub(r" ?> \S+$", "", arguments))
        words = [re.sub(r"^(\w+\.(mp3|csv|json|toml))$", __file__, word) for word in words]
        words = take_global_options(words, CommandLine(lambda _: None, ()))
        command.make_context(path, words)
        assert f"Example: headrace {path}" in command.epilog


@pytest.mark.slow
async def test_every_command_prints_one_shape(
    database_url, running_engines, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name, text in {
        "HOME": str(tmp_path),
        "HEADRACE_POSTGRES_URL": database_url,
        "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
        "HEADRACE_VALKEY_PREFIX": f"test-{secrets.token_hex(4)}",
        "HEADRACE_BLOBS_URL": (tmp_path / "blobs").as_uri(),
        "HEADRACE_VIEWS_CHANGES_KEPT": "1d",
    }.items():
        monkeypatch.setenv(name, text)
    rest = [path for path in EXAMPLES if path not in (*FIRST, *NOT_RUN)]
    order = [*FIRST, *sorted(rest, key=lambda path: bool(LAST.search(path)))]
    faults, texts, show = [], [], CommandLine.show

    def record(line, value, text):
        texts.append(text)
        show(line, value, text)

    monkeypatch.setattr(CommandLine, "show", record)
    for path in order:
        words = [*path.split(), *shlex.split(ARGUMENTS.get(path, EXAMPLES[path])), "--json"]
        code = await asyncio.to_thread(main, words)
        out, err = capsys.readouterr()
        if out:
            document = json.loads(out)
            faults += [f"{path}: {fault}" for fault in faults_of(document)]
            if isinstance(document.get("items"), list) != bool(LISTS.search(path)):
                faults.append(f"{path}: `items` of {list(document)}")
            is_table = LISTS.search(path) and not LINES.search(path) and document.get("items")
            if is_table and not has_table(texts[-1]):
                faults.append(f"{path}: no table: {texts[-1]}")
            if PAGED.search(path) and "next_cursor" not in document:
                faults.append(f"{path}: no next_cursor")
        else:
            assert err, f"{path}: exit code {code} without an error"
            error = json.loads(err.splitlines()[-1])["error"]
            if (error["exit_code"], code) != (code, error["exit_code"]) or not error["message"]:
                faults.append(f"{path}: exit code {code}, {error}")
    assert faults == [], "\n".join(faults)
