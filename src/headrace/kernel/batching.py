"""Batching: concurrent small requests share one execution, such as a statement.

A request waits a short time for others. While enough executions run, it waits until one of them
ends, so the batches grow with the load of the server. With `wait_s=0` no request waits for a timer
(group commit): a lone one runs at once, in its caller's task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

WAIT_S: Final = 0.005
BATCH_MAX: Final = 200
RUNS_AT_ONCE: Final = 2
Request = TypeVar("Request")
Response = TypeVar("Response")


class Batcher(Generic[Request, Response]):
    """Calls `run_batch` with the collected requests; it returns responses in their order.

    A request waits at most `wait_s` for others; at most `runs_at_once` batches run. A response that
    is an exception is raised to its caller, an exception of `run_batch` to all callers.
    """

    def __init__(
        self,
        run_batch: Callable[[list[Request]], Awaitable[Sequence[Response | Exception]]],
        *,
        wait_s: float = WAIT_S,
        runs_at_once: int = RUNS_AT_ONCE,
    ) -> None:
        self._run_batch = run_batch
        self._wait_s = wait_s
        self._runs_at_once = runs_at_once
        self._requests: list[tuple[Request, asyncio.Future[Response]]] = []
        self._running = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def submit(self, request: Request) -> Response:
        """Return the response to `request`.

        The request of a cancelled caller is dropped, unless its batch has started.
        """
        if self._wait_s == 0 and not self._running and not self._requests:
            # In its caller's task: another task would slow a lone caller.
            self._running += 1
            try:
                [alone] = await self._run_batch([request])
            finally:
                self._ended()
            if isinstance(alone, Exception):
                raise alone
            return alone
        loop = asyncio.get_running_loop()
        response: asyncio.Future[Response] = loop.create_future()
        self._requests.append((request, response))
        if self._running < self._runs_at_once:
            if self._wait_s == 0 or len(self._requests) >= BATCH_MAX:
                self._start()
            elif self._timer is None:
                self._timer = loop.call_later(self._wait_s, self._start)
        return await response

    def _start(self) -> None:
        """Start a batch. It takes the requests that were made until its task runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._running += 1
        task = asyncio.create_task(self._run())
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._ended()

    def _ended(self) -> None:
        self._running -= 1
        if self._requests and self._timer is None:
            self._start()

    async def _run(self) -> None:
        """Run a batch of the oldest requests whose callers still wait."""
        waiting = [request for request in self._requests if not request[1].done()]
        batch, self._requests = waiting[:BATCH_MAX], waiting[BATCH_MAX:]
        if not batch:
            return
        responses: Sequence[Response | Exception]
        try:
            responses = await self._run_batch([request for request, _ in batch])
        except Exception as error:  # noqa: BLE001 - raised again to each caller
            responses = [error] * len(batch)
        for (_, future), response in zip(batch, responses, strict=True):
            if future.done():
                continue
            if isinstance(response, Exception):
                future.set_exception(response)
            else:
                future.set_result(response)
