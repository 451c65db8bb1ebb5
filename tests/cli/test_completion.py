"""Completion of commands in a real shell, installed by one command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.__main__ import main

ASK = """
COMP_WORDS=({words}) COMP_CWORD={last}
complete -p headrace >&2
_headrace_completion headrace
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def completed(home, *words):
    """What bash offers for the last of `words`."""
    script = ASK.format(words=shlex.join(("headrace", *words)), last=len(words))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "--norc", "-c", f". ~/.bashrc\n{script}"],
        cwd=home,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "complete -o" in ran.stderr, ran.stderr
    return ran.stdout.split()


def test_bash_completes_commands_and_options_without_a_site(home, capfd):
    (home / ".bashrc").write_text("export MINE=1")
    for _ in range(2):
        assert main(["completion", "install", "bash"]) == 0
    lines = (home / ".bashrc").read_text().splitlines()
    assert lines[0] == "export MINE=1"
    assert len(lines) == 2
    assert completed(home, "que") == ["queues"]
    assert completed(home, "queues", "p") == ["pause"]
    assert completed(home, "jobs", "ls", "--st") == ["--state"]
    assert "quarantined" in completed(home, "jobs", "ls", "--state", "")


def test_zsh_and_fish_load_their_scripts(home, capfd, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert main(["completion", "install"]) == 0
    assert main(["completion", "install", "fish"]) == 0
    zsh, fish = home / ".local/share/headrace/completion.zsh", home / ".config/fish/completions"
    assert str(zsh) in (home / ".zshrc").read_text()
    assert "compdef _headrace_completion headrace" in zsh.read_text()
    assert "_HEADRACE_COMPLETE=fish_complete" in (fish / "headrace.fish").read_text()
    assert not (home / ".bashrc").exists()
