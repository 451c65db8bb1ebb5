"""What a slot shows of itself while it runs: read by its agent when it hangs or dies without a word."""

from __future__ import annotations

from typing import Protocol


class Cell(Protocol):
    """A slot's place on the board. Called from the slot's event loop alone; must not raise or wait."""

    def begin(self, job_id: int, jobs: int, timeout_s: float) -> None:
        """`jobs` run from now on; said again whenever others join them, before their handler starts.

        `job_id` is the one that runs alone, or -1. All of them should have ended in `timeout_s`: a slot that
        runs on long after it, and past its grace, hangs.
        """

    def beat(self) -> None:
        """The event loop lives: said about every second while something runs."""

    def end(self) -> None:
        """Nothing runs any more."""
