"""Tables, colors and progress on a terminal; plain and stable text everywhere else."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from headrace.cli import screen
from headrace.cli.app_context import CommandLine
from headrace.cli.doctor import Finding
from headrace.cli.main import NAMES
from headrace.cli.setup import doctor
from headrace.kernel.errors import NotFound
from headrace.kernel.terminal import (
    Lines,
    duration_text,
    listing,
    paged,
    size_cell,
    size_text,
    table,
)

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ROWS = [
    (7, "done", size_cell(5 * 2**20), "fine"),
    (12_345, "failed", size_cell(12), "no such mailbox: \x1b[31mann, and a text over two lines"),
]
TEXT = paged(Lines("jobs:", table(("done", "state", "size", "why"), ROWS)), 99)
PLAIN = """\
jobs:
done   state   size     why
7      done    5242880  fine
12345  failed  12       no such mailbox: \x1b[31mann, and a text over two lines
more: --cursor 99
"""


class Tty(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """What `show` prints on a terminal of 50 columns, by the environment."""

    def show(text, *, width=50, stream=Tty, is_json=False, value=None, **env):
        out = stream()
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, text_of in {"TERM": "xterm", "COLUMNS": str(width), **env}.items():
            monkeypatch.setenv(name, text_of)
        monkeypatch.setattr("sys.stdout", out)
        line = CommandLine(lambda _: None, (), is_json=is_json)
        line.show(listing([]) if value is None else value, text)
        return out.getvalue()

    return show


def test_a_terminal_gets_columns_that_fit_with_units_and_colors(shown):
    found = shown(TEXT)
    plain = ANSI.sub("", found)
    assert all(len(line) <= 50 for line in plain.splitlines()), plain
    lines = [line.rstrip() for line in plain.splitlines()]
    assert lines[:3] == [
        "jobs:",
        "  done  state      size  why",
        "     7  done    5.0 MiB  fine",
    ]
    assert lines[3].startswith("12,345  failed     12 B  no such")
    assert lines[-1] == "more: --cursor 99"
    assert "\x1b[31mfailed" in found
    # The escape of a name is shown, not obeyed.
    assert "\\u001b[31mann" in re.sub(r"\s+", " ", plain) or "\\u001b" in plain


@pytest.mark.parametrize(
    ("stream", "env"), [(io.StringIO, {}), (Tty, {"TERM": "dumb"}), (Tty, {"TERM": ""})]
)
def test_scripts_and_dumb_terminals_get_plain_text(shown, stream, env):
    assert shown(TEXT, stream=stream, **env) == PLAIN


def test_a_row_of_a_script_is_one_line(shown):
    rows = [("a1", "blurred\n\nask for another"), ("a2", "")]
    found = shown(table(("item", "reason"), rows), stream=io.StringIO)
    assert found.splitlines() == ["item  reason", "a1    blurred ask for another", "a2"]


def test_the_doctor_has_a_table_only_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    finding = Finding("disk", "warn", "95 % full", "delete old backups")
    for stream, expected in (
        (Tty, r"check +result\n *WARN +disk +95 % full\n +fix: delete old backups"),
        (io.StringIO, r"^WARN  disk: 95 % full\n      fix: delete old backups\n$"),
    ):
        out = stream()
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr(CommandLine, "run_app", lambda *_, **__: [finding])
        doctor.main([], obj=CommandLine(lambda _: None, ()), standalone_mode=False)
        lines = [line.rstrip() for line in ANSI.sub("", out.getvalue()).splitlines()]
        assert re.search(expected, "\n".join(lines) + "\n")


def test_no_color_keeps_the_columns(shown):
    found = shown(TEXT, NO_COLOR="1")
    assert "5.0 MiB" in found
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", found)


def test_with_json_a_terminal_gets_one_indented_document(shown):
    assert shown(TEXT, is_json=True, value=listing([1])).splitlines()[:2] == ["{", '  "items": [']


def test_a_bare_list_is_no_document(shown):
    with pytest.raises(AssertionError, match="listing"):
        shown(TEXT, is_json=True, value=[1])


def test_units_for_people():
    sizes = [0, 1023, 1024, 150 * 2**20, 2**41]
    assert [*map(size_text, sizes)] == ["0 B", "1023 B", "1.0 KiB", "150 MiB", "2.0 TiB"]
    spans = [0, 119, 600, 7200, 864_000]
    assert [*map(duration_text, spans)] == ["0 s", "119 s", "10 min", "2.0 h", "10 d"]


def test_progress_is_a_bar_on_a_terminal_and_sparse_lines_elsewhere(monkeypatch):
    for name, value in (("BAR_AFTER_S", 0.0), ("LINE_EVERY_S", 0.01), ("REDRAW_S", 0.01)):
        monkeypatch.setattr(screen, name, value)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for stream, expected in ((Tty, " 25%"), (io.StringIO, "headrace: run 7: 1/4, 25% (0 s)\n")):
        err = stream()
        monkeypatch.setattr("sys.stderr", err)
        line = CommandLine(lambda _: None, ())
        line.progress("run 7: 1/4", 1, 4)
        written = err.getvalue
        for _ in range(6000):
            if expected in written():
                break
            line._progress._ended.wait(0.01)
        line.show_error(NotFound("job 7 does not exist: list jobs"))
        assert expected in written()
        last = ANSI.sub("", written()).splitlines()[-1].strip()
        assert last == "headrace: job 7 does not exist: list jobs [not_found]"


def test_help_fits_a_screen_and_imports_neither_rich_nor_a_room():
    code = (
        "import sys; from headrace.__main__ import main; main(['--help']);"
        " names = ('rich.console', 'headrace.jobs.cli', 'headrace.fetch.cli');"
        " sys.exit(str([name for name in names if name in sys.modules]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stderr.strip() == "[]"
    lines = ran.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    named = re.findall(
        r"[a-z]+", " ".join(line.split("   ")[0] for line in lines if line[:1] == " ")
    )
    names = {name for names in NAMES.values() for name in names}
    assert names - set(named) == {"zygote"}
