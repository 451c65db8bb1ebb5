"""A killed role leaves no zombie, even below a first process that reaps nothing."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from tests.kit.processes import HeadraceProcess, descendants, wait_until

FREE_PORTS = {"HEADRACE_WEB_LISTEN": "127.0.0.1:0", "HEADRACE_MEDIA_LISTEN": "127.0.0.1:0"}
FIRST_PROCESS = """
import ctypes, os, signal, subprocess, sys

# PR_SET_CHILD_SUBREAPER: as the first process of a container, it becomes the parent of orphans.
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
child = subprocess.Popen([sys.executable, *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
sys.exit(child.wait())
"""


@pytest.mark.slow
def test_a_killed_agent_leaves_no_zombie(tmp_path):
    script, first = tmp_path / "first_process.py", tmp_path / "first_process"
    script.write_text(FIRST_PROCESS)
    # A path with spaces cannot be in the first line of a script.
    first.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$0.py" "$@"\n')
    first.chmod(0o700)
    process = HeadraceProcess(
        ["up", "--json"], folder=tmp_path / "site", env=FREE_PORTS, python=first
    )
    try:
        process.wait_out('"api":')
        [agent] = [e["pid"] for e in process.events("role_started") if e["name"] == "agent"]
        family = [agent, *descendants(agent)]
        assert len(family) > 2, "an agent, its zygote and slots"
        os.kill(agent, signal.SIGKILL)

        def is_back() -> bool:
            return sum(e["name"] == "agent" for e in process.events("role_ready")) == 2

        wait_until(is_back, what="the next agent is ready")
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in family),
            what="all are reaped",
        )
    finally:
        process.end()
