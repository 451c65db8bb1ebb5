"""Data folders of other users: no tracebacks, and root does not modify them."""

from __future__ import annotations

import json
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


COMMANDS = {
    "queues ls": 2,
    "tokens ls": 2,
    "media ls": 7,
    "jobs show 1": 2,
    "migrate": 2,
    "up": 2,
    "scheduler": 2,
}


def test_unreadable_folders_and_files_are_named(open_folder):
    """Commands of a user without access to root's folders."""
    folder, hidden = open_folder / "data", open_folder / "hidden"
    for path in (folder, hidden):
        path.mkdir(mode=0o700)
    commands = [
        *([*words.split(), "--data", str(folder)] for words in COMMANDS),
        ["media", "put", "a/b", str(hidden / "photo")],
        ["doctor", "--data", str(folder / "deeper")],
    ]
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), str(NOBODY)],
        cwd=open_folder,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *reported, put, doctor = json.loads(ran.stdout.splitlines()[-1])
    for (words, expected), (exit_code, _, err) in zip(COMMANDS.items(), reported, strict=True):
        assert exit_code == expected, f"{words}: {err}"
        assert "Traceback" not in err, words
        assert str(folder) in err, words
    assert list(folder.iterdir()) == []
    assert put[0] in (2, 3)
    assert "Traceback" not in put[2]
    assert str(hidden / "photo") in put[2]
    exit_code, out, err = doctor
    assert (exit_code, "Traceback" in err) == (7, False)
    for subject in ("disk", "secret", "engines"):
        assert f"FAIL  {subject}: " in out
    assert str(folder) in out
    assert f"uid {NOBODY}" in out


@pytest.mark.parametrize("words", [["up"], ["up", "--engines-only"]])
def test_root_refuses_the_folder_of_another_user(open_folder, capfd, words):
    folder = open_folder / "data"
    for path in (folder, folder / "postgres", folder / "run"):
        path.mkdir(mode=0o750)
        os.chown(path, NOBODY, NOBODY)
    before = {path: path.stat() for path in (folder, *folder.rglob("*"))}
    assert main([*words, "--data", str(folder)]) == 2
    reported = capfd.readouterr().err
    assert f"belongs to uid {NOBODY}" in reported
    assert f"setpriv --reuid {NOBODY}" in reported
    assert "[engines.folder_unusable]" in reported
    assert main(["doctor", "--data", str(folder)]) == 7
    assert f"FAIL  data folder: data folder {folder} belongs" in capfd.readouterr().out
    assert {path: path.stat() for path in (folder, *folder.rglob("*"))} == before
