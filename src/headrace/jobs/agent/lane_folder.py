"""Folds the journal of lanes beside the claims, while these find lanes enough without it.

A claim of lanes is on the critical path: the next one of its queue waits for it. It folds the
journal itself only when it needs more lanes. Otherwise lanes of new jobs are prepared here, so that
they take their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from headrace.jobs.agent.queue_state import QueueState
from headrace.jobs.leases import LeaseManager
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import require_not_cancelled

EVENTS_MAX: Final = 1_000
"""Journal rows of one statement: it locks their lanes until it ends."""
_often: Final = SparseLogger(logger(__name__))


class LaneFolder:
    """Folds the journals of the queues of one host, one statement per queue at a time.

    Folding is repeatable: what a stop interrupts is rolled back, and the next claim that needs
    lanes folds it.
    """

    def __init__(self, leases: LeaseManager) -> None:
        self._leases = leases
        self._folding: dict[int, asyncio.Task[None]] = {}

    def start(self, queue: QueueState) -> None:
        """Fold what the journal of `queue` has now."""
        if queue.queue_id not in self._folding:
            task = asyncio.create_task(self._fold(queue))
            self._folding[queue.queue_id] = task
            task.add_done_callback(lambda _: self._folding.pop(queue.queue_id, None))

    async def stop(self) -> None:
        """Stop folding: claims fold what is left."""
        await cancel_tasks(self._folding.values())

    async def _fold(self, queue: QueueState) -> None:
        try:
            while (
                await self._leases.fold_lanes(queue.queue_id, queue.lane_cursor, EVENTS_MAX)
                == EVENTS_MAX
            ):
                require_not_cancelled()
        except HeadraceError as error:
            _often.warning("fold_failed", queue=queue.facts.queue, error=error.text)


async def cancel_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel `tasks` and wait until they have ended."""
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
