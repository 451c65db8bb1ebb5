"""A slot's requests to its agent: lane tokens, progress, inserts of jobs, and other statements.

A slot has no connection for these calls: they use its agent's, and jobs that several slots enqueue
at the same time share a statement and its commit. All other statements, those in a transaction,
lists, and calls with over BYTES_MAX of payload, use a connection of the slot's own.

At most REQUESTS_AT_ONCE statements of a slot run at once, so that no slot fills its agent's pool
alone. If the socket closes before a result arrives, the outcome is unknown, as after the loss of a
connection. A process that a handler forked has no agent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Final

from headrace.engines.remote import unpack_result
from headrace.engines.sql import Query
from headrace.jobs.columns import JobColumns
from headrace.jobs.errors import AgentSilent, LaneExhausted
from headrace.jobs.handle import AwaitInstead
from headrace.jobs.messages import (
    Abandon,
    Answer,
    Failure,
    FromSlot,
    Insert,
    Progress,
    Result,
    Spend,
    SpendAnswer,
    Statement,
)
from headrace.jobs.slots.isolation import fork_count
from headrace.jobs.sql import SQL

PROGRESS_GAP_S: Final = 0.1
JOBS_REPORTED_MAX: Final = 1_000
ANSWER_WITHIN_S: Final = 10.0
REQUESTS_AT_ONCE: Final = 4
BYTES_MAX: Final = 1024 * 1024
"""A larger call would delay the claims of its host: the agent encodes it in its event loop."""
QUERIES: Final[dict[str, Query]] = {
    query.name: query
    for query in (
        # Enqueue, groups, events
        *(SQL.enqueue, SQL.enqueue_one, SQL.enqueue_alike, SQL.notify_queue),
        *(SQL.add_groups, SQL.add_members, SQL.seal_groups, SQL.drop_group),
        *(SQL.mark_group_open, SQL.mark_group_closed, SQL.keep_results, SQL.send_event),
        # Look up, change
        *(SQL.find_job, SQL.newest_job),
        *(SQL.find_ending, SQL.why_waiting, SQL.retries_of, SQL.edit_waiting, SQL.end_waiting),
        *(SQL.cancel_tree, SQL.retry_jobs, SQL.delete_jobs, SQL.spend),
        # Declare, before the first enqueue
        *(SQL.rename_queues, SQL.declare_queues, SQL.declare_aliases, SQL.find_queues),
        *(SQL.queue_settings, SQL.change_limiter, SQL.set_limiter, SQL.spread_limiter),
    )
}
"""The queries that an agent runs for its slots: quick ones, whose results are small."""


class AgentClient:
    """A slot's connection to its agent; implements `AgentRequests` and `AgentStatements`."""

    def __init__(self, send: Callable[[FromSlot], None], slack_s: Callable[[str], float]) -> None:
        self._send = send
        self._slack_s = slack_s
        self._calls = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._permits = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._is_lost = False
        self._home = fork_count()
        self._reported_s: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the slot's event loop, which must be the one of this thread."""
        self._loop, self._thread = loop, threading.current_thread()

    def answer(self, answer: Answer) -> None:
        """Deliver an answer; drop it if the request timed out."""
        waiting = self._waiting.pop(answer.call, None)
        if waiting is None or waiting.done():
            return
        match answer:
            case SpendAnswer():
                waiting.set_result(answer)
            case Result():
                waiting.set_result(answer.value)
            case Failure():
                waiting.set_exception(answer.error.error())

    def close(self) -> None:
        """Fail all requests, now and later: the agent's end of the socket is closed."""
        self._is_lost = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(AgentSilent())

    # Statements

    def takes(self, query: Query, parameters: dict[str, Any]) -> bool:
        """See `RemoteStatements`."""
        if QUERIES.get(query.name) is not query:
            return False
        return self._fits(sum(map(len, parameters.get("payloads", ()))))

    def takes_insert(self, rows: JobColumns) -> bool:
        """Whether the agent inserts these jobs: none may wait for the lock of a key or chain."""
        is_free = rows.chains is None and rows.keys.count(None) == len(rows)
        return is_free and self._fits(rows.size_bytes)

    async def call(
        self, method: str, query: Query, parameters: dict[str, Any], *, timeout_s: float
    ) -> Any:
        """See `RemoteStatements`."""
        request = Statement(next(self._calls), method, query.name, parameters)
        return unpack_result(method, await self._in_loop(self._requested(request, timeout_s)))

    async def insert(
        self, rows: JobColumns, queue_ids: list[int], headers: list[str], *, timeout_s: float
    ) -> list[int]:
        """Insert jobs; return their ids in order. Raises: errors of the statement, AgentSilent."""
        request = Insert(next(self._calls), rows, queue_ids, headers)
        ids: list[int] = await self._in_loop(self._requested(request, timeout_s))
        return ids

    def _fits(self, size_bytes: int) -> bool:
        return size_bytes <= BYTES_MAX and self._home == fork_count()

    async def _in_loop(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Run `request` in the slot's event loop; sync handlers run in other threads."""
        assert self._loop is not None, "the slot has not started"
        if threading.current_thread() is self._thread:
            return await request
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self._loop))

    async def _requested(self, request: Insert | Statement, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s), self._permits:
                try:
                    return await self._answered(request)
                except asyncio.CancelledError:
                    self._send(Abandon(request.call))
                    raise
        except TimeoutError as error:
            raise AgentSilent from error

    async def _answered(self, request: Insert | Statement | Spend) -> Any:
        """Send a request and wait for its answer."""
        if self._is_lost:
            raise AgentSilent
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request.call] = waiting
        try:
            self._send(request)
            return await waiting
        finally:
            self._waiting.pop(request.call, None)

    # Lane tokens and progress

    async def spend(self, queue: str, lane: str, starts: int, wait_max_s: float) -> float:
        """Take `starts` tokens and wait until the starts may begin.

        Return the deadline of the starts, by `time.monotonic`. Raises: LaneExhausted.
        """
        slack_s = self._slack_s(queue)
        ends_s = time.monotonic() + wait_max_s
        while True:
            requested_s = time.monotonic()
            answer = await self._spent(queue, lane, starts, max(0.0, ends_s - requested_s))
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

    async def _spent(
        self, queue: str, lane: str, starts: int, wait_max_s: float
    ) -> SpendAnswer | None:
        request = Spend(next(self._calls), queue, lane, starts, wait_max_s)
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                answer: SpendAnswer = await self._answered(request)
                return answer
        except (TimeoutError, AgentSilent):
            return None
