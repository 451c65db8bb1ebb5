"""A run of the tests leaves no process and no folder, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.processes import is_alive, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def unending(tmp_path):
    """A run in the middle of a test: its controller, the pids below it, its folders."""
    started = tmp_path / "started"
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*command, Path(__file__).with_name("unending.py")],
            env=os.environ | {"STARTED": str(started)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    wait_until(lambda: process.poll() is not None or started.exists(), what="the test runs")
    assert process.poll() is None, (tmp_path / "out").read_text()
    yield process, *json.loads(started.read_text())
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "number",
    [
        "SIGKILL",
        pytest.param("SIGTERM", marks=pytest.mark.soak),
        pytest.param("SIGINT", marks=pytest.mark.soak),
    ],
)
def test_nothing_is_left(number, unending):
    process, pids, folders = unending
    assert len(pids) > 5
    assert all(Path(folder).exists() for folder in folders)
    process.send_signal(signal.Signals[number])
    process.wait(20)
    wait_until(lambda: not any(map(is_alive, pids)), what="all processes ended")
    wait_until(lambda: not any(Path(folder).exists() for folder in folders), what="no folder")
