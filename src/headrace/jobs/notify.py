"""Notifies agents of new jobs: a rate-limited NOTIFY per queue and process.

NOTIFY takes a lock that all commits share, so it is limited to one per queue and GAP_S in the long
run. Unused notifications are saved, up to BURST, so that jobs enqueued now and then are not
delayed. After suppressed notifications a trailing one follows. A lost notification does no harm:
agents also poll.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger

GAP_S: Final = 0.01
BURST: Final = 5
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class NotifyRate:
    """A token bucket per queue: BURST at once, one per GAP_S in the long run. No I/O."""

    def __init__(self) -> None:
        self._whole_s: dict[int, float] = {}
        """When the whole BURST is available again, by queue id."""

    def wait_s(self, queue_id: int, now_s: float) -> float:
        """Seconds until a notification is allowed; 0 or less: now."""
        return self._whole_s.get(queue_id, now_s) - (BURST - 1) * GAP_S - now_s

    def take(self, queue_id: int, now_s: float) -> None:
        """Count a notification that is sent."""
        whole_s = max(self._whole_s.get(queue_id, now_s), now_s) + GAP_S
        # A statement for several queues also notifies those that are over their limit.
        self._whole_s[queue_id] = min(whole_s, now_s + BURST * GAP_S)


class Notifier:
    """The notifications of this process."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._rate = NotifyRate()
        self._trailing: dict[int, asyncio.Task[None]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def is_due(self, queue_ids: set[int]) -> bool:
        """Whether this statement should notify; else call `notify_later` after its commit."""
        now_s = time.monotonic()
        if all(self._rate.wait_s(queue_id, now_s) > 0 for queue_id in queue_ids):
            return False
        for queue_id in queue_ids:
            self._rate.take(queue_id, now_s)
        return True

    def notify_later(self, queue_ids: set[int]) -> None:
        """Send a trailing notification. Call after the commit: an earlier one would find no job."""
        for queue_id in queue_ids:
            # A done one was cancelled with its loop, or another thread's loop is removing it.
            trailing = self._trailing.get(queue_id)
            if trailing is None or trailing.done():
                trailing = asyncio.create_task(self._notify_later(queue_id))
                self._trailing[queue_id] = trailing
                # It leaves `_trailing` before it is sent, so that later jobs get their own.
                self._under_way.add(trailing)
                trailing.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Wait until the pending notifications of this loop are sent."""
        here = asyncio.get_running_loop()
        await asyncio.gather(*[t for t in list(self._under_way) if t.get_loop() is here])

    async def _notify_later(self, queue_id: int) -> None:
        try:
            await asyncio.sleep(self._rate.wait_s(queue_id, time.monotonic()))
            self._trailing.pop(queue_id, None)
            self._rate.take(queue_id, time.monotonic())
            await store.queues.hint_queue(self._postgres, queue_id)
        except HeadraceError as error:
            _often.info("notification_lost", queue_id=queue_id, error=error.text)
