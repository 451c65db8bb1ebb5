"""Many small questions become one: whoever asks within a few milliseconds shares a statement.

Photos are jobs of their own, so that a slow host holds one place and not a batch; their rows are still
read and written in bulk. A question waits at most WAIT_S for company; while RUNS_AT_ONCE statements are
under way it waits for the first of them to end, so that the busier PostgreSQL is, the more share one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

WAIT_S: Final = 0.005
ASKED_MAX: Final = 200
RUNS_AT_ONCE: Final = 2
Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Gathering(Generic[Question, Answer]):
    """Calls `answer_all` with what was asked meanwhile; answers come in the order of the questions.

    An answer that is an exception is raised to whoever asked; an exception of `answer_all` to all.
    """

    def __init__(
        self, answer_all: Callable[[list[Question]], Awaitable[Sequence[Answer | Exception]]]
    ) -> None:
        self._answer_all = answer_all
        self._asked: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, question: Question) -> Answer:
        """The answer to `question`. A cancelled caller's question may still have its effect."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._asked.append((question, answer))
        if len(self._running) < RUNS_AT_ONCE:
            if len(self._asked) >= ASKED_MAX:
                self._go()
            elif self._timer is None:
                self._timer = loop.call_later(WAIT_S, self._go)
        return await answer

    def _go(self) -> None:
        """Answer the first of those who wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        asked, self._asked = self._asked[:ASKED_MAX], self._asked[ASKED_MAX:]
        if asked:
            task = asyncio.create_task(self._run(asked))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._asked and self._timer is None:
            self._go()

    async def _run(self, asked: list[tuple[Question, asyncio.Future[Answer]]]) -> None:
        answers: Sequence[Answer | Exception]
        try:
            answers = await self._answer_all([question for question, _ in asked])
        except Exception as error:  # noqa: BLE001 - raised again to each who asked
            answers = [error] * len(asked)
        for (_, future), answer in zip(asked, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
