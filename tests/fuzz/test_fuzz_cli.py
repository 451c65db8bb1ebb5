"""The command line: every command with made arguments, on real engines.

Each ends with a documented exit code and no traceback, and an error is one document with a code of
the error table. Roles and other commands that run until Ctrl-C are left out.
"""

from __future__ import annotations

import json

import click
import pytest
from hypothesis import strategies as st
from tests.fuzz.budget import fuzz

from headrace.__main__ import main
from headrace.cli.main import build_group
from headrace.kernel.errors import error_table

ENDLESS = {
    *(
        "agent",
        "api",
        "demo",
        "flusher",
        "promote",
        "restore",
        "scheduler",
        "standby",
        "up",
        "work",
    ),
    *("media serve", "media trace show"),
}
"""They run until they are stopped, or need embedded engines of their own."""
EXIT_CODES = {0, 2, 3, 4, 5, 6, 7, 8}
OTHER_SIDE_FAILED = {"fetch photo", "fetch webhook test"}
"""Commands that exit with 1 when the other side fails."""
CHECKING = {
    *("doctor", "feed verify", "fetch photo", "media verify", "media warm", "migrate"),
    "views verify",
}
"""Commands that print a result and exit with a code."""
WAITING = {"follow", "watch", "wait", "wait_s"}
TEXTS = (
    *("", " ", "a", "ann", "mail", "1", "0", "-1", "--", "-x", "9" * 30, "9" * 5000, "1e3", "1.5"),
    *("nan", "inf", "٣", "true", "null", "{}", "[]", "[1,", '{"a": 1}', "[" * 3000, "@", "a@b"),
    *("a b", "a/b", "..", "../x", "a\nb", "\u202e", "\udcff", "x" * 300, "x" * 5000, "%s", "{0}"),
    *("' OR 1=1", "*", "$(id)", "=1+1", "http://127.0.0.1/", "http://[", "file:///etc/passwd"),
    *("10m", "600/m", "5/0s", "9999999999d", "64KiB", "2026-11-28", "0001-01-01", "9999-12-31"),
    *("2026-11-28T10:00Z", "9999-12-31T23:59:59-14:00", "0 4 * * *", "*/0 * * * *", "jobs:read"),
)


def leaves(command: click.Command, path: str = "") -> dict[str, click.Command]:
    """Every command below a group, by its words."""
    inner = getattr(command, "commands", {})
    found: dict[str, click.Command] = {}
    for name, one in inner.items():
        found |= leaves(one, f"{path} {name}".strip())
    return found if inner else {path: command}


COMMANDS = {path: one for path, one in leaves(build_group()).items() if path not in ENDLESS}


def values_of(parameter: click.Parameter) -> st.SearchStrategy[str]:
    """Texts for a parameter: valid and odd ones."""
    choices = getattr(parameter.type, "choices", ())
    return st.sampled_from([*map(str, choices), *TEXTS])


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A command, and words after its name."""
    path = draw(st.sampled_from(sorted(COMMANDS)))
    words: list[str] = []
    for parameter in COMMANDS[path].params:
        is_given = draw(st.integers(0, 9)) < (9 if isinstance(parameter, click.Argument) else 3)
        if not is_given or parameter.name in WAITING:
            continue
        if isinstance(parameter, click.Argument):
            words.append(draw(values_of(parameter)))
        elif getattr(parameter, "is_flag", False):
            words.append(parameter.opts[0])
        else:
            words += [parameter.opts[0], draw(values_of(parameter))]
    return path, words


@pytest.fixture
def home(tmp_path, monkeypatch, engines_env):
    """A deep working folder, the engines' environment, and no home to write to."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in engines_env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_any_arguments_end_in_a_documented_exit_code(home, capfd):
    assert main(["queues", "ls", "--json"]) == 0
    assert len(COMMANDS) > 120
    capfd.readouterr()
    codes = error_table()

    def check(line: tuple[str, list[str]]) -> None:
        path, words = line
        exit_code = main(["--json", *path.split(), *words])
        reported = capfd.readouterr().err
        assert "Traceback" not in reported, f"{line}: {reported[-3000:]}"
        is_documented = exit_code in EXIT_CODES or (exit_code == 1 and path in OTHER_SIDE_FAILED)
        assert is_documented, f"{line}: {exit_code} {reported}"
        if exit_code in (0, 1) or (path in CHECKING and not reported.strip().startswith('{"error')):
            return
        error = json.loads(reported.strip().splitlines()[-1])["error"]
        assert error["exit_code"] == exit_code
        assert error["code"] in (codes | error_table()), error
        assert len(error["message"].split()) >= 3, error

    fuzz(command_lines(), check, examples=80)
