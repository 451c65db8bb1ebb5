"""Sync handlers run in threads that stay: what a library keeps a thread (Django's connections) lives on.

Not in an executor: a handler past its timeout cannot be ended, and would hold a place in the pool and the
process's exit. Here its thread is left behind and another one takes its place.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from headrace.jobs.slots.children import forks_behind, leave_if_forked

Work = Callable[[], None] | None
THREAD_NAME: Final = "headrace-handler"


class Threads:
    """As many daemon threads as there are sync calls at once; the last one used is used first."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Work]] = []
        self._home = forks_behind()

    async def run(self, code: Callable[[], Any]) -> Any:
        """Run `code` in a thread, in this context; a thread whose caller was cancelled is left behind."""
        loop = asyncio.get_running_loop()
        # Errors are carried as values: a future refuses StopIteration, and one that raises GeneratorExit
        # closes the coroutines that wait for it.
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def tell(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result((result, error))

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(code)
            except BaseException as raised:  # noqa: BLE001 - carried to the awaiting side
                error = raised
            leave_if_forked(self._home, 1 if error is not None else 0)
            # A loop that was closed meanwhile waits for no answer.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, result, error)

        thread = self._idle.pop() if self._idle else _started()
        thread.put(work)
        try:
            result, error = await answer
        except BaseException:
            # It ends after the code that it cannot be made to leave.
            thread.put(None)
            raise
        self._idle.append(thread)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Let the idle threads end."""
        while self._idle:
            self._idle.pop().put(None)


def _started() -> queue.SimpleQueue[Work]:
    works: queue.SimpleQueue[Work] = queue.SimpleQueue()
    threading.Thread(target=_work_off, args=(works,), name=THREAD_NAME, daemon=True).start()
    return works


def _work_off(works: queue.SimpleQueue[Work]) -> None:
    while (work := works.get()) is not None:
        work()
        # Else the frame would keep the last payload alive until the next one.
        del work
