"""One bounded step of tidying, which any number of processes may do at once."""

from __future__ import annotations

import time
from typing import Final

from penstock.engines.postgres import Postgres
from penstock.jobs import store
from penstock.jobs.model import JobsConfig, Sweep
from penstock.jobs.service.lanes import Lanes

LEASES_PER_SWEEP: Final = 100
JOBS_PER_SWEEP: Final = 5_000
LANES_PER_SWEEP: Final = 1_000
LANE_IDLE_S: Final = 3_600.0
PROGRESS_KEPT_S: Final = 86_400.0
TEND_EVERY_S: Final = 60.0


class Sweeping:
    """Returns leases of dead hosts, moves due jobs into their lanes, forgets what is over."""

    def __init__(self, postgres: Postgres, config: JobsConfig, lanes: Lanes) -> None:
        self._postgres = postgres
        self._config = config
        self._lanes = lanes
        self._lane_after = ("", "")
        self._tended_s: float | None = None

    async def run_once(self) -> Sweep:
        """One step; each lease is its own short transaction."""
        leases = await store.leases.expired_leases(self._postgres, leases_max=LEASES_PER_SWEEP)
        returned = [
            await store.leases.return_lease(self._postgres, lease_id, self._config.losses_max)
            for lease_id in leases
        ]
        moved = await store.backlog.move_due(self._postgres, jobs_max=JOBS_PER_SWEEP)
        dropped = await store.lookup.drop_failed(
            self._postgres, kept_s=self._config.failed_kept_s, jobs_max=JOBS_PER_SWEEP
        )
        hosts = await store.hosts.drop_hosts(self._postgres)
        last, removed = await store.lanes.remove_idle_lanes(
            self._postgres, self._lane_after, lanes_max=LANES_PER_SWEEP, idle_s=LANE_IDLE_S
        )
        self._lane_after = last or ("", "")
        for limiter in await store.lanes.unspread_limiters(self._postgres):
            await self._lanes.spread(limiter)
        kept = await store.kept.drop_kept(self._postgres, jobs_max=JOBS_PER_SWEEP)
        await self._tend()
        leases_returned = sum(count > 0 for count in returned)
        return Sweep(
            leases_returned=leases_returned,
            jobs_returned=sum(returned),
            lane_jobs_moved=moved,
            failed_dropped=dropped,
            hosts_dropped=hosts,
            more=JOBS_PER_SWEEP in (moved, dropped, kept) or leases_returned == LEASES_PER_SWEEP,
            lanes_removed=removed,
        )

    async def _tend(self) -> None:
        """Now and then: partitions of kept jobs, words of jobs that are long gone."""
        now_s = time.monotonic()
        if self._tended_s is None or now_s - self._tended_s > TEND_EVERY_S:
            self._tended_s = now_s
            await store.kept.tend_kept(self._postgres)
            await store.kept.drop_progress(self._postgres, kept_s=PROGRESS_KEPT_S)
