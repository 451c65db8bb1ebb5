"""Leases in hand: what a claim brought, and getting every job of it settled exactly once.

A lease hangs on its host row. The desk of a host claims for it and settles; it keeps the ids of the leases that
this process knows, since a claim can commit and its answer still be lost: such a lease belongs to a host
that lives and would never expire. Whatever the database holds and the desk did not know at two
heartbeats in a row is given back.

The fence is the lease row itself: settling deletes or marks it under its lock, so a worker that was
taken for dead cannot record anything any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Final

from penstock.engines.postgres import Postgres
from penstock.jobs import store
from penstock.jobs.handling import RETURNED, Outcome
from penstock.jobs.model import (
    OUTCOMES,
    JobsConfig,
    jobs_finished,
    jobs_wait_seconds,
    leases_lost,
)
from penstock.kernel.backoff import Backoff
from penstock.kernel.crash import crash_point
from penstock.kernel.errors import PenstockError
from penstock.kernel.logs import logger

_log: Final = logger(__name__)
_FIRST: Final = (datetime(1970, 1, 1, tzinfo=UTC), 0)
_FINISHED: Final = {word: jobs_finished.labels(outcome=word) for word in OUTCOMES}
RECONNECT: Final = Backoff(0.1, 3.0)
MARKS_KEPT_S: Final = 1.0
LOWEST_FIRST_EVERY: Final = 8


def require_not_cancelled() -> None:
    """At the head of a loop that outlives errors. Raises: CancelledError where a driver swallowed it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


class HostLost(Exception):
    """This host's row expired: its leases are being given to others."""


@dataclass(slots=True)
class Lease:
    """A claimed batch and what is still to be settled of it."""

    claim: store.leases.Claim
    start_before_s: float | None
    """Monotonic: lane jobs that have not started by then go back."""
    open_count: int
    """Jobs whose call has not ended."""
    unsettled_count: int = field(init=False)
    pending: dict[int, Outcome] = field(default_factory=dict)
    is_flush_planned: bool = False

    def __post_init__(self) -> None:
        self.unsettled_count = self.open_count

    @property
    def id(self) -> int:
        """The lease row's id."""
        assert self.claim.lease_id is not None, "an empty claim is no lease"
        return self.claim.lease_id

    @property
    def is_late(self) -> bool:
        """Whether its jobs may not start any more."""
        return self.start_before_s is not None and time.monotonic() > self.start_before_s


class Scan:
    """Where a consumer's claims of one queue go on, and which priorities they begin with.

    Marks keep claims off the dead index entries of what was claimed before: 97,000 jobs/s beside a
    24 s transaction instead of 5,000. They are dropped after a short batch and each second, so that late
    commits, returned jobs and more urgent ones are seen.
    """

    def __init__(self) -> None:
        self.marks = [_FIRST] * len(store.leases.PRIORITIES)
        self._claims = 0
        self._marked_s = 0.0

    def next_order(self) -> Sequence[int]:
        """Priorities in the order to claim them: every 8th time the last first, so that none starves."""
        self._claims += 1
        if self._claims % LOWEST_FIRST_EVERY == 0:
            return store.leases.PRIORITIES[::-1]
        return store.leases.PRIORITIES

    def note(self, claim: store.leases.Claim, *, jobs_max: int, now_s: float) -> None:
        """Learn from a claim that asked for `jobs_max`."""
        if len(claim.ids) + claim.moved < jobs_max or now_s - self._marked_s > MARKS_KEPT_S:
            self.marks = [_FIRST] * len(store.leases.PRIORITIES)
            self._marked_s = now_s
            return
        for priority, run_at, job_id in zip(
            claim.priorities, claim.run_ats, claim.ids, strict=True
        ):
            self.marks[priority] = max(self.marks[priority], (run_at, job_id))


class Desk:
    """Claims and settles for one host row."""

    def __init__(self, postgres: Postgres, config: JobsConfig, host_id: int) -> None:
        self.host_id = host_id
        self.config = config
        self._postgres = postgres
        self._known: set[int] = set()
        self._unknown: set[int] = set()

    @property
    def leases_held(self) -> int:
        """Leases in hand."""
        return len(self._known)

    async def claim_ready(self, queue_id: int, scan: Scan, *, jobs_max: int) -> store.leases.Claim:
        """Claim up to `jobs_max` jobs without lanes. Raises: PostgresDown, PostgresBusy."""
        claim = await store.leases.claim_ready(
            self._postgres,
            self.host_id,
            queue_id,
            jobs_max=jobs_max,
            priorities=scan.next_order(),
            marks=scan.marks,
        )
        scan.note(claim, jobs_max=jobs_max, now_s=time.monotonic())
        return self._taken(claim)

    async def claim_lanes(self, queue_id: int, *, jobs_max: int) -> store.leases.Claim:
        """Claim up to `jobs_max` jobs of lanes. Raises: PostgresDown, PostgresBusy."""
        claim = await store.leases.claim_lanes(
            self._postgres, self.host_id, queue_id, jobs_max=jobs_max, config=self.config
        )
        return self._taken(claim)

    async def settle(
        self, lease_id: int, outcomes: dict[int, Outcome] | Outcome, jobs: int
    ) -> bool:
        """Record outcomes, however long the database is away; False: the lease was gone."""
        crash_point("jobs.before_settle")
        is_held = await self._settle_until_answered(lease_id, outcomes)
        crash_point("jobs.after_settle")
        if not is_held:
            leases_lost.inc()
            _log.warning("lease_lost", lease_id=lease_id, jobs=jobs)
        elif isinstance(outcomes, Outcome):
            _FINISHED[outcomes.word].inc(jobs)
        else:
            for outcome in outcomes.values():
                _FINISHED[outcome.word].inc()
        return is_held

    def forget(self, lease_id: int) -> None:
        """Every job of the lease was settled, or it shall be found unknown and given back."""
        self._known.discard(lease_id)

    async def renew(self) -> None:
        """Renew every lease. Raises: HostLost; PostgresDown, PostgresBusy."""
        if not await store.hosts.renew_host(self._postgres, self.host_id, self.config.lease_s):
            raise HostLost

    async def return_unknown(self) -> None:
        """Give back leases that are ours in the database and unknown here, twice in a row."""
        stored = await store.leases.leases_of_host(self._postgres, self.host_id)
        unknown = stored - self._known
        for lease_id in unknown & self._unknown:
            _log.warning("unknown_lease_returned", lease_id=lease_id)
            await store.leases.settle(self._postgres, lease_id, RETURNED)
        self._unknown = unknown

    async def leave(self) -> None:
        """Take the host row away at the end."""
        await store.hosts.remove_host(self._postgres, self.host_id)

    def _taken(self, claim: store.leases.Claim) -> store.leases.Claim:
        if claim.lease_id is not None:
            self._known.add(claim.lease_id)
            for run_at in claim.run_ats:
                jobs_wait_seconds.observe((claim.claimed_at - run_at).total_seconds())
        return claim

    async def _settle_until_answered(
        self, lease_id: int, outcomes: dict[int, Outcome] | Outcome
    ) -> bool:
        """Try until the database answers; settling again what was settled changes nothing."""
        for attempt in count(1):
            require_not_cancelled()
            try:
                return await store.leases.settle(self._postgres, lease_id, outcomes)
            except PenstockError as error:
                if not error.retryable:
                    raise
                _log.warning("settle_delayed", lease_id=lease_id, error=error.text)
            await asyncio.sleep(RECONNECT.delay_s(attempt))
        raise AssertionError("count ends never")
