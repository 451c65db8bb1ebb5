"""How many jobs a call should get, so that it runs a second or two. No I/O.

A batch saves round trips, which stops to matter once its call takes a second; from there on a larger one only
holds jobs longer, loses more with its process, and makes one slot busy where several could share. A queue
starts with the batch that its task asks for, which is capped as soon as a call was measured.
"""

from __future__ import annotations

from typing import Final

CALL_S: Final = 1.5
"""What a call is to take at most."""
NEW_SHARE: Final = 0.3
"""How much of the average the newest call is."""


class Pace:
    """The run time of one queue's jobs, as its calls showed it."""

    def __init__(self) -> None:
        self._job_s: float | None = None

    def note_calls(self, jobs: int, run_s: float) -> None:
        """Calls with `jobs` in sum have run for `run_s` in sum."""
        if jobs > 0:
            job_s = run_s / jobs
            before_s = job_s if self._job_s is None else self._job_s
            self._job_s = before_s + NEW_SHARE * (job_s - before_s)

    def batch_hint(self, batch: int) -> int:
        """Jobs for the next call, 1 to `batch`."""
        if not self._job_s:
            return batch
        return max(1, min(batch, int(CALL_S / self._job_s)))
