"""`headrace up` on a terminal: a few lines for people, and the logs in a file."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from tests.kit.processes import HeadraceProcess

pytestmark = pytest.mark.slow
PORTS = {"HEADRACE_WEB_LISTEN": "127.0.0.1:0", "HEADRACE_MEDIA_LISTEN": "127.0.0.1:0", "CI": "1"}
SITE = """
from headrace import Headrace

app = Headrace()


@app.task("notes", retries=0)
def note(text: str) -> None:
    print(f"note: {text}", flush=True)
    raise ValueError(f"cannot store {text}")
"""


class Terminal:
    """`headrace up site:app` on a pseudo-terminal."""

    def __init__(self, folder):
        (folder / "site_app.py").write_text(SITE)
        self._end, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "up", "site_app:app"],
            cwd=folder,
            env={**os.environ, **PORTS},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self.shown = ""

    def wait_for(self, text, timeout_s=60):
        until_s = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < until_s, self.shown
            self.shown += os.read(self._end, 65_536).decode()

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            while data := os.read(self._end, 65_536):
                self.shown += data.decode()
        except OSError:
            pass  # Linux: the last process of the terminal ended
        os.close(self._end)
        return self.process.wait(60)


def test_a_terminal_shows_a_few_lines_and_failures_and_the_file_everything(tmp_path):
    terminal = Terminal(tmp_path)
    try:
        terminal.wait_for("warnings also appear here)")
        assert terminal.shown.count("\n") <= 5, terminal.shown
        adding = HeadraceProcess(["jobs", "add", "notes", '{"text": "a"}'], folder=tmp_path)
        assert adding.wait_exit() == 0, adding.err
        terminal.wait_for("traceback: headrace jobs show ")
        adding = HeadraceProcess(["jobs", "add", "notes", '{"txt": "a"}'], folder=tmp_path)
        assert adding.wait_exit() == 0, adding.err
        terminal.wait_for("does not fit the task")
    finally:
        status = terminal.stop()
    assert status == 0, terminal.shown
    assert "note: a" in terminal.shown
    assert '{"' not in terminal.shown
    [line] = [one for one in terminal.shown.splitlines() if "cannot store a" in one]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert "task notes: ValueError: cannot store a at site_app.py:10 (job " in plain
    assert len(plain) < 200
    assert [one for one in terminal.shown.splitlines() if "job_failed" in one] == [
        one for one in terminal.shown.splitlines() if "does not fit" in one
    ]
    assert terminal.shown.count("does not fit the task") == 1, terminal.shown
    assert "payload_invalid" not in terminal.shown
    assert terminal.shown.rstrip().splitlines()[-1].endswith("Headrace has stopped")
    file = tmp_path / "headrace-data" / "logs" / "up.log"
    assert file.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"prepared", "job_failed"} <= {line["event"] for line in lines}
    [raised] = [line for line in lines if line["event"] == "handler_raised"]
    [head, first, *_] = raised["traceback"].splitlines()
    assert "site_app.py" in first, head
    assert {"up", "agent", "slot"} <= {line["role"] for line in lines}
