"""Claims jobs for all slots of a host, assigns them to slots, and records their outcomes.

One claim serves many slots. While a claim is in progress, slots that become free wait for the next
one, and the acks of their jobs are sent with it.

Batches of a quick task are prefetched, for PREFETCH_S or one batch per slot. They wait here rather
than in a slot, go to the slot that is free first, and return to the queue after PREFETCH_KEPT_S.
Jobs of lanes are prefetched only for quicker calls: they must start within the limiter's slack.

A queue's wake flag is cleared BEFORE its claim, so that notifications during the claim survive it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from headrace.jobs.agent.assignment import Allowances, Assignment
from headrace.jobs.agent.crash_attribution import acks_of_crashed, returned_ack
from headrace.jobs.agent.lane_folder import LaneFolder, cancel_tasks
from headrace.jobs.agent.queue_state import PREFETCH_S, RETRY_AFTER_S, PrefetchedLease, QueueState
from headrace.jobs.agent.token_batcher import TokenBatcher
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.leases import RECONNECT, LeaseManager
from headrace.jobs.messages import Ack, FromSlot, Progress, Ready, Spend, SpendAnswer, Work
from headrace.jobs.slots.status_board import SlotStatus
from headrace.jobs.store.claim_cursor import ClaimCursor
from headrace.jobs.store.leases import Claims
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import require_not_cancelled, wait_event

CLAIMS_AT_ONCE: Final = 3
LANE_STARTS_MAX: Final = 50
"""For concurrent calls in a slot: more would not start within their slack and return unstarted."""
JOBS_PER_CLAIM_MAX: Final = 2_000
LEASES_PER_CLAIM_MAX: Final = 50
PREFETCH_KEPT_S: Final = 0.25
ENDS: Final = frozenset({"done", "fail", "cancel", "quarantined"})
"""Outcomes that end a job."""
COMES_BACK: Final = frozenset({"returned", "unstarted", "lost"})
"""Outcomes that make a job ready again at its former due time."""
RESCAN_AFTER_S: Final = 0.5
POLL_GAP_S: Final = 0.1
POLL_MIN_S: Final = 0.01
CLAIMS_END_S: Final = 2.0
_often: Final = SparseLogger(logger(__name__))


class Dispatcher:
    """Serves the slots of one host row until it is drained or aborted."""

    def __init__(
        self, leases: LeaseManager, queues: Sequence[QueueState], poll_s: Callable[[], float]
    ) -> None:
        self._leases = leases
        self._queues = {queue.queue_id: queue for queue in queues}
        self._queue_by_name = {queue.facts.queue: queue for queue in queues}
        self._poll_s = poll_s
        self._workers: dict[WorkerProxy, None] = {}
        self._claims: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._tokens = TokenBatcher(leases.spend)
        self._folder = LaneFolder(leases)
        self._decisions = 0
        self._is_poll_due = asyncio.Event()
        self._is_dispatch_planned = False
        self._is_ending = False
        self._timer: asyncio.TimerHandle | None = None
        self.allowances = Allowances(self._queues, self._workers.keys(), self._plan_dispatch)
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.jobs_run = 0
        leases.on_settled = self._on_settled

    @property
    def queues(self) -> Iterable[QueueState]:
        """All queues of this host."""
        return self._queues.values()

    @property
    def workers(self) -> Iterable[WorkerProxy]:
        """All slots of this host."""
        return self._workers

    @property
    def jobs_open(self) -> int:
        """The number of jobs in slots."""
        return sum(worker.jobs_open for worker in self._workers)

    def queue(self, name: str) -> QueueState | None:
        """The queue of that name, if declared."""
        return self._queue_by_name.get(name)

    def wake(self, queue_id: int) -> None:
        """Look for work in a queue."""
        if (queue := self._queues.get(queue_id)) is not None:
            queue.wake()
            self._plan_dispatch()

    def wake_all(self) -> None:
        """Look for work in every queue."""
        for queue in self._queues.values():
            queue.wake()
        self._plan_dispatch()

    def add(self, worker: WorkerProxy) -> None:
        """Serve a slot; it receives work after its message `Ready`."""
        self._workers[worker] = None

    def bind(self, worker: WorkerProxy, queue: QueueState | None) -> None:
        """Bind a slot to one queue, or let it float; its running jobs continue."""
        worker.bound = queue
        self._plan_dispatch()

    def receive(self, worker: WorkerProxy, message: FromSlot) -> None:
        """Handle a message of a slot; messages about its process are ignored."""
        match message:
            case Ack():
                self._record(worker, message)
            case Ready():
                worker.accepts_work = not self._is_ending
                self._plan_dispatch()
            case Spend():
                self._start_background(self._take_tokens(worker, message))
            case Progress():
                self._leases.note_progress(message)

    def add_slot_time(self, elapsed_s: float) -> None:
        """Count the time since the last call for the queues that slots are bound to or work."""
        for worker in self._workers:
            queue = worker.bound or (worker.queue if worker.leases else None)
            if queue is not None:
                queue.counts.slot_s += elapsed_s

    def handle_crash(
        self, worker: WorkerProxy, status: SlotStatus, why: str, *, is_overtime: bool = False
    ) -> int:
        """Settle the jobs of a slot that died. Return how many it had."""
        self._workers.pop(worker, None)
        worker.accepts_work = False
        jobs = worker.jobs_open
        backoff = self._leases.config.backoff
        acks = acks_of_crashed(worker, status, why, is_overtime=is_overtime, backoff=backoff)
        if (queue := worker.queue) is not None:
            for ack in acks:
                self._settle(queue, ack)
        worker.clear()
        self._plan_dispatch()
        return jobs

    async def run(self) -> None:
        """Look for work until cancelled. Raises: the first claim error that is not retryable."""
        polling = asyncio.create_task(self._poll_queues())
        try:
            await asyncio.wait({polling, self._fault}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (polling, self._fault):
                if ended.done():
                    ended.result()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def end_claims(self) -> None:
        """Stop claiming and return prefetched leases; running jobs continue."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        if self._claims:
            await asyncio.wait(self._claims, timeout=CLAIMS_END_S)
        await cancel_tasks(self._claims)
        await self._folder.stop()
        for worker in self._workers:
            worker.accepts_work = False
        for queue in self._queues.values():
            self._return_prefetched(queue)

    async def abort(self) -> None:
        """Drop all leases without an ack: the host row is lost, other hosts run the jobs."""
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        await cancel_tasks(self._claims | self._background)
        await self._folder.stop()
        for queue in self._queues.values():
            queue.prefetched.clear()
        for worker in self._workers:
            worker.accepts_work = False
            worker.clear()

    # Incoming: acks, freed lanes, token requests

    def _record(self, worker: WorkerProxy, ack: Ack) -> None:
        """Record an ack of a slot. Acks of leases that the slot no longer has are dropped."""
        lease, queue = worker.leases.get(ack.lease_id), worker.queue
        if lease is None or queue is None:
            return
        jobs = len(lease.ids if ack.outcomes is None else ack.outcomes)
        if ack.calls:
            queue.note_calls(ack.calls, jobs, ack.run_s)
        self.jobs_run += jobs
        open_before = lease.open_count
        self._settle(queue, ack, jobs)
        # `LeaseManager` closed them too, unless it dropped the lease after refused outcomes.
        lease.close(ack.outcomes)
        worker.release(lease, open_before - lease.open_count)
        self._plan_dispatch()

    def _settle(self, queue: QueueState, ack: Ack, jobs: int = 0) -> None:
        if ack.outcomes is None:
            queue.counts.ended += jobs
        else:
            kinds = [outcome.kind for outcome in ack.outcomes.values()]
            queue.counts.ended += sum(kind in ENDS for kind in kinds)
            if not queue.is_rescan_planned and not COMES_BACK.isdisjoint(kinds):
                queue.is_rescan_planned = True
                self._start_background(self._rescan(queue))
        self._leases.settle(ack)

    async def _rescan(self, queue: QueueState) -> None:
        """Claim from the beginning again: jobs returned that are behind the cursor."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RESCAN_AFTER_S):
                await self._leases.flush()
        queue.is_rescan_planned = False
        queue.cursor = ClaimCursor()
        queue.wake()
        self._plan_dispatch()

    def _on_settled(self, limiters: Iterable[str]) -> None:
        """Claim again from lanes whose jobs were settled, in every queue of the limiter."""
        wanted, now_s = set(limiters), time.monotonic()
        for queue in self._queues.values():
            if queue.facts.limiter in wanted:
                queue.lanes_due_s = min(queue.lanes_due_s, now_s + queue.empty_gap_s)
        self._plan_dispatch()

    async def _take_tokens(self, worker: WorkerProxy, request: Spend) -> None:
        answer = SpendAnswer(request.call, None)
        if (queue := self._queue_by_name.get(request.queue)) is not None:
            answer = await self._tokens.take(queue.queue_id, request)
        worker.channel.send(answer)

    def _start_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Outgoing: claims and assignments

    def _plan_dispatch(self) -> None:
        if not self._is_dispatch_planned and not self._is_ending:
            self._is_dispatch_planned = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Assign prefetched leases, start the claims that make sense now, set the next timer."""
        self._is_dispatch_planned = False
        if self._is_ending:
            return
        now_s = time.monotonic()
        waiting = [queue for queue in self._queues.values() if queue.has_work(now_s)]
        assignment = Assignment(self._workers, waiting, now_s)
        for queue in self._queues.values():
            if queue.prefetched:
                self._assign_prefetched(queue, assignment)
        for queue in assignment.by_importance(self._decisions):
            if len(self._claims) >= CLAIMS_AT_ONCE:
                break
            self._try_claim(queue, assignment)
        self._set_timer(now_s)

    def _try_claim(self, queue: QueueState, assignment: Assignment) -> None:
        """Start a claim if slots have room for the jobs it may return."""
        now_s = assignment.now_s
        is_lanes = queue.lanes_due_s <= now_s and (queue.is_lanes_turn or not queue.may_have_jobs)
        workers = assignment.workers_for(queue)
        if len(workers) < len(assignment.workers_with_room(queue)):
            self.allowances.note_need(queue)
        if queue.facts.batch is not None:
            batch = queue.batch_sizer.batch_size(queue.facts.batch)
            leases_max = sum(worker.free_calls(queue) for worker in workers)
            if not is_lanes or queue.call_s <= PREFETCH_S:
                leases_max += assignment.batches_to_prefetch(queue, has_room=bool(workers))
        else:
            # One lease per slot: slots with much less room than others wait for the next claim.
            most = max((worker.free_calls(queue) for worker in workers), default=0)
            if now_s < queue.refill_due_s and queue.is_refill(most):
                return
            workers = [worker for worker in workers if 2 * worker.free_calls(queue) >= most]
            batch = min((worker.free_calls(queue) for worker in workers), default=1)
            if is_lanes:
                batch = min(batch, LANE_STARTS_MAX)
            leases_max = len(workers)
        leases_max = min(leases_max, LEASES_PER_CLAIM_MAX, max(1, JOBS_PER_CLAIM_MAX // batch))
        if leases_max == 0 or any(waiting.must_run_alone for waiting in queue.prefetched):
            return
        self._reserve(queue, workers, now_s)
        queue.is_lanes_turn = not is_lanes
        task = asyncio.create_task(
            self._claim(queue, workers, batch=batch, leases_max=leases_max, is_lanes=is_lanes)
        )
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)

    def _reserve(self, queue: QueueState, workers: list[WorkerProxy], now_s: float) -> None:
        queue.is_claiming, queue.claimed_s = True, now_s
        for worker in workers:
            worker.is_reserved = True
            if worker.queue is not queue:
                worker.queue, worker.queue_since_s = queue, now_s
        if any(worker.bound is None for worker in workers):
            self._decisions += 1
            queue.last_served = self._decisions

    async def _claim(
        self,
        queue: QueueState,
        workers: list[WorkerProxy],
        *,
        batch: int,
        leases_max: int,
        is_lanes: bool,
    ) -> None:
        sent_s = time.monotonic()
        claims = None
        try:
            if is_lanes:
                # Until the claim, a notification or the poll of all queues finds a lane.
                queue.lanes_due_s = math.inf
                claims = await self._leases.claim_lanes(
                    queue.queue_id, leases_max=leases_max, batch=batch, cursor=queue.lane_cursor
                )
            else:
                queue.may_have_jobs = False
                claims = await self._leases.claim_ready(
                    queue.queue_id, queue.cursor, leases_max=leases_max, batch=batch
                )
            queue.failures = 0
        except HeadraceError as error:
            if not error.retryable:
                self._fail(error)
            self._note_failure(queue, error)
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._fail(error)
        finally:
            queue.is_claiming = False
            for worker in workers:
                worker.is_reserved = False
                if claims is None and not worker.leases:
                    worker.queue = None
        if claims is not None:
            self._distribute(queue, claims, workers, sent_s=sent_s, is_lanes=is_lanes)
        self._plan_dispatch()

    def _fail(self, error: BaseException) -> None:
        if not self._fault.done():
            self._fault.set_exception(error)

    def _note_failure(self, queue: QueueState, error: HeadraceError) -> None:
        queue.failures += 1
        queue.wake()
        queue.blocked_until_s = time.monotonic() + RECONNECT.delay_s(queue.failures)
        _often.warning("claim_failed", queue=queue.facts.queue, error=error.text)

    def _distribute(
        self,
        queue: QueueState,
        claims: Claims,
        workers: list[WorkerProxy],
        *,
        sent_s: float,
        is_lanes: bool,
    ) -> None:
        """Assign the claimed leases to slots, and note when to claim again."""
        now_s = time.monotonic()
        start_before_s = None
        if is_lanes:
            queue.empty_claims = 0 if claims.leases else queue.empty_claims + 1
        if not is_lanes:
            self._note_ready(queue, claims)
        elif claims.leases:
            queue.lanes_due_s = 0.0
            if claims.is_full:
                self._folder.start(queue)
            start_before_s = sent_s + (claims.slack_s or 0.0)
        else:
            queue.note_no_lanes(claims.wait_s, sent_s + self._poll_s())
        for claim in claims.leases:
            work = claim.as_work(queue.facts.queue, claims.retries, start_before_s)
            self._assign_or_prefetch(queue, work, workers, now_s)
        if not queue.keeps_slots(now_s):
            for worker in workers:
                if not worker.leases and worker.bound is None:
                    worker.queue = None

    def _note_ready(self, queue: QueueState, claims: Claims) -> None:
        """Learn from a claim of jobs without lanes whether more may be waiting.

        A claim that did not see all jobs may have passed some behind its cursor.
        """
        if not queue.cursor.saw_all and (claims.leases or queue.cursor.sees_all_next):
            queue.may_have_jobs = True
        elif not claims.leases and queue.was_empty:
            # The notification may have been for a job that is due in a moment: poll for its time.
            self._is_poll_due.set()
        queue.was_empty = not claims.leases or queue.cursor.saw_all
        if claims.moved:
            queue.lanes_due_s = 0.0

    def _assign_or_prefetch(
        self, queue: QueueState, work: Work, workers: Iterable[WorkerProxy], now_s: float
    ) -> None:
        """Assign `work` to a slot with room, or keep it prefetched."""
        is_concurrent = queue.facts.batch is None and queue.facts.concurrency > 1
        must_run_alone = is_concurrent and work.losses[0] >= self._leases.config.losses_max - 1 > 0
        lease = self._leases.in_flight(work.lease_id)
        waiting = PrefetchedLease(work, lease, now_s, must_run_alone)
        if not self._try_assign(queue, waiting, workers):
            if work.start_before_s is not None and queue.call_s > PREFETCH_S:
                self._settle(queue, returned_ack(work))
            else:
                queue.prefetched.append(waiting)

    def _try_assign(
        self, queue: QueueState, waiting: PrefetchedLease, workers: Iterable[WorkerProxy]
    ) -> bool:
        best, room = None, 0
        for worker in workers:
            free_calls = worker.free_calls(queue)
            if free_calls > room and not (waiting.must_run_alone and worker.leases):
                best, room = worker, free_calls
        if best is None:
            return False
        if best.queue is not queue:
            best.queue_since_s = time.monotonic()
        best.assign(queue, waiting.work, waiting.lease)
        best.runs_alone = waiting.must_run_alone
        return True

    def _assign_prefetched(self, queue: QueueState, assignment: Assignment) -> None:
        """Assign prefetched leases to slots that became free; return those that waited too long."""
        workers, waiting = assignment.workers_for(queue), queue.prefetched
        while waiting and workers and self._try_assign(queue, waiting[0], workers):
            waiting.popleft()
        if waiting and assignment.now_s - waiting[0].since_s > PREFETCH_KEPT_S:
            queue.call_s = max(queue.call_s, PREFETCH_KEPT_S)
            if not waiting[0].must_run_alone:
                self._return_prefetched(queue)

    def _return_prefetched(self, queue: QueueState) -> None:
        while queue.prefetched:
            self._settle(queue, returned_ack(queue.prefetched.popleft().work))

    def _set_timer(self, now_s: float) -> None:
        """Wake for the next due lane, expiring prefetched lease, or claim to retry."""
        due_s = now_s + 60.0
        for queue in self._queues.values():
            if queue.is_claiming:
                continue
            if queue.prefetched:
                old_s = queue.prefetched[0].since_s + PREFETCH_KEPT_S + 0.01
                due_s = min(due_s, max(old_s, now_s + RETRY_AFTER_S))
            if now_s < queue.blocked_until_s:
                due_s = min(due_s, queue.blocked_until_s)
            elif now_s < queue.lanes_due_s:
                due_s = min(due_s, queue.lanes_due_s)
            elif now_s < queue.refill_due_s:
                due_s = min(due_s, queue.refill_due_s)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._plan_dispatch)

    async def _poll_queues(self) -> None:
        """Poll which queues have work, or when they will: notifications may be lost."""
        while True:
            require_not_cancelled()
            wait_s = self._poll_s()
            self._is_poll_due.clear()
            try:
                ahead = await self._leases.queues_with_work(list(self._queues))
                for queue_id in ahead.ready:
                    self._queues[queue_id].may_have_jobs = True
                for queue_id in ahead.laned:
                    self._queues[queue_id].lanes_due_s = 0.0
                self._plan_dispatch()
                if ahead.next_s is not None:
                    wait_s = min(wait_s, max(ahead.next_s, POLL_MIN_S))
            except HeadraceError as error:
                if not error.retryable:
                    raise
                _often.warning("poll_failed", error=error.text)
            await asyncio.sleep(min(wait_s, POLL_GAP_S))
            if wait_s > POLL_GAP_S:
                await wait_event(self._is_poll_due, wait_s - POLL_GAP_S)
