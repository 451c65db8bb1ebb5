"""Wake-ups: a coalesced NOTIFY, one a queue, process and 10 ms in the long run, with a trailing one.

NOTIFY takes a lock that all commits share (8 producers that always notify: 13,200 -> 6,400 commits/s), so it
is rationed; with these 10 ms an idle worker starts a job p50 2.2 ms after the enqueue, with 50 ms it was
21. What was not used is saved, up to BURST hints: of jobs that come now and then, 50 a second at random, two in five
come within 10 ms of the one before, and waited for the trailing hint. A hint may be lost without harm: workers also poll.
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


class Ration:
    """How many hints of a queue may go out: BURST at once, and one a GAP_S in the long run. Moments are the caller's."""

    def __init__(self) -> None:
        self._whole_s: dict[int, float] = {}
        """When all of BURST will be there again, by queue id."""

    def wait_s(self, queue_id: int, now_s: float) -> float:
        """Seconds until a hint may go out; 0 or less: it may."""
        return self._whole_s.get(queue_id, now_s) - (BURST - 1) * GAP_S - now_s

    def take(self, queue_id: int, now_s: float) -> None:
        """One goes out."""
        whole_s = max(self._whole_s.get(queue_id, now_s), now_s) + GAP_S
        # A statement for several queues tells also of those whose ration is used up.
        self._whole_s[queue_id] = min(whole_s, now_s + BURST * GAP_S)


class Hints:
    """What this process may tell listeners, and is about to."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._ration = Ration()
        self._trailing: dict[int, asyncio.Task[None]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def is_due(self, queue_ids: set[int]) -> bool:
        """Whether the statement at hand should notify; else call `tell_later` once it has committed."""
        now_s = time.monotonic()
        if all(self._ration.wait_s(queue_id, now_s) > 0 for queue_id in queue_ids):
            return False
        for queue_id in queue_ids:
            self._ration.take(queue_id, now_s)
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
            await asyncio.sleep(self._ration.wait_s(queue_id, time.monotonic()))
            self._trailing.pop(queue_id, None)
            self._ration.take(queue_id, time.monotonic())
            await store.queues.hint_queue(self._postgres, queue_id)
        except HeadraceError as error:
            _often.info("hint_lost", queue_id=queue_id, error=error.text)
