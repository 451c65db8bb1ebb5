"""Waiting for a condition inside a test's event loop, with a deadline instead of a guess."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def wait_true(
    ask: Callable[[], Any | Awaitable[Any]], *, what: str = "", deadline_s: float = 60
) -> Any:
    """Ask (a plain or an async function) again until the answer is true; return it.

    Raises: AssertionError naming `what` after the deadline.
    """
    ends_s = time.monotonic() + deadline_s
    while True:
        answer = ask()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < ends_s, f"{what or ask}: not within {deadline_s:g} s"
        await asyncio.sleep(0.01)
