"""Reads that are too slow for each page: one at a time, and the last answer is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.kernel.logs import logger

KEPT_WAIT_S: Final = 1.0
OUTDATED_WAIT_S: Final = 2.0
"""Wait for a newer answer if the last is outdated: a probe of a dead node takes over a second."""
LOAD_S_MAX: Final = 60.0
"""Timeout of a read, far over the wait of any page for it."""
_log: Final = logger(__name__)


class KeptReads:
    """The last answer of each read by name, shared by all pages of one console."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Any]] = {}
        self._loading: dict[str, asyncio.Task[Any]] = {}

    async def kept(self, name: str, for_s: float, call: Callable[[], Awaitable[Any]]) -> Any:
        """What `call` returned, at most `for_s` ago; for reads that are too slow for each page.

        One that takes longer than KEPT_WAIT_S continues without the page, which gets what was
        returned before; `age_s` is its age. An answer that is older than twice `for_s`, as after a
        time without pages, is returned only after OUTDATED_WAIT_S. After LOAD_S_MAX a read ends,
        and the next page starts another. Raises: TimeoutError, and what `call` raises.
        """
        known = self._kept.get(name)
        if known is not None and time.monotonic() - known[0] < for_s:
            return known[1]
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.ensure_future(self._load(name, call))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if known is None:
            return await asyncio.shield(task)
        is_outdated = time.monotonic() - known[0] > 2 * for_s
        await asyncio.wait([task], timeout=OUTDATED_WAIT_S if is_outdated else KEPT_WAIT_S)
        return task.result() if task.done() else known[1]

    async def _load(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(LOAD_S_MAX) as limit:
                found = await call()
        except TimeoutError:
            if limit.expired():
                _log.warning("page_data_not_read", name=name, timeout_s=LOAD_S_MAX)
            raise
        finally:
            del self._loading[name]
        self._kept[name] = time.monotonic(), found
        return found

    def remember(self, name: str, value: Any) -> None:
        """Keep a value for `last`."""
        self._kept[name] = time.monotonic(), value

    def last(self, name: str) -> Any:
        """The value that was kept last under `name`; None if there is none."""
        return self._kept.get(name, (0.0, None))[1]

    def age_s(self, name: str) -> float:
        """Seconds since the last answer of `kept` for `name`, while a newer one is read; else 0.

        An answer may be old only because no page has read it since.
        """
        known = self._kept.get(name) if name in self._loading else None
        return time.monotonic() - known[0] if known is not None else 0.0
