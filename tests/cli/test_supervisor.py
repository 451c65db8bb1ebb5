"""The supervisor with real engines: readiness, restarts, orderly stop, no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.processes import descendants, is_alive, wait_until

from headrace.cli.supervisor import announce_ready, watch_parent
from headrace.engines.embedded.process import processes_in

PROGRAM = Path(__file__).with_name("supervised.py")
pytestmark = pytest.mark.slow


class Supervised:
    """The program under test, with its events."""

    def __init__(self, folder, *arguments):
        folder.mkdir()
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            # Own session, to signal the whole group as a terminal does.
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, arguments)],
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._read = 0

    @property
    def errors(self):
        return self._err.read_text()

    def wait_event(self, kind, name=None):
        """Skip to the next event of `kind`, and of `name` if given."""

        def ask():
            lines = self._out.read_text().splitlines(keepends=True)
            assert self.process.poll() is None or kind in str(lines), f"ended: {self.errors}"
            while self._read < len(lines) and lines[self._read].endswith("\n"):
                self._read += 1
                event = json.loads(lines[self._read - 1])
                if event["kind"] == kind and name in (None, event.get("name")):
                    return event
            return None

        return wait_until(ask, what=f"{kind} {name}")


@pytest.fixture
def supervise(tmp_path):
    """Start supervisors; kill those that a failed test left."""
    started = []

    def start(*arguments):
        started.append(Supervised(tmp_path / f"run-{len(started)}", *arguments))
        return started[-1]

    yield start
    for supervised in started:
        supervised.process.kill()
        supervised.process.wait(60)


def test_crashed_processes_restart_in_a_locked_folder_and_ctrl_c_stops_all_in_order(
    tmp_path, supervise
):
    folder = tmp_path / "data"
    supervised = supervise(folder, "polite", "stubborn")
    up = supervised.wait_event("up")
    assert up["ready"]["polite"]["listen"] == "127.0.0.1:8080"
    os.kill(up["ready"]["polite"]["pid"], signal.SIGKILL)
    died = supervised.wait_event("role_died", "polite")
    assert (died["exit_code"], died["deaths"]) == (-signal.SIGKILL, 1)
    assert 0 < died["restart_in_s"] <= 0.05
    assert (
        supervised.wait_event("role_ready", "polite")["announced"]["pid"]
        != up["ready"]["polite"]["pid"]
    )
    for name, pid in zip(("postgres", "valkey"), up["engines"], strict=True):
        os.kill(pid, signal.SIGKILL)
        died = supervised.wait_event("engine_died", name)
        assert died["restart_in_s"] <= 0.2
        assert died["deaths"] == 1  # counted per engine
        supervised.wait_event("engine_restarted", name)
    second = supervise(folder, "polite")
    assert second.process.wait(60) != 0
    assert f"in use by process {supervised.process.pid}" in second.errors
    pids = descendants(supervised.process.pid)
    assert {up["ready"]["stubborn"]["pid"]} <= set(pids)
    os.killpg(supervised.process.pid, signal.SIGINT)
    supervised.wait_event("stopping")
    seen = folder / "logs" / "seen-at-the-end"
    wait_until(seen.exists, what="the polite role ended")
    # A role that ignores SIGTERM gets its grace period, unless a second signal arrives.
    os.killpg(supervised.process.pid, signal.SIGINT)
    assert supervised.process.wait(60) == 0
    assert seen.read_text() == ".s.PGSQL.5432 valkey.sock"
    assert [pid for pid in pids if is_alive(pid)] == []
    assert processes_in(folder) == []


def test_no_process_outlives_a_killed_supervisor(tmp_path, supervise):
    folder = tmp_path / "data"
    supervised = supervise(folder, "polite", "stubborn")
    supervised.wait_event("up")
    pids = descendants(supervised.process.pid)
    assert len(pids) > 4
    supervised.process.kill()
    supervised.process.wait(60)
    wait_until(lambda: not any(map(is_alive, pids)), what="all ended")
    assert processes_in(folder) == []


def test_closed_pipes_do_not_block_the_stop():
    # A closed terminal: writes fail, then SIGHUP arrives.
    command = [sys.executable, str(PROGRAM), "-", "polite", "stubborn"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, env={**os.environ, "GRACE_S": "0.5"})
    while b'"up"' not in process.stdout.readline():
        assert process.poll() is None
    pids = descendants(process.pid)
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    process.wait(60)
    assert [pid for pid in pids if is_alive(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_without_engines_a_signal_stops_the_roles(number, supervise):
    supervised = supervise("-", "polite")
    pid = supervised.wait_event("up")["ready"]["polite"]["pid"]
    supervised.process.send_signal(number)
    assert supervised.process.wait(60) == 0
    assert not is_alive(pid)


def test_repeated_crashes_increase_the_backoff(supervise):
    supervised = supervise("-", "failing")
    deaths = [supervised.wait_event("role_died") for _ in range(3)]
    assert [death["deaths"] for death in deaths] == [1, 2, 3]
    assert {death["exit_code"] for death in deaths} == {7}
    assert 0.1 <= deaths[-1]["restart_in_s"] <= 0.2
    supervised.process.terminate()
    assert supervised.process.wait(60) == 0


def test_a_signal_during_engine_start_leaves_no_process(tmp_path, supervise):
    folder = tmp_path / "data"
    supervised = supervise(folder, "polite")
    wait_until((folder / "postgres.new" / "base").exists, what="initdb under way")
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_event("stopping")
    assert supervised.process.wait(60) != 0
    assert processes_in(folder) == []


def test_a_role_works_without_a_supervisor(monkeypatch):
    monkeypatch.delenv("HEADRACE_READY_FD", raising=False)
    monkeypatch.delenv("HEADRACE_PARENT_PID", raising=False)
    announce_ready(listen="127.0.0.1:8080")
    watch_parent()
