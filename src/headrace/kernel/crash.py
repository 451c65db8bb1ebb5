"""Named points at which a test lets this very process die, as a power cut or an OOM kill would.

    crash_point("fetch.stored_before_row")

does nothing in production. With `HEADRACE_CRASH_AT=fetch.stored_before_row` in its environment the process
kills itself with SIGKILL there, at the third pass with `...:3`. A promise is tested at the very line where
it could break, and the same binary is tested that users run.
"""

from __future__ import annotations

import os
import signal
from typing import Final

ENV: Final = "HEADRACE_CRASH_AT"
_name, _, _pass = os.environ.get(ENV, "").partition(":")
_passes_left: Final = {_name: int(_pass or 1)} if _name else {}


def crash_point(name: str) -> None:
    """Die here if the environment asks for it; otherwise the cost of one dictionary lookup."""
    left = _passes_left.get(name)
    if left is None:
        return
    _passes_left[name] = left - 1
    if left == 1:
        os.kill(os.getpid(), signal.SIGKILL)
