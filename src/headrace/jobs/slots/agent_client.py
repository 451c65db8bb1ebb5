"""Requests of running jobs to the agent: lane tokens and progress reports."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Final

from headrace.jobs.bridge import AwaitInstead
from headrace.jobs.errors import LaneExhausted
from headrace.jobs.messages import FromSlot, Progress, Spend, SpendAnswer

PROGRESS_GAP_S: Final = 0.1
JOBS_REPORTED_MAX: Final = 1_000
ANSWER_WITHIN_S: Final = 10.0


class AgentClient:
    """A slot's connection to its agent for its jobs; implements `AgentRequests`."""

    def __init__(self, send: Callable[[FromSlot], None], slack_s: Callable[[str], float]) -> None:
        self._send = send
        self._slack_s = slack_s
        self._calls = count(1)
        self._waiting: dict[int, asyncio.Future[SpendAnswer]] = {}
        self._reported_s: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the slot's event loop, which must be the one of this thread."""
        self._loop, self._thread = loop, threading.current_thread()

    def answer(self, answer: SpendAnswer) -> None:
        """Deliver an answer; drop it if the request timed out."""
        waiting = self._waiting.pop(answer.call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def spend(self, queue: str, lane: str, starts: int, wait_max_s: float) -> float:
        """Take `starts` tokens and wait until the starts may begin.

        Return the deadline of the starts, by `time.monotonic`. Raises: LaneExhausted.
        """
        slack_s = self._slack_s(queue)
        ends_s = time.monotonic() + wait_max_s
        while True:
            requested_s = time.monotonic()
            answer = await self._request(queue, lane, starts, max(0.0, ends_s - requested_s))
            if answer is None or answer.wait_s is None:
                raise LaneExhausted(lane, starts, wait_max_s)
            # Never early: the wait begins with the answer. Never late: the slack counts from the
            # agent's statement if known, else from the request: requests wait to be batched.
            if answer.wait_s > 0:
                await asyncio.sleep(answer.wait_s)
            start_before_s = (answer.sent_s or requested_s) + answer.wait_s + slack_s
            if time.monotonic() <= start_before_s:
                return start_before_s

    def spend_blocking(self, queue: str, lane: str, starts: int, wait_max_s: float) -> None:
        """`spend` for a thread that may block. Raises: LaneExhausted, AwaitInstead."""
        assert self._loop is not None, "the slot has not started"
        if threading.current_thread() is self._thread:
            raise AwaitInstead
        spending = self.spend(queue, lane, starts, wait_max_s)
        asyncio.run_coroutine_threadsafe(spending, self._loop).result()

    def report_progress(self, job_id: int, ratio: float, text: str) -> None:
        """Report a job's progress, at most every PROGRESS_GAP_S. Thread-safe."""
        assert self._loop is not None, "the slot has not started"
        now_s = time.monotonic()
        if now_s - self._reported_s.get(job_id, -PROGRESS_GAP_S) < PROGRESS_GAP_S:
            return
        if len(self._reported_s) >= JOBS_REPORTED_MAX:
            self._reported_s = {}
        self._reported_s[job_id] = now_s
        self._loop.call_soon_threadsafe(self._send, Progress(job_id, ratio, text))

    async def _request(
        self, queue: str, lane: str, starts: int, wait_max_s: float
    ) -> SpendAnswer | None:
        call = next(self._calls)
        waiting: asyncio.Future[SpendAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[call] = waiting
        try:
            self._send(
                Spend(call=call, queue=queue, lane=lane, starts=starts, wait_max_s=wait_max_s)
            )
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(call, None)
