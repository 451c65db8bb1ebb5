"""What structlog imports for a terminal is imported when it is asked for."""

from __future__ import annotations

import subprocess
import sys

RUN = """
import sys
import headrace.kernel.logs
import structlog
assert not [name for name in sys.modules if name.split(".")[0] in ("rich", "pygments", "attr")]
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("divided")
import rich.console
assert isinstance(rich.console.Console, type)
"""


def test_logs_cost_no_rich_and_structlog_keeps_its_tracebacks():
    """In a process of its own: in this one rich may be there already."""
    ended = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback (most recent call last)" in ended.stdout
    assert "╭" in ended.stdout
    assert "ZeroDivisionError" in ended.stdout


def test_what_is_imported_already_stays_and_what_is_missing_is_not_stood_in_for():
    """Only a stand-in of the block itself is taken away again."""
    from headrace.kernel.late import late

    json = sys.modules["json"]
    with late("json", "decoder"), late("no_such_package_anywhere", "part"):
        assert sys.modules["json"] is json
        assert "no_such_package_anywhere" not in sys.modules
    assert sys.modules["json"] is json
