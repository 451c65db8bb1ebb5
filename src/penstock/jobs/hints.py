"""Wake-ups: a coalesced NOTIFY, at most one a queue, process and 10 ms, with a trailing one.

NOTIFY takes a lock that all commits share (8 producers that always notify: 13,200 -> 6,400 commits/s), so it
is rationed; with these 10 ms an idle worker starts a job p50 2.2 ms after the enqueue, with 50 ms it was
21. A hint may be lost without harm: workers also poll.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from penstock.engines.postgres import Postgres
from penstock.jobs import store
from penstock.kernel.errors import PenstockError
from penstock.kernel.logs import logger

GAP_S: Final = 0.01
_log: Final = logger(__name__)


class Hints:
    """What this process last told listeners, by queue id."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._told_s: dict[int, float] = {}
        self._trailing: dict[int, asyncio.Task[None]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def is_due(self, queue_ids: set[int]) -> bool:
        """Whether the statement at hand should notify; else call `tell_later` once it has committed."""
        now_s = time.monotonic()
        if all(now_s - self._told_s.get(queue_id, 0.0) < GAP_S for queue_id in queue_ids):
            return False
        self._told_s.update(dict.fromkeys(queue_ids, now_s))
        return True

    def tell_later(self, queue_ids: set[int]) -> None:
        """See that a trailing hint goes out from now on.

        One that goes out before the commit is of no use: such jobs waited for the poll.
        """
        for queue_id in queue_ids:
            # A done one was cancelled with its loop; another thread's loop may be taking its own out.
            trailing = self._trailing.get(queue_id)
            if trailing is None or trailing.done():
                trailing = asyncio.create_task(self._tell_later(queue_id))
                self._trailing[queue_id] = trailing
                # It leaves `_trailing` before it is sent, so that later jobs have one of their own.
                self._under_way.add(trailing)
                trailing.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Let the hints that are on their way on this loop go out."""
        here = asyncio.get_running_loop()
        await asyncio.gather(*[t for t in list(self._under_way) if t.get_loop() is here])

    async def _tell_later(self, queue_id: int) -> None:
        try:
            told_s = self._told_s.get(queue_id, 0.0)
            await asyncio.sleep(told_s + GAP_S - time.monotonic())
            self._trailing.pop(queue_id, None)
            self._told_s[queue_id] = time.monotonic()
            await store.queues.hint_queue(self._postgres, queue_id)
        except PenstockError as error:
            _log.info("hint_lost", queue_id=queue_id, error=error.text)
