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

    Asked each 10 ms at first, then each twentieth of the time waited so far: what comes late costs fewer questions.
    Raises: AssertionError naming `what` after the deadline.
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
