"""Finding the jobs that make a batch raise: run it again in halves, then singly. No I/O.

A job is blamed only for what it did alone, so that one bad job never fails its neighbours. A good one among
n runs at most ceil(log2 n) + 1 times; 100 jobs with one bad take 15 calls at most, 100 bad ones take 199.
"""

from __future__ import annotations

from collections.abc import Sequence


class Halving:
    """Which jobs of a batch to run together next."""

    def __init__(self, jobs: Sequence[int]) -> None:
        self._runs = [jobs] if jobs else []

    def next_run(self) -> Sequence[int] | None:
        """Jobs for one call; None when there are no more."""
        return self._runs.pop() if self._runs else None

    def run_apart(self, jobs: Sequence[int]) -> None:
        """The call of `jobs` raised: have them run again in two halves, before the others."""
        middle = (len(jobs) + 1) // 2
        self._runs += [half for half in (jobs[middle:], jobs[:middle]) if half]

    def put_back(self, jobs: Sequence[int]) -> None:
        """`jobs` of the run at hand could not start with the others: have them run by themselves next."""
        if jobs:
            self._runs.append(jobs)

    def give_up(self) -> list[int]:
        """Every job that is still to be run; afterwards there are none."""
        left = [job for run in self._runs for job in run]
        self._runs.clear()
        return left
