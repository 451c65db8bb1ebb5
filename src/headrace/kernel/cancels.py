"""Cancellations that a driver swallowed. asyncio counts requests to cancel a task, so they are found and raised again.

One cause: on Python 3.11 `asyncio.wait_for` returns an answer that arrives together with the cancellation, and the
cancellation is forgotten. valkey-py sends every command so; asyncpg replaces a cancellation by an error of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


def require_not_cancelled() -> None:
    """At the head of a loop that outlives errors. Raises: CancelledError where a driver swallowed it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


@contextmanager
def kept_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end of a block inside which the task was cancelled, however the block ended."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
