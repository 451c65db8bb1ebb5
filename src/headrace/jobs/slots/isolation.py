"""Threads of sync handlers, and the processes that handlers fork.

No fork of a handler may become a second slot: it has copies of the slot's sockets and event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from types import coroutine
from typing import Any, Final, TypeVar

THREAD_NAME: Final = "headrace-handler"
Value = TypeVar("Value")
Code = Callable[[], None] | None


class HandlerThreads:
    """Daemon threads for sync handlers, one per concurrent call; the last used is used first.

    Threads persist, so that thread-local state of libraries (Django's connections) persists too.
    This is not an executor of the standard library: a handler past its timeout cannot be stopped,
    and would hold a place in the pool and delay the process's exit. Here its thread is abandoned
    and replaced.
    """

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Code]] = []
        self._working: set[asyncio.Future[None]] = set()
        self._home = fork_count()

    async def run(self, code: Callable[[], Any], abandoned: list[asyncio.Future[None]]) -> Any:
        """Run `code` in a thread, in this context; a cancelled caller abandons the thread.

        A future that is done when an abandoned thread has ended is appended to `abandoned`.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        # Errors are passed as values: a future refuses StopIteration, and one that raises
        # GeneratorExit closes the coroutines that wait for it.
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def report(result: Any, error: BaseException | None) -> None:
            ended.set_result(None)
            self._working.discard(ended)
            if not answer.done():
                answer.set_result((result, error))

        def work() -> None:
            result, error = None, None
            try:
                result = context.run(code)
            except BaseException as raised:  # noqa: BLE001 - raised again in the awaiting task
                error = raised
            exit_if_forked(self._home, 1 if error is not None else 0)
            # A loop that was closed meanwhile needs no answer.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(report, result, error)

        self._working.add(ended)
        thread = self._idle.pop() if self._idle else _start_thread()
        thread.put(work)
        try:
            result, error = await answer
        except BaseException:
            # The thread ends after the code, which cannot be interrupted.
            thread.put(None)
            abandoned.append(ended)
            raise
        self._idle.append(thread)
        if error is not None:
            raise error
        return result

    async def wait_idle(self, wait_s: float) -> bool:
        """Wait until no thread runs code, abandoned ones included. Return False after `wait_s`."""
        if self._working:
            await asyncio.wait(self._working, timeout=wait_s)
        return not self._working

    def close(self) -> None:
        """Let the idle threads end."""
        while self._idle:
            self._idle.pop().put(None)


def _start_thread() -> queue.SimpleQueue[Code]:
    works: queue.SimpleQueue[Code] = queue.SimpleQueue()
    threading.Thread(target=_run_thread, args=(works,), name=THREAD_NAME, daemon=True).start()
    return works


def _run_thread(works: queue.SimpleQueue[Code]) -> None:
    while (work := works.get()) is not None:
        work()
        # Otherwise the frame would keep the last payload alive until the next one.
        del work


class _Forks:
    """The number of forks behind this process, counted because getpid is a system call."""

    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.note)


def fork_count() -> int:
    """A number that differs between this process and its forked children: see `exit_if_forked`."""
    return _Forks.count


def hide_from_children(link: socket.socket, descriptors: Sequence[int]) -> None:
    """Close the slot's socket and `descriptors` in forked children, and reset their signals."""

    def let_go() -> None:
        for descriptor in (link.fileno(), *descriptors):
            with suppress(OSError):
                os.close(descriptor)
        # The wakeup socket of the loop is shared: a signal to the child would reach its parent.
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=let_go)


def exit_if_forked(home: int, code: int = 0) -> None:
    """End this process if it was forked since `fork_count` returned `home`."""
    if _Forks.count != home:
        os._exit(code)


@coroutine
def ending_children(home: int, code: Coroutine[Any, Any, Value]) -> Generator[Any, Any, Value]:
    """Await `code`; end any child that it forks where the child returns, raises or would wait.

    Such a child would continue in the slot's code, with the slot's sockets and the event loop's
    epoll, which it shares with its parent. Other processes that it leaves running are killed after
    the slot, by their process group.
    """
    resume: Any = code.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration as end:
            exit_if_forked(home)
            return end.value  # type: ignore[no-any-return]
        except BaseException:
            exit_if_forked(home, 1)
            # Otherwise the error would hold this frame, and the frame the error.
            value = None
            raise
        exit_if_forked(home)
        try:
            value = yield awaited
            resume = code.send
        except BaseException as error:  # noqa: BLE001 - a cancellation, passed on to `code`
            resume, value = code.throw, error
