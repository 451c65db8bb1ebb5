"""Requests that no photo job makes: each takes its start out of its customer's lane all the same.

A catalogue file and the sampled photos of a dry run are asked of the same hosts; the seller's own log counts
them with the others. What a photo job asks of its agent is asked of PostgreSQL here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from headrace.fetch.model import LIMITER
from headrace.fetch.starts import Starts
from headrace.jobs import Jobs
from headrace.jobs.errors import LaneExhausted
from headrace.jobs.job_context import JobLane
from headrace.jobs.service.lanes import SLACK_S

TRIES: Final = 5


class LaneReach:
    """The way to a customer's lane for what is no job of it."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def starts(self, customer: str, *, wait_max_s: float) -> Starts:
        """The starts of one download, the first of them in hand. Raises: LaneExhausted."""
        lane = JobLane.of(customer, LIMITER, self)
        before_s = await lane.spend(wait_max_s=wait_max_s)
        return Starts(lane, before_s, may_return=False)

    async def spend(self, queue: str, lane: str, starts: int, wait_max_s: float) -> float:
        """Take `starts` out of the lane and wait until they may begin; until when they may.

        `queue` is the limiter's name here. Raises: LaneExhausted.
        """
        for _ in range(TRIES):
            asked_s = time.monotonic()
            wait_s = await self._jobs.lanes.spend(queue, lane, starts, wait_max_s=wait_max_s)
            if wait_s is None:
                break
            await asyncio.sleep(wait_s)
            before_s = asked_s + wait_s + SLACK_S
            if time.monotonic() <= before_s:
                return before_s
        raise LaneExhausted(lane, starts, wait_max_s)

    def spend_blocking(self, queue: str, lane: str, starts: int, wait_max_s: float) -> None:
        """The same where a thread may block."""
        asyncio.run(self.spend(queue, lane, starts, wait_max_s))

    def report_progress(self, job_id: int, ratio: float, text: str) -> None:
        """There is no job whose progress could be told."""
