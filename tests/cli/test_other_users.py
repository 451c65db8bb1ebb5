"""Data folders of other users: no tracebacks, and root does not modify them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.__main__ import main

PROGRAM = Path(__file__).with_name("other_user.py")
NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def open_folder():
    """A folder that every user may enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def as_nobody(cwd, *words):
    """Run a command as a user without access to root's folders."""
    command = [sys.executable, str(PROGRAM), str(NOBODY), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        ("queues ls", 2),
        ("tokens ls", 2),
        ("media ls", 7),
        ("jobs show 1", 2),
        ("migrate", 2),
        ("up", 2),
        ("scheduler", 2),
    ],
)
def test_an_unreadable_folder_is_named(open_folder, words, exit_code):
    folder = open_folder / "data"
    folder.mkdir(mode=0o700)
    ran = as_nobody(open_folder, *words.split(), "--data", str(folder))
    assert "Traceback" not in ran.stderr
    assert str(folder) in ran.stderr
    assert ran.returncode == exit_code, ran.stderr
    assert list(folder.iterdir()) == []


def test_an_unreadable_file_is_named(open_folder):
    hidden = open_folder / "hidden"
    hidden.mkdir(mode=0o700)
    ran = as_nobody(open_folder, "media", "put", "a/b", str(hidden / "photo"))
    assert "Traceback" not in ran.stderr
    assert str(hidden / "photo") in ran.stderr
    assert ran.returncode in (2, 3)


def test_doctor_reports_unreadable_files(open_folder):
    folder = open_folder / "data"
    folder.mkdir(mode=0o700)
    ran = as_nobody(open_folder, "doctor", "--data", str(folder / "deeper"))
    assert ran.returncode == 7
    assert "Traceback" not in ran.stderr
    for subject in ("disk", "secret", "engines"):
        assert f"FAIL  {subject}: " in ran.stdout
    assert f"{folder}" in ran.stdout
    assert f"uid {NOBODY}" in ran.stdout


@pytest.mark.parametrize("words", [["up"], ["up", "--engines-only"]])
def test_root_refuses_the_folder_of_another_user(open_folder, capfd, words):
    folder = open_folder / "data"
    for path in (folder, folder / "postgres", folder / "run"):
        path.mkdir(mode=0o750)
        os.chown(path, NOBODY, NOBODY)
    before = {path: path.stat() for path in (folder, *folder.rglob("*"))}
    assert main([*words, "--data", str(folder)]) == 2
    told = capfd.readouterr().err
    assert f"belongs to uid {NOBODY}" in told
    assert f"setpriv --reuid {NOBODY}" in told
    assert "[engines.folder_unusable]" in told
    assert main(["doctor", "--data", str(folder)]) == 7
    assert f"FAIL  data folder: data folder {folder} belongs" in capfd.readouterr().out
    assert {path: path.stat() for path in (folder, *folder.rglob("*"))} == before
