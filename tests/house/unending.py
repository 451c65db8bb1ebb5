"""A test that starts a whole site and does not end; `test_run_cleanup` starts and ends its run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.kit.processes import HeadraceProcess, descendants
from tests.kit.run_cleanup import MEMORY_VARIABLE

FREE_PORTS = {"HEADRACE_WEB_LISTEN": "127.0.0.1:0", "HEADRACE_MEDIA_LISTEN": "127.0.0.1:0"}


def test_unending(tmp_path, running_engines):
    site = HeadraceProcess(["up"], folder=tmp_path / "site", env=FREE_PORTS)
    site.wait_out("(token in")
    folders = [os.environ["TMPDIR"], os.environ[MEMORY_VARIABLE]]
    pids = [os.getpid(), *descendants(os.getpid())]
    draft = Path(os.environ["STARTED"]).with_suffix(".draft")
    draft.write_text(json.dumps([pids, folders]))
    draft.rename(os.environ["STARTED"])
    signal.pause()
