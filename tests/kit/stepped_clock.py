"""A wall clock of Python that steps in child processes; monotonic clocks are unchanged.

The clock is the real one plus the number in a file, read at each call. Children find it as
`sitecustomize` in their folder, and the file by CLOCK_OFFSET.
"""

from __future__ import annotations

from pathlib import Path

OFFSET_FILE = "offset.txt"
STEPPED_CLOCK = '''
"""A wall clock that is off by the seconds in the file that CLOCK_OFFSET names."""
import datetime
import os
import time

_time, _time_ns, _real = time.time, time.time_ns, datetime.datetime


def offset_s():
    with open(os.environ["CLOCK_OFFSET"]) as file:
        return float(file.read() or 0)


class _Meta(type):
    def __instancecheck__(cls, value):
        return isinstance(value, _real)


class SteppedDatetime(_real, metaclass=_Meta):
    __slots__ = ()

    @classmethod
    def now(cls, tz=None):
        return _real.fromtimestamp(time.time(), tz)


time.time = lambda: _time() + offset_s()
time.time_ns = lambda: _time_ns() + int(offset_s() * 1e9)
datetime.datetime = SteppedDatetime
'''


def install_stepped_clock(folder: Path) -> Path:
    """Give the processes that start in `folder` this clock; return the file of its offset."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(STEPPED_CLOCK)
    set_clock(folder, 0)
    return folder / OFFSET_FILE


def set_clock(folder: Path, offset_s: float) -> None:
    """Set the offset; a reader never sees half a number."""
    draft = folder / f"{OFFSET_FILE}.new"
    draft.write_text(str(offset_s))
    draft.replace(folder / OFFSET_FILE)
