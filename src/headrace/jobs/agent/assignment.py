"""Which slots may take work of which queue: importance, turns, and the fleet-wide maximum.

A slot is bound to a queue by the plan, or it floats. A floating slot goes to the most important
queue that has work, in turns among equals. It stays until that queue is empty, and after
QUEUE_SHARE_S goes to another queue that waits. Every 8th choice begins with the least important
queue, so that none starves.

A queue with many concurrent calls gets no floating slots while its bound slots have plenty of
room. Calls that wait for something else, such as a host that hangs, would otherwise hold all
floating slots, and queues without a slot of their own would wait too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.engines.postgres import Runner
from headrace.jobs import store
from headrace.jobs.agent.queue_state import QueueState
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.fleet.state import SlotRequest

LOWEST_FIRST_EVERY: Final = 8


@dataclass(frozen=True, slots=True)
class Assignment:
    """Pure decisions over all slots, the queues that may have work, and the clock. No I/O."""

    workers: Collection[WorkerProxy]
    waiting_queues: Sequence[QueueState]
    now_s: float

    def by_importance(self, decisions: int) -> list[QueueState]:
        """The most important queue first; among equals, the one served longest ago."""
        is_reversed = decisions % LOWEST_FIRST_EVERY == LOWEST_FIRST_EVERY - 1
        sign = -1 if is_reversed else 1
        return sorted(
            self.waiting_queues,
            key=lambda queue: (sign * queue.facts.importance, queue.last_served),
        )

    def workers_for(self, queue: QueueState) -> list[WorkerProxy]:
        """Slots with room for `queue`, within its allowance."""
        workers = self.workers_with_room(queue)
        if queue.allowance is None or not workers:
            return workers
        # Above a lowered allowance the surplus gets no further call, so that its slots become free.
        working = [worker for worker in self.workers if worker.works_on(queue)]
        allowed = working[: queue.allowance]
        room = queue.allowance - len(working)
        if room > 0:
            allowed += [worker for worker in workers if not worker.works_on(queue)][:room]
        return [worker for worker in workers if worker in allowed]

    def workers_with_room(self, queue: QueueState) -> list[WorkerProxy]:
        """Slots with room for `queue`: bound, floating that work it, and a share of idle ones."""
        found, idle = [], []
        for worker in self.workers:
            if worker.free_calls(queue) == 0:
                continue
            if self._is_for(worker, queue):
                found.append(worker)
            elif worker.bound is None and not worker.leases and not self._stays_elsewhere(worker):
                idle.append(worker)
        if any(worker.is_mostly_free(queue) for worker in found):
            return found
        equals = [
            other
            for other in self.waiting_queues
            if other.facts.importance == queue.facts.importance and not other.is_claiming
        ]
        share = -(-len(idle) // max(1, len(equals)))
        return found + idle[:share]

    def batches_to_prefetch(self, queue: QueueState, *, has_room: bool) -> int:
        """Leases to claim beyond those that slots have room for.

        If no slot has room, a claim is made only for at least half of the maximum, so that one
        claim returns many leases.
        """
        if queue.prefetch_max == 0:
            return 0
        slots = sum(self._is_for(worker, queue) for worker in self.workers)
        if queue.allowance is not None:
            slots = min(slots, queue.allowance)
        wanted = queue.prefetch_max * slots
        missing = wanted - len(queue.prefetched)
        return missing if has_room or 2 * missing >= wanted else 0

    def _is_for(self, worker: WorkerProxy, queue: QueueState) -> bool:
        is_other_waiting = any(other is not queue for other in self.waiting_queues)
        return worker.is_for(queue, self.now_s, is_other_waiting=is_other_waiting)

    def _stays_elsewhere(self, worker: WorkerProxy) -> bool:
        """Whether an idle floating slot waits for more work of its last queue."""
        queue = worker.queue
        return queue is not None and queue.keeps_slots(self.now_s) and self._is_for(worker, queue)


class Allowances:
    """The share of each queue's fleet-wide maximum of slots that this host may use.

    A slot may start work of a queue only within the host's allowance, whether bound or floating.
    Allowances are rows of the database. Their sum per queue never exceeds the queue's maximum,
    with or without a scheduler. A host lowers its own number before it reports it, so no other
    host can receive a slot that still works. `on_change` is called after each answer.
    """

    def __init__(
        self,
        queues: Mapping[int, QueueState],
        workers: Collection[WorkerProxy],
        on_change: Callable[[], None],
    ) -> None:
        self.is_due = asyncio.Event()
        """A queue has work and a free slot, but no allowance for it."""
        self._queues = queues
        self._workers = workers
        self._on_change = on_change
        self._calls = 0

    def note_need(self, queue: QueueState) -> None:
        """Request a larger allowance, unless the last answer was a refusal."""
        if queue.allowance is not None and not queue.is_short:
            self.is_due.set()

    async def renew(self, runner: Runner, host_id: int) -> None:
        """Release what no slot can use, request what is missing, apply the answer. Not reentrant.

        On error this host keeps what it had. Raises: PostgresDown, PostgresBusy.
        """
        self._calls += 1
        requests = [self._request(queue, time.monotonic()) for queue in self._queues.values()]
        answer = await store.fleet.allow_slots(runner, host_id, self._calls, requests)
        for request in requests:
            queue = self._queues[request.queue_id]
            # A queue that the database no longer has gets no answer, and has no jobs.
            queue.allowance = answer.get(request.queue_id, queue.allowance)
            queue.is_short = queue.allowance is not None and queue.allowance < request.wanted
        self._on_change()

    def _request(self, queue: QueueState, now_s: float) -> SlotRequest:
        used = sum(worker.works_on(queue) for worker in self._workers)
        usable = used + sum(
            not worker.works_on(queue) and worker.free_calls(queue) > 0 for worker in self._workers
        )
        kept = used if queue.allowance is None else max(used, min(queue.allowance, usable))
        if queue.allowance is not None:
            queue.allowance = min(queue.allowance, kept)
        wanted = usable if queue.keeps_slots(now_s) else kept
        return SlotRequest(queue_id=queue.queue_id, used=used, kept=kept, wanted=wanted)
