"""Processes that a handler forks: they are its own, and none of them may become a second slot.

A child that returns from the handler would go on in the slot's code, with the slot's sockets and the event loop's
epoll, which it shares with its parent. So it ends where a step of the handler ends, and holds nothing of the slot
from its first moment on. What it leaves running is ended after the slot, by its process group.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Coroutine, Generator, Sequence
from contextlib import suppress
from types import coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


class _Forks:
    """How many forks lie behind this process: counted, since asking for the pid is a system call."""

    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.note)


def forks_behind() -> int:
    """Tells a process from its children: what `leave_if_forked` compares with."""
    return _Forks.count


def hide_from_children(link: socket.socket, descriptors: Sequence[int]) -> None:
    """Let no forked child hold the slot's socket or `descriptors`, or answer signals in the slot's place."""

    def let_go() -> None:
        for descriptor in (link.fileno(), *descriptors):
            with suppress(OSError):
                os.close(descriptor)
        # The wakeup socket of the loop is shared: a signal to the child would reach its parent.
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=let_go)


def leave_if_forked(home: int, code: int = 0) -> None:
    """End this process, where it was forked since `forks_behind` was `home`."""
    if _Forks.count != home:
        os._exit(code)


@coroutine
def ending_children(home: int, code: Coroutine[Any, Any, Value]) -> Generator[Any, Any, Value]:
    """Await `code`; a child that it forks ends where it returns, raises or would wait."""
    resume: Any = code.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration as end:
            leave_if_forked(home)
            return end.value  # type: ignore[no-any-return]
        except BaseException:
            leave_if_forked(home, 1)
            # Else the error would hold this frame, and the frame the error.
            value = None
            raise
        leave_if_forked(home)
        try:
            value = yield awaited
            resume = code.send
        except BaseException as error:  # noqa: BLE001 - a cancellation, passed on to `code`
            resume, value = code.throw, error
