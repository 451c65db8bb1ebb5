"""What jobs in hand ask of the world around their slot: further starts of a lane, and to be heard of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Final

from headrace.jobs.bridge import AwaitInstead
from headrace.jobs.errors import LaneExhausted
from headrace.jobs.slots.messages import FromSlot, Progress, Spend, SpendAnswer

PROGRESS_GAP_S: Final = 0.1
JOBS_TOLD_MAX: Final = 1_000
ANSWER_WITHIN_S: Final = 10.0


class SlotReach:
    """The way of a slot's jobs to its agent."""

    def __init__(self, say: Callable[[FromSlot], None], slack_s: Callable[[str], float]) -> None:
        self._say = say
        self._slack_s = slack_s
        self._calls = count(1)
        self._waiting: dict[int, asyncio.Future[SpendAnswer]] = {}
        self._told_s: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which loop the slot runs on: the one of this thread."""
        self._loop, self._thread = loop, threading.current_thread()

    def answer(self, answer: SpendAnswer) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        waiting = self._waiting.pop(answer.call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def spend(self, queue: str, lane: str, starts: int, wait_max_s: float) -> float:
        """Take `starts` out of the lane and wait until they may begin; until when they may, by `time.monotonic`.

        Raises: LaneExhausted.
        """
        slack_s = self._slack_s(queue)
        ends_s = time.monotonic() + wait_max_s
        while True:
            asked_s = time.monotonic()
            answer = await self._ask(queue, lane, starts, max(0.0, ends_s - asked_s))
            if answer is None or answer.wait_s is None:
                raise LaneExhausted(lane, starts, wait_max_s)
            # Never early: waited from the answer on. Never late: the slack counts from the question, of the
            # agent where it says when that was: it asks for many at once, and some wait for their turn.
            if answer.wait_s > 0:
                await asyncio.sleep(answer.wait_s)
            start_before_s = (answer.sent_s or asked_s) + answer.wait_s + slack_s
            if time.monotonic() <= start_before_s:
                return start_before_s

    def spend_blocking(self, queue: str, lane: str, starts: int, wait_max_s: float) -> None:
        """The same for a thread that may block. Raises: LaneExhausted, AwaitInstead."""
        assert self._loop is not None, "the slot has not started"
        if threading.current_thread() is self._thread:
            raise AwaitInstead
        asking = self.spend(queue, lane, starts, wait_max_s)
        asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    def tell_progress(self, job_id: int, ratio: float, text: str) -> None:
        """Say how far a job is, at most every PROGRESS_GAP_S. From any thread."""
        assert self._loop is not None, "the slot has not started"
        now_s = time.monotonic()
        if now_s - self._told_s.get(job_id, -PROGRESS_GAP_S) < PROGRESS_GAP_S:
            return
        if len(self._told_s) >= JOBS_TOLD_MAX:
            self._told_s = {}
        self._told_s[job_id] = now_s
        self._loop.call_soon_threadsafe(self._say, Progress(job_id, ratio, text))

    async def _ask(
        self, queue: str, lane: str, starts: int, wait_max_s: float
    ) -> SpendAnswer | None:
        call = next(self._calls)
        waiting: asyncio.Future[SpendAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[call] = waiting
        try:
            self._say(
                Spend(call=call, queue=queue, lane=lane, starts=starts, wait_max_s=wait_max_s)
            )
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(call, None)
