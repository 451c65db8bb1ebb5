"""Waiting for a condition, with a deadline, without blocking the test's own servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def wait_until(
    ask: Callable[[], Awaitable[Any]], *, what: str, deadline_s: float = 20.0
) -> Any:
    """Ask again every 20 ms until the answer is true."""
    ends_s = time.monotonic() + deadline_s
    never = asyncio.Event()
    while not (answer := await ask()):
        assert time.monotonic() < ends_s, f"{what}: not within {deadline_s:.0f} s"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), 0.02)
    return answer
