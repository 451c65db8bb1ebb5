"""Retry delays, background tasks, waits with a limit, swallowed cancellations, deaths of roles, and
crash points for tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")
DEATHS_FILE: Final = "run/role-deaths.json"
CRASH_ENV: Final = "HEADRACE_CRASH_AT"
_crash_name, _, _crash_pass = os.environ.get(CRASH_ENV, "").partition(":")
_passes_left: Final = {_crash_name: int(_crash_pass or 1)} if _crash_name else {}


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter: `first_s` doubles with each attempt up to `max_s`.

    Jitter spreads retries of many callers (Brooker, "Exponential Backoff And Jitter", AWS, 2015).
    Half of the delay is a floor, so that a single retry is never immediate.
    """

    first_s: float
    max_s: float

    def delay_s(self, attempt: int, *, draw: float | None = None) -> float:
        """Seconds to wait after `attempt` failures (from 1); `draw` in [0, 1) fixes the jitter."""
        cap_s = min(self.max_s, self.first_s * 2.0 ** min(max(attempt, 1) - 1, 62))
        jitter = random.random() if draw is None else draw
        return cap_s * (0.5 + 0.5 * jitter)


class BackgroundTasks(set["asyncio.Task[Any]"]):
    """Tasks that run beside their owner. Each is kept until it ends."""

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run `work` as a task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait for their end."""
        tasks = list(self)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`, at most `timeout_s`. Return whether it is set.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


def require_not_cancelled() -> None:
    """Raise CancelledError if a driver swallowed the cancellation of this task.

    Call it at the start of a loop that continues after errors.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


@contextmanager
def preserve_cancellation() -> Iterator[None]:
    """Raise CancelledError after the block if the task was cancelled inside it.

    On Python 3.11 `asyncio.wait_for` drops a cancellation that arrives together with a result, and
    valkey-py sends each command through it. asyncpg replaces a cancellation by its own error.
    asyncio counts requests to cancel a task, which reveals these cases.
    """
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


class RoleDeaths:
    """The last death of each role of `headrace up`, in a file of the data folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DEATHS_FILE
        self._last: dict[str, dict[str, Any]] = {}

    def clear(self) -> None:
        """Forget the deaths of an earlier run. Raises: OSError."""
        self._path.unlink(missing_ok=True)

    def note(self, role: str, facts: Mapping[str, Any]) -> None:
        """Store the death of a role: its exit code, and its deaths in a row. Raises: OSError."""
        self._last[role] = {"died_at_s": time.time(), **facts}
        draft = self._path.with_suffix(".draft")
        draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps(self._last))
        draft.replace(self._path)

    @staticmethod
    def read(folder: Path, *, within_s: float) -> dict[str, dict[str, Any]]:
        """Deaths of the last `within_s` since `headrace up` was started. Raises: OSError."""
        path, since_s = folder / DEATHS_FILE, time.time() - within_s
        found = json.loads(path.read_text()) if path.exists() else {}
        return {role: death for role, death in found.items() if death["died_at_s"] > since_s}


def crash_point(name: str) -> None:
    """Kill this process with SIGKILL if HEADRACE_CRASH_AT is `name`, or `name:3` at pass 3.

    Without the variable it costs one dictionary lookup. It lets a test break the promise of the
    released program at an exact line.
    """
    left = _passes_left.get(name)
    if left is None:
        return
    _passes_left[name] = left - 1
    if left == 1:
        os.kill(os.getpid(), signal.SIGKILL)
