"""The leases of one host: claiming them, and recording the outcome of every job exactly once.

A lease belongs to a host row. `LeaseManager` claims and settles for all slots of a host. It tracks
which leases this process has, because a claim can commit while its answer is lost: such a lease
belongs to a live host and would never expire. Leases that `LeaseManager` does not have, but the
database has at two heartbeats in a row, are returned.

The lease row itself is the fence: settling deletes or updates it under its lock, so a worker that
was presumed dead can record nothing.

No job waits until its outcome is recorded. Acks of leases without lanes whose jobs are all done are
sent with the next claim, so that both take one commit. Other acks, and those without a claim within
FLUSH_AFTER_S, go into a statement for many leases, one statement at a time. While the database is
down, all outcomes stay buffered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.engines.postgres_errors import PostgresBusy
from headrace.jobs import store
from headrace.jobs.messages import Ack, Outcome, Progress
from headrace.jobs.model import OUTCOMES, JobsConfig, jobs_finished, jobs_wait_seconds, leases_lost
from headrace.jobs.outcomes import (
    DONE,
    AckBatch,
    AckBuffer,
    InFlightLease,
    final_outcome,
    is_all_done,
    readable_text,
)
from headrace.jobs.sql import SQL
from headrace.jobs.store.claim_cursor import ClaimCursor, LaneCursor, PollCursor
from headrace.jobs.store.leases import Claims, WorkAhead
from headrace.kernel import spans
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import Backoff, crash_point, require_not_cancelled

_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)
_FINISHED: Final = {kind: jobs_finished.labels(outcome=kind) for kind in OUTCOMES}
RECONNECT: Final = Backoff(0.1, 3.0)
FLUSH_AFTER_S: Final = 0.005
BUSY_AFTER_S: Final = 0.05
PROGRESS_AFTER_S: Final = 0.25
LEASES_PER_STATEMENT: Final = 500
JOBS_PER_STATEMENT: Final = 2_000


class HostLost(Exception):
    """This host's row expired: other hosts receive its leases."""


class LeaseManager:
    """Claims and settles for one host row."""

    def __init__(self, postgres: Postgres, config: JobsConfig, host_id: int) -> None:
        self.host_id = host_id
        self.config = config
        self.on_lost: Callable[[int], None] = lambda _lease_id: None
        """Receives a lease that no longer existed when settled; its outcomes are not recorded."""
        self.on_settled: Callable[[Iterable[str]], None] = lambda _limiters: None
        """Receives the limiters of lanes whose jobs were settled: the lanes may have room."""
        self._postgres = postgres
        self._leases: dict[int, InFlightLease] = {}
        self._polls = PollCursor()
        self._unknown: set[int] = set()
        """Leases that were unknown at the last heartbeat."""
        self._unsure: set[int] = set()
        """Leases whose acks were sent without an answer: the database may have recorded them."""
        self._acks = AckBuffer()
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._claims_with_acks = 0
        self._jobs_sent = 0
        """Jobs whose outcomes are in a statement that has no answer yet."""
        self._isolated: set[int] = set()
        """Leases that met trouble: they are settled one at a time."""
        self._is_isolated_turn = False
        self._refused: set[int] = set()
        self._landed = asyncio.Event()
        self._progress: dict[int, Progress] = {}
        self._progressed: set[int] = set()
        """Jobs with a recorded progress that their outcome must delete."""
        self._reporting: asyncio.Task[None] | None = None

    @property
    def leases_held(self) -> int:
        """The number of leases in flight."""
        return len(self._leases)

    @property
    def unsettled(self) -> int:
        """Jobs whose outcome is not recorded yet; it grows while the database is down."""
        return self._acks.jobs + self._jobs_sent

    def in_flight(self, lease_id: int) -> InFlightLease:
        """The record of a lease that was just claimed."""
        return self._leases[lease_id]

    async def claim_ready(
        self, queue_id: int, cursor: ClaimCursor, *, leases_max: int, batch: int
    ) -> Claims:
        """Claim jobs without lanes, up to `leases_max` leases of `batch` jobs each.

        A job whose process died before gets its own lease. Raises: PostgresDown, PostgresBusy.
        """
        riders = self._acks.take_riders(LEASES_PER_STATEMENT)
        self._jobs_sent += riders.jobs
        self._claims_with_acks += 1
        if riders:
            crash_point("jobs.before_settle")
        try:
            claims = await store.leases.claim_ready(
                self._postgres,
                self.host_id,
                queue_id,
                leases_max=leases_max,
                batch=batch,
                priorities=cursor.next_order(),
                marks=cursor.marks,
                done=riders.done,
            )
        except BaseException:
            self._put_back(riders)
            raise
        finally:
            self._jobs_sent -= riders.jobs
            self._claims_with_acks -= 1
            self._landed.set()
        if riders:
            crash_point("jobs.after_settle")
            self._note_answer(riders, claims.lost, claims.busy)
        cursor.note(
            claims, jobs_max=leases_max * batch, leases_max=leases_max, now_s=time.monotonic()
        )
        return self._track(claims)

    async def claim_lanes(
        self, queue_id: int, *, leases_max: int, batch: int, cursor: LaneCursor | None = None
    ) -> Claims:
        """Claim jobs of lanes, up to `leases_max` leases of `batch` jobs each.

        No acks are sent with it: an ack may wait for a locked lane, and the jobs of this claim must
        start within their slack. Raises: PostgresDown, PostgresBusy.
        """
        cursor = cursor or LaneCursor()
        claims = await store.leases.claim_lanes(
            self._postgres,
            self.host_id,
            queue_id,
            leases_max=leases_max,
            batch=batch,
            config=self.config,
            cursor=cursor,
        )
        cursor.note(claims, time.monotonic())
        return self._track(claims)

    async def fold_lanes(self, queue_id: int, cursor: LaneCursor, events_max: int) -> int:
        """Add journal rows to the counts of lanes. Return how many."""
        folded, last_event = await store.leases.fold_lanes(
            self._postgres, queue_id, event=cursor.event, events_max=events_max
        )
        cursor.note_fold(last_event, time.monotonic())
        return folded

    async def queues_with_work(self, queue_ids: Iterable[int]) -> WorkAhead:
        """The queues that have work now, and when the next job will be due."""
        from_at, event = self._polls.mark
        ahead = await store.leases.work_ahead(
            self._postgres, queue_ids, from_at=from_at, event=event
        )
        self._polls.note(ahead, time.monotonic())
        return ahead

    def settle(self, ack: Ack) -> None:
        """Buffer the outcomes of jobs; they are recorded soon, or once the database is back."""
        lease = self._leases.get(ack.lease_id)
        if lease is not None and lease.sampled:
            lease.acked_ns = time.time_ns()
        if lease is None:
            self._settle_unknown(ack)
        elif is_all_done(ack, lease):
            if lease.is_untouched:
                is_free = self._progressed.isdisjoint(lease.ids)
                self._acks.add_done(
                    lease.lease_id, len(lease.ids), may_ride=lease.limiter is None and is_free
                )
            elif left := lease.open_ids():
                self._acks.add(lease.lease_id, dict.fromkeys(left, DONE))
            lease.close(None)
        else:
            outcomes = ack.outcomes or {}
            lease.close(outcomes)
            self._acks.add(lease.lease_id, outcomes)
        self._plan_flush(FLUSH_AFTER_S)

    def note_progress(self, progress: Progress) -> None:
        """Record a job's progress soon; the latest report per job wins."""
        self._progress[progress.job_id] = progress
        if self._reporting is None:
            self._reporting = asyncio.create_task(self._report_progress())

    async def flush(self) -> None:
        """Record all buffered outcomes, however long the database is down."""
        while self._acks or self._flushing is not None or self._claims_with_acks:
            if self._flushing is None and self._acks:
                self._start_flush()
            if self._flushing is not None:
                await asyncio.wait({self._flushing})
            elif self._claims_with_acks:
                self._landed.clear()
                await self._landed.wait()

    async def abandon(self) -> None:
        """Drop all buffered outcomes: other hosts receive the leases."""
        self._acks.clear()
        self._progress.clear()
        if self._timer is not None:
            self._timer.cancel()
        left = [task for task in (self._flushing, self._reporting) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def forget(self, lease_id: int) -> None:
        """Stop tracking a lease; if the database still has it, a heartbeat returns it."""
        self._leases.pop(lease_id, None)
        self._unsure.discard(lease_id)
        self._refused.discard(lease_id)
        self._isolated.discard(lease_id)

    async def renew(self) -> None:
        """Renew every lease. Raises: HostLost; PostgresDown, PostgresBusy."""
        lease_s = self.config.lease_s
        if not await self._postgres.run(SQL.renew_host, host=self.host_id, lease_s=lease_s):
            await self.abandon()
            raise HostLost

    async def return_unknown(self) -> None:
        """Return leases of this host that were unknown here at two heartbeats in a row."""
        rows = await self._postgres.all(SQL.leases_of_host, host=self.host_id)
        stored = {row["id"] for row in rows}
        unknown = stored - self._leases.keys()
        twice = unknown & self._unknown
        if twice:
            _log.warning("unknown_leases_returned", lease_ids=sorted(twice)[:20], leases=len(twice))
            await store.leases.settle(
                self._postgres, whole=twice, word="returned", losses_max=self.config.losses_max
            )
        self._unknown = unknown

    async def spend(self, queue_id: int, lane: str, starts: int, wait_max_s: float) -> float | None:
        """Take tokens for further starts out of a lane of the queue's limiter.

        Return the seconds until they may begin, counted from this call. None: refused, nothing was
        taken. Raises: PostgresDown, PostgresBusy.
        """
        after_s: float | None = await self._postgres.value(
            SQL.spend_of_queue, queue=queue_id, lane=lane, starts=starts, wait_max_s=wait_max_s
        )
        return after_s

    async def leave(self) -> None:
        """Delete the host row."""
        await self._postgres.run(SQL.remove_host, host=self.host_id)

    def _track(self, claims: Claims) -> Claims:
        for claim in claims.leases:
            self._leases[claim.lease_id] = lease = InFlightLease(
                claim.lease_id,
                claim.ids,
                claim.attempts,
                retries=claims.retries,
                headers=claim.headers,
                limiter=claims.limiter,
                is_counted=claims.is_counted,
            )
            if spans.active is not None:
                lease.sampled = spans.active.sampled(claim.headers)
            jobs_wait_seconds.observe((claims.claimed_at - claim.run_ats[0]).total_seconds())
        return claims

    def _settle_unknown(self, ack: Ack) -> None:
        """Buffer an ack of an untracked lease; the fence decides whether it counts."""
        if ack.outcomes is None:
            self._acks.add_done(ack.lease_id, 1, may_ride=False)
        else:
            self._acks.add(ack.lease_id, ack.outcomes)

    def _plan_flush(self, after_s: float) -> None:
        if self._timer is None and self._flushing is None and self._acks:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(after_s, self._start_flush)

    def _start_flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_all())
            self._flushing.add_done_callback(self._flushed)

    def _flushed(self, task: asyncio.Task[None]) -> None:
        self._flushing = None
        if not task.cancelled():
            if (error := task.exception()) is not None:
                _log.error("flush_failed", error=repr(error))
            self._plan_flush(BUSY_AFTER_S)

    async def _flush_all(self) -> None:
        """Send the buffered outcomes, one statement at a time, so that they keep their order."""
        failures = 0
        while self._acks:
            require_not_cancelled()
            batch = self._next_batch()
            try:
                settled = await self._send(batch)
            except HeadraceError as error:
                failures += 1
                await self._settle_later(batch, error, failures)
                continue
            except Exception as error:  # noqa: BLE001 - a handler's value may not fit the database
                self._refuse(batch, error)
                continue
            except BaseException:
                self._acks.put_back(batch)
                raise
            failures = 0
            self._note_answer(batch, settled.lost, settled.busy)
            if len(settled.busy) == len(batch.lease_ids):
                return

    def _next_batch(self) -> AckBatch:
        """Outcomes of many leases, alternating with one isolated lease."""
        batch = AckBatch()
        self._is_isolated_turn = not self._is_isolated_turn
        if not self._isolated or not self._is_isolated_turn:
            batch = self._acks.take(
                leases_max=LEASES_PER_STATEMENT, jobs_max=JOBS_PER_STATEMENT, without=self._isolated
            )
        return batch or self._acks.take_one(self._isolated) or self._next_batch()

    async def _send(self, batch: AckBatch) -> store.leases.SettleResult:
        self._jobs_sent += batch.jobs
        try:
            crash_point("jobs.before_settle")
            settled = await self._settle_batch(batch)
            crash_point("jobs.after_settle")
        finally:
            self._jobs_sent -= batch.jobs
        return settled

    async def _settle_batch(self, batch: AckBatch) -> store.leases.SettleResult:
        progressed: set[int] = set()
        if self._progressed:
            for lease_id in batch.done:
                lease = self._leases.get(lease_id)
                progressed.update(self._progressed.intersection(lease.ids if lease else ()))
            for outcomes in batch.outcomes.values():
                progressed.update(self._progressed.intersection(outcomes))
        settled = await store.leases.settle(
            self._postgres,
            jobs=batch.outcomes,
            whole=batch.done,
            losses_max=self.config.losses_max,
            progressed=progressed,
        )
        self._progressed -= progressed
        return settled

    async def _settle_later(self, batch: AckBatch, error: HeadraceError, failures: int) -> None:
        """Buffer the outcomes again after a retryable error, else refuse them."""
        if not error.retryable:
            self._refuse(batch, error)
            return
        self._unsure |= batch.lease_ids
        self._acks.put_back(batch)
        _often.warning("settle_delayed", leases=len(batch.lease_ids), error=error.text)
        if isinstance(error, PostgresBusy):
            # A lane that a user's transaction locks must not delay the other leases.
            self._isolated |= batch.lease_ids
            await asyncio.sleep(BUSY_AFTER_S)
        else:
            await asyncio.sleep(RECONNECT.delay_s(failures))

    def _refuse(self, batch: AckBatch, error: Exception) -> None:
        """Handle outcomes that the database can never record.

        Several leases are sent again one by one. The jobs of a single lease get a failed run
        instead.
        """
        if len(batch.lease_ids) > 1:
            self._acks.put_back(batch)
            self._isolated |= batch.lease_ids
            return
        [lease_id] = batch.lease_ids
        text = readable_text(error)
        _log.error("outcomes_refused", lease_id=lease_id, jobs=batch.jobs, error=text)
        lease = self._leases.get(lease_id)
        if lease is None or lease_id in self._refused:
            self.forget(lease_id)
            return
        self._refused.add(lease_id)
        failed = Outcome("retry", None, f"its outcome could not be recorded: {text}")
        refused = batch.outcomes.get(lease_id)
        self._acks.add(
            lease_id,
            {
                job_id: final_outcome(
                    failed,
                    attempt=attempt + 1,
                    retries=lease.retries_of(job_id),
                    backoff=self.config.backoff,
                )
                for job_id, attempt in zip(lease.ids, lease.attempts, strict=True)
                if refused is None or job_id in refused
            },
        )

    def _put_back(self, riders: AckBatch) -> None:
        """Buffer acks again whose claim got no answer: the database may have recorded them."""
        self._unsure |= riders.lease_ids
        self._acks.put_back(riders)
        self._plan_flush(FLUSH_AFTER_S)

    def _note_answer(self, batch: AckBatch, lost: Iterable[int], busy: Iterable[int]) -> None:
        """Apply the database's answer: which leases of `batch` no longer existed or were locked."""
        gone = set(lost)
        again = batch.only(busy)
        self._acks.put_back(again)
        limiters: set[str] = set()
        for lease_id in batch.lease_ids - again.lease_ids:
            lease = self._leases.get(lease_id)
            if lease_id in gone and lease_id not in self._unsure:
                self._note_lost(lease_id, batch)
            elif lease is not None and lease.limiter is not None:
                # Jobs that are done give room only where jobs in flight are counted.
                gives_room = lease.is_counted or lease_id in batch.outcomes
                limiters.update([lease.limiter] if gives_room else [])
            if lease_id not in gone:
                self._count(lease_id, batch)
                if spans.active is not None and lease is not None and lease.sampled:
                    spans.active.acked(lease)
            if lease_id in gone or (
                lease is not None and lease.open_count == 0 and lease_id not in self._acks
            ):
                self.forget(lease_id)
            self._unsure.discard(lease_id)
            self._isolated.discard(lease_id)
        if limiters:
            self.on_settled(limiters)

    def _note_lost(self, lease_id: int, batch: AckBatch) -> None:
        leases_lost.inc()
        _log.warning("lease_lost", lease_id=lease_id, jobs=batch.only([lease_id]).jobs)
        self.on_lost(lease_id)

    def _count(self, lease_id: int, batch: AckBatch) -> None:
        if lease_id in batch.done:
            _FINISHED["done"].inc(batch.done[lease_id])
        for outcome in batch.outcomes.get(lease_id, {}).values():
            _FINISHED[outcome.kind].inc()

    def _take_progress(self) -> list[tuple[int, Progress]]:
        """Pop the noted progress of jobs without an outcome, each with its lease."""
        noted, self._progress = self._progress, {}
        found = [
            (lease_id, noted[job_id])
            for lease_id, lease in self._leases.items()
            for job_id in noted.keys() & lease.open_ids()
        ]
        self._progressed.update(progress.job_id for _, progress in found)
        return found

    async def _report_progress(self) -> None:
        """Record the noted progress a few times a second; drop what fails."""
        try:
            while self._progress:
                await asyncio.sleep(PROGRESS_AFTER_S)
                found = self._take_progress()
                if not found:
                    continue
                try:
                    await store.jobs.write_progress(self._postgres, found)
                except HeadraceError as error:
                    _often.info("progress_lost", jobs=len(found), error=error.text)
        finally:
            self._reporting = None
