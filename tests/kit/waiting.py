"""Waits for a condition inside a test's event loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def wait_true(
    ask: Callable[[], Any | Awaitable[Any]], *, what: str = "", deadline_s: float = 60
) -> Any:
    """Call `ask`, plain or async, until its result is true; return the result.

    The interval grows from 10 ms to 50 ms. Raises: AssertionError naming `what` at the deadline.
    """
    began_s = time.monotonic()
    ends_s = began_s + deadline_s
    while True:
        answer = ask()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        now_s = time.monotonic()
        assert now_s < ends_s, f"{what or ask}: not within {deadline_s:g} s"
        await asyncio.sleep(min(0.05, max(0.01, (now_s - began_s) / 20)))
