"""Leases in hand: what claims brought, and getting every job of them settled exactly once.

A lease hangs on its host row. The desk of a host claims for all its slots and settles; it keeps the ids of the
leases that this process knows, since a claim can commit and its answer still be lost: such a lease
belongs to a host that lives and would never expire. Whatever the database holds and the desk did not know
at two heartbeats in a row is given back.

The fence is the lease row itself: settling deletes or marks it under its lock, so a worker that was
taken for dead cannot record anything any more.

Nobody waits for an outcome to be recorded. Acks ride on the next claim, one commit instead of two; what cannot,
or finds no claim within FLUSH_AFTER_S, goes in a statement for many leases, one at a time. While the
database is away everything is kept: whoever claims looks at `unsettled` first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from headrace.engines.postgres import Postgres, PostgresBusy
from headrace.jobs import store
from headrace.jobs.handling import Outcome, settled_outcome, told_text
from headrace.jobs.model import (
    OUTCOMES,
    JobsConfig,
    jobs_finished,
    jobs_wait_seconds,
    leases_lost,
)
from headrace.jobs.scans import Scan
from headrace.jobs.settling import DONE, Held, Part, Unsettled, is_all_done, said_of
from headrace.jobs.slots.messages import Progress, Settled
from headrace.jobs.store.leases import Claim, Claims, Said, WorkAhead
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import Backoff, crash_point, require_not_cancelled

__all__ = ["RECONNECT", "Claim", "Claims", "Desk", "HostLost", "Scan", "WorkAhead"]
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)
_FINISHED: Final = {word: jobs_finished.labels(outcome=word) for word in OUTCOMES}
RECONNECT: Final = Backoff(0.1, 3.0)
FLUSH_AFTER_S: Final = 0.005
BUSY_AFTER_S: Final = 0.05
PROGRESS_AFTER_S: Final = 0.25
LEASES_PER_STATEMENT: Final = 500
JOBS_PER_STATEMENT: Final = 2_000


class HostLost(Exception):
    """This host's row expired: its leases are being given to others."""


class Desk:
    """Claims and settles for one host row."""

    def __init__(self, postgres: Postgres, config: JobsConfig, host_id: int) -> None:
        self.host_id = host_id
        self.config = config
        self.on_lost: Callable[[int], None] = lambda _lease_id: None
        """Is told of a lease that was gone when it was settled: what its jobs did is not recorded."""
        self.on_settled: Callable[[Iterable[str]], None] = lambda _limiters: None
        """Is told the limiters of lanes whose jobs were settled: there may be room in them."""
        self._postgres = postgres
        self._held: dict[int, Held] = {}
        self._unknown: set[int] = set()
        self._unsure: set[int] = set()
        self._unsettled = Unsettled()
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._riding = 0
        self._away = 0
        self._apart: set[int] = set()
        self._is_apart_turn = False
        self._refused: set[int] = set()
        self._landed = asyncio.Event()
        self._progress: dict[int, Progress] = {}
        self._progressed: set[int] = set()
        self._telling: asyncio.Task[None] | None = None

    @property
    def leases_held(self) -> int:
        """Leases in hand."""
        return len(self._held)

    @property
    def unsettled(self) -> int:
        """Jobs said and not yet recorded; it grows while the database is away."""
        return self._unsettled.jobs + self._away

    async def claim_ready(
        self, queue_id: int, scan: Scan, *, leases_max: int, batch: int
    ) -> Claims:
        """Claim jobs without lanes, up to `leases_max` leases of `batch` each.

        A job whose process died before has a lease of its own. Raises: PostgresDown, PostgresBusy.
        """
        riders = self._unsettled.take_riders(LEASES_PER_STATEMENT)
        self._away += riders.jobs
        self._riding += 1
        if riders:
            crash_point("jobs.before_settle")
        sent_s = time.monotonic()
        try:
            claims = await store.leases.claim_ready(
                self._postgres,
                self.host_id,
                queue_id,
                leases_max=leases_max,
                batch=batch,
                priorities=scan.next_order(),
                marks=scan.marks,
                done=riders.done,
            )
        except BaseException:
            self._put_back(riders)
            raise
        finally:
            self._away -= riders.jobs
            self._riding -= 1
            self._landed.set()
        if riders:
            crash_point("jobs.after_settle")
            self._note_answer(riders, claims.lost, claims.busy)
        now_s = time.monotonic()
        scan.note(
            claims,
            jobs_max=leases_max * batch,
            leases_max=leases_max,
            now_s=now_s,
            took_s=now_s - sent_s,
        )
        return self._taken(queue_id, claims)

    async def claim_lanes(self, queue_id: int, *, leases_max: int, batch: int) -> Claims:
        """Claim jobs of lanes, up to `leases_max` leases of `batch` each.

        Acks do not ride on it: an ack may have to wait for a lane that somebody holds, and the jobs of this
        claim must start within their slack. Raises: PostgresDown, PostgresBusy.
        """
        claims = await store.leases.claim_lanes(
            self._postgres,
            self.host_id,
            queue_id,
            leases_max=leases_max,
            batch=batch,
            config=self.config,
        )
        return self._taken(queue_id, claims)

    async def queues_with_work(self, queue_ids: Iterable[int]) -> WorkAhead:
        """Which of the queues have work now, and when the next will be due."""
        return await store.leases.work_ahead(self._postgres, queue_ids)

    def settle(self, settled: Settled) -> None:
        """Take in what became of jobs; it is recorded soon, however long the database is away."""
        held = self._held.get(settled.lease_id)
        if held is None:
            self._settle_unknown(settled)
        elif is_all_done(settled, held):
            left = held.take_all()
            if left is None:
                is_free = self._progressed.isdisjoint(held.ids)
                self._unsettled.add_done(
                    held.lease_id, len(held.ids), may_ride=held.limiter is None and is_free
                )
            elif left:
                self._unsettled.add(held.lease_id, dict.fromkeys(left, DONE))
        else:
            ids = settled.ids or ()
            held.take(ids)
            self._unsettled.add(held.lease_id, said_of(settled, ids))
        self._plan_flush(FLUSH_AFTER_S)

    def note_progress(self, progress: Progress) -> None:
        """Tell soon how far a job is; of several words about it the last counts."""
        self._progress[progress.job_id] = progress
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell_progress())

    async def flush(self) -> None:
        """Record everything that was said until now, however long the database is away."""
        while self._unsettled or self._flushing is not None or self._riding:
            if self._flushing is None and self._unsettled:
                self._start_flush()
            if self._flushing is not None:
                await asyncio.wait({self._flushing})
            elif self._riding:
                self._landed.clear()
                await self._landed.wait()

    async def abandon(self) -> None:
        """Forget what was said and not recorded: the leases are not ours any more."""
        self._unsettled.clear()
        self._progress.clear()
        if self._timer is not None:
            self._timer.cancel()
        left = [task for task in (self._flushing, self._telling) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def forget(self, lease_id: int) -> None:
        """Nobody holds the lease any more and it was not settled: it shall be found and given back."""
        self._held.pop(lease_id, None)
        self._unsure.discard(lease_id)
        self._refused.discard(lease_id)
        self._apart.discard(lease_id)

    async def renew(self) -> None:
        """Renew every lease. Raises: HostLost; PostgresDown, PostgresBusy."""
        if not await store.hosts.renew_host(self._postgres, self.host_id, self.config.lease_s):
            await self.abandon()
            raise HostLost

    async def return_unknown(self) -> None:
        """Give back leases that are ours in the database and unknown here, twice in a row."""
        stored = await store.leases.leases_of_host(self._postgres, self.host_id)
        unknown = stored - self._held.keys()
        twice = unknown & self._unknown
        if twice:
            _log.warning("unknown_leases_returned", lease_ids=sorted(twice)[:20], leases=len(twice))
            await store.leases.settle(
                self._postgres, whole=twice, word="returned", losses_max=self.config.losses_max
            )
        self._unknown = unknown

    async def spend(self, queue_id: int, lane: str, starts: int, wait_max_s: float) -> float | None:
        """Take further starts out of a lane of the queue's limiter.

        Seconds until they may begin, counted from the moment this was called; None: refused, nothing was
        spent. Raises: PostgresDown, PostgresBusy.
        """
        return await store.lanes.spend_of_queue(
            self._postgres, queue_id, lane, starts=starts, wait_max_s=wait_max_s
        )

    async def leave(self) -> None:
        """Take the host row away at the end."""
        await store.hosts.remove_host(self._postgres, self.host_id)

    def _taken(self, queue_id: int, claims: Claims) -> Claims:
        for claim in claims.leases:
            self._held[claim.lease_id] = Held(
                claim.lease_id, queue_id, claims.limiter, claim.ids, claim.attempts, claims.retries
            )
            jobs_wait_seconds.observe((claims.claimed_at - claim.run_ats[0]).total_seconds())
        return claims

    def _settle_unknown(self, settled: Settled) -> None:
        """Something said of a lease that was given up here: the fence decides whether it counts."""
        if settled.ids is None:
            self._unsettled.add_done(settled.lease_id, 1, may_ride=False)
        else:
            self._unsettled.add(settled.lease_id, said_of(settled, settled.ids))

    def _plan_flush(self, after_s: float) -> None:
        if self._timer is None and self._flushing is None and self._unsettled:
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
                _log.error("flush_broke", error=repr(error))
            self._plan_flush(BUSY_AFTER_S)

    async def _flush_all(self) -> None:
        """Send what is there, a statement at a time: of one lease what was said first is recorded first."""
        failures = 0
        while self._unsettled:
            require_not_cancelled()
            part = self._next_part()
            try:
                fared = await self._send(part)
            except HeadraceError as error:
                failures += 1
                await self._settle_later(part, error, failures)
                continue
            except Exception as error:  # noqa: BLE001 - what a handler gave may not fit the database
                self._refuse(part, error)
                continue
            except BaseException:
                self._unsettled.put_back(part)
                raise
            failures = 0
            self._note_answer(part, fared.lost, fared.busy)
            if len(fared.busy) == len(part.lease_ids):
                return

    def _next_part(self) -> Part:
        """Many leases, or in turns with that one of those that met trouble."""
        part = Part()
        self._is_apart_turn = not self._is_apart_turn
        if not self._apart or not self._is_apart_turn:
            part = self._unsettled.take(
                leases_max=LEASES_PER_STATEMENT, jobs_max=JOBS_PER_STATEMENT, without=self._apart
            )
        return part or self._unsettled.take_one(self._apart) or self._next_part()

    async def _send(self, part: Part) -> store.leases.Fared:
        self._away += part.jobs
        try:
            crash_point("jobs.before_settle")
            fared = await self._settle_part(part)
            crash_point("jobs.after_settle")
        finally:
            self._away -= part.jobs
        return fared

    async def _settle_part(self, part: Part) -> store.leases.Fared:
        progressed: set[int] = set()
        if self._progressed:
            for lease_id in part.done:
                held = self._held.get(lease_id)
                progressed.update(self._progressed.intersection(held.ids if held else ()))
            for said in part.said.values():
                progressed.update(self._progressed.intersection(said))
        fared = await store.leases.settle(
            self._postgres,
            jobs=part.said,
            whole=part.done,
            losses_max=self.config.losses_max,
            progressed=progressed,
        )
        self._progressed -= progressed
        return fared

    async def _settle_later(self, part: Part, error: HeadraceError, failures: int) -> None:
        """The database did not take it now, or never will."""
        if not error.retryable:
            self._refuse(part, error)
            return
        self._unsure |= part.lease_ids
        self._unsettled.put_back(part)
        _often.warning("settle_delayed", leases=len(part.lease_ids), error=error.text)
        if isinstance(error, PostgresBusy):
            # One lane that a user's transaction holds must not hold up the leases beside it.
            self._apart |= part.lease_ids
            await asyncio.sleep(BUSY_AFTER_S)
        else:
            await asyncio.sleep(RECONNECT.delay_s(failures))

    def _refuse(self, part: Part, error: Exception) -> None:
        """The database refused it: each lease is sent alone, then a failed run takes its jobs' words' place."""
        if len(part.lease_ids) > 1:
            self._unsettled.put_back(part)
            self._apart |= part.lease_ids
            return
        [lease_id] = part.lease_ids
        told = told_text(error)
        _log.error("outcomes_refused", lease_id=lease_id, jobs=part.jobs, error=told)
        held = self._held.get(lease_id)
        if held is None or lease_id in self._refused:
            self.forget(lease_id)
            return
        self._refused.add(lease_id)
        rest = Outcome("retry", None, f"what became of it could not be recorded: {told}")
        wanted = part.said.get(lease_id)
        said = {}
        for job_id, attempt in zip(held.ids, held.attempts, strict=True):
            if wanted is None or job_id in wanted:
                final = settled_outcome(
                    rest, attempt=attempt + 1, retries=held.retries, backoff=self.config.backoff
                )
                said[job_id] = Said(final.word, final.after_s, final.error)
        self._unsettled.add(lease_id, said)

    def _put_back(self, riders: Part) -> None:
        """They met no answer: the database may know them, or not."""
        self._unsure |= riders.lease_ids
        self._unsettled.put_back(riders)
        self._plan_flush(FLUSH_AFTER_S)

    def _note_answer(self, part: Part, lost: Iterable[int], busy: Iterable[int]) -> None:
        """Learn how the leases of `part` fared."""
        gone = set(lost)
        again = part.only(busy)
        self._unsettled.put_back(again)
        limiters: set[str] = set()
        for lease_id in part.lease_ids - again.lease_ids:
            held = self._held.get(lease_id)
            if lease_id in gone and lease_id not in self._unsure:
                self._note_lost(lease_id, part)
            elif held is not None and held.limiter is not None:
                limiters.add(held.limiter)
            if lease_id not in gone:
                self._count(lease_id, part)
            if lease_id in gone or (
                held is not None and held.is_said and lease_id not in self._unsettled
            ):
                self.forget(lease_id)
            self._unsure.discard(lease_id)
            self._apart.discard(lease_id)
        if limiters:
            self.on_settled(limiters)

    def _note_lost(self, lease_id: int, part: Part) -> None:
        leases_lost.inc()
        _log.warning("lease_lost", lease_id=lease_id, jobs=part.only([lease_id]).jobs)
        self.on_lost(lease_id)

    def _count(self, lease_id: int, part: Part) -> None:
        if lease_id in part.done:
            _FINISHED["done"].inc(part.done[lease_id])
        for said in part.said.get(lease_id, {}).values():
            _FINISHED[said.word].inc()

    def _take_progress(self) -> list[tuple[int, Progress]]:
        """What is noted of jobs whose outcome is not said yet, each with its lease."""
        noted, self._progress = self._progress, {}
        found = [
            (lease_id, noted[job_id])
            for lease_id, held in self._held.items()
            for job_id in noted.keys() & (held.ids if held.left is None else held.left)
        ]
        self._progressed.update(one.job_id for _, one in found)
        return found

    async def _tell_progress(self) -> None:
        """Tell what is noted, a few times a second; what meets no answer is dropped."""
        try:
            while self._progress:
                await asyncio.sleep(PROGRESS_AFTER_S)
                told = self._take_progress()
                if not told:
                    continue
                try:
                    await store.kept.tell_progress(self._postgres, told)
                except HeadraceError as error:
                    _often.info("progress_lost", jobs=len(told), error=error.text)
        finally:
            self._telling = None
