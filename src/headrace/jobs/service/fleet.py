"""The fleet for operators: hosts, the plan and its decisions, alerts, draining; and the sweep.

A sweep is maintenance in bounded steps. Any number of processes may sweep at once.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.commit_wait import find_commit_wait
from headrace.engines.postgres import Postgres, from_row
from headrace.engines.postgres_errors import PostgresBusy
from headrace.jobs import store
from headrace.jobs.errors import HostRuns, HostUnknown, InvalidFilter
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.state import (
    DECISIONS_SHOWN,
    FAILURES_COUNTED_MAX,
    FAILURES_SPAN_S,
    LOAD_MINUTES,
    MINUTES_SHOWN,
    Decision,
    FleetHost,
    FleetLoad,
    FleetState,
    QueueFailures,
    QueueStep,
)
from headrace.jobs.model import JOB_ID_LAST, JobsConfig, Sweep
from headrace.jobs.service.lanes import Lanes
from headrace.jobs.sql import SQL
from headrace.jobs.validation import is_storable, require_page
from headrace.kernel.logs import SparseLogger, logger

ALERTS_SHOWN: Final = 100
HOUR_S: Final = 3_600
STEP_S_MIN: Final = 60
STEPS_MAX: Final = 800
QUEUES_SHOWN_MAX: Final = 50


class Fleet:
    """The hosts that run jobs, with slots, plan and alerts; `Jobs.fleet`."""

    def __init__(self, postgres: Postgres, config: JobsConfig) -> None:
        self._postgres = postgres
        self._config = config
        self._waited_s = float("-inf")
        """When commits of reports waited for a standby last."""

    async def state(self) -> FleetState:
        """Hosts with their slots, the plan, the newest decisions and open alerts."""
        hosts = await self._hosts()
        planned = await store.fleet.slot_map(self._postgres)
        return FleetState(
            hosts=[
                msgspec.structs.replace(host, planned=planned.get(host.name, {})) for host in hosts
            ],
            plan=await store.fleet.find_plan(self._postgres),
            decisions=await self.decisions(decisions_max=DECISIONS_SHOWN),
            alerts_open=await self._postgres.value(SQL.count_open_alerts),
            alerts=await self.alerts(is_open=True),
        )

    async def _hosts(self) -> list[FleetHost]:
        """All hosts. After an outage of PostgreSQL none is silent before the first write.

        Nor is any while commits wait for a standby: those reports are made, and not visible.
        """
        silent_s = self._config.host_silent_s
        found = await store.fleet.fleet_hosts(self._postgres, silent_s=silent_s)
        is_unwritten = any(one.shown.is_silent and not one.is_written for one in found)
        if is_unwritten:
            if await find_commit_wait(self._postgres) is not None:
                self._waited_s = time.monotonic()
            else:
                # A wait that ended since has made reports visible.
                found = await store.fleet.fleet_hosts(self._postgres, silent_s=silent_s)
        failed_s = max(self._waited_s, self._postgres.failed_s)
        is_back = time.monotonic() - failed_s < silent_s
        return [
            one.shown
            if one.is_written or not is_back
            else msgspec.structs.replace(one.shown, is_silent=False, lost_at=None)
            for one in found
        ]

    async def decisions(
        self, *, before: int | None = None, decisions_max: int = 100
    ) -> list[Decision]:
        """Decisions of the plan, newest first; with `before` only smaller ids.

        Raises: InvalidFilter.
        """
        require_page("decisions_max", decisions_max)
        if before is not None:
            before = max(0, min(before, JOB_ID_LAST))
        return await store.fleet.decisions(
            self._postgres, before=before, decisions_max=decisions_max
        )

    async def alerts(self, *, is_open: bool = False) -> list[Alert]:
        """The newest 100 alerts; with `is_open` only open ones."""
        return await store.fleet.find_alerts(
            self._postgres, is_open=is_open, alerts_max=ALERTS_SHOWN
        )

    async def load(self, *, tx: Transaction | None = None) -> FleetLoad:
        """Counts of each queue in the last five minutes, and of all queues per minute of the last
        hour.
        """
        runner = self._postgres if tx is None else runner_for(tx)
        return await store.fleet.fleet_load(
            runner, minutes=LOAD_MINUTES, minutes_shown=MINUTES_SHOWN + 1
        )

    async def history(
        self, *, from_at: datetime, to_at: datetime, step_s: int = 60, queues_max: int = 7
    ) -> list[QueueStep]:
        """Counts of queues in steps, and of all others together, oldest first.

        Named are the `queues_max` that ended most jobs and the `queues_max` with most waiting jobs.
        Steps of an hour and more are read from hours, which are kept longer. Raises: InvalidFilter.
        """
        length_s = (to_at - from_at).total_seconds()
        if step_s < STEP_S_MIN or not 0 < length_s <= STEPS_MAX * step_s:
            raise InvalidFilter(
                f"history from {from_at.isoformat()} to {to_at.isoformat()}: request 1 to"
                f" {STEPS_MAX} steps of {STEP_S_MIN} s or more"
            )
        rows = await self._postgres.all(
            SQL.queue_steps,
            is_hourly=step_s >= HOUR_S,
            from_at=from_at,
            to_at=to_at,
            step_s=float(step_s),
            queues_max=max(1, min(queues_max, QUEUES_SHOWN_MAX)),
        )
        return [from_row(QueueStep, row) for row in rows]

    async def failures(self) -> list[QueueFailures]:
        """Failed and quarantined jobs by queue and cause, if one ended in the last hour.

        A cause has all its kept jobs, older ones too, among the newest 1,000.
        """
        return await store.fleet.recent_failures(
            self._postgres, span_s=FAILURES_SPAN_S, jobs_max=FAILURES_COUNTED_MAX
        )

    async def drain(self, host: str) -> None:
        """Start no more jobs on a host until `undrain` or its next start; running jobs finish.

        Raises: HostUnknown.
        """
        await self._set_draining(host, is_draining=True)

    async def undrain(self, host: str) -> None:
        """Start jobs on a drained host again. Raises: HostUnknown."""
        await self._set_draining(host, is_draining=False)

    async def forget(self, host: str) -> None:
        """Remove a lost host from the fleet; its alert ends. Raises: HostUnknown, HostRuns.

        A lost host is otherwise listed until it is back, for up to seven days.
        """
        if is_storable(host):
            if await self._postgres.run(SQL.forget_host, host=host):
                return
            if await self._postgres.value(SQL.knows_host, host=host):
                raise HostRuns(host)
        raise HostUnknown(host)

    async def _set_draining(self, host: str, *, is_draining: bool) -> None:
        if not is_storable(host) or not await self._postgres.run(
            SQL.set_draining, host=host, is_draining=is_draining
        ):
            raise HostUnknown(host)


LEASES_PER_SWEEP: Final = 100
BUSY_PER_SWEEP: Final = 3
JOBS_PER_SWEEP: Final = 5_000
LANES_PER_SWEEP: Final = 1_000
LANE_IDLE_S: Final = 3_600.0
TEND_EVERY_S: Final = 60.0
LOST_KEPT_S: Final = 7 * 86_400.0
"""A lost agent is listed for this long, unless it is back or forgotten."""
GROUP_OPEN_S_MAX: Final = 7 * 86_400.0
"""An open group is dropped after this, since its process must have died."""
WORKFLOWS_PER_TENDING: Final = 1_000
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class Sweeper:
    """Returns leases of dead hosts, moves due jobs into lanes, folds counts, drops expired rows."""

    def __init__(self, postgres: Postgres, config: JobsConfig, lanes: Lanes) -> None:
        self._postgres = postgres
        self._config = config
        self._lanes = lanes
        self._lane_after = ("", "")
        self._tended_s: float | None = None
        self._busy: dict[int, None] = {}

    async def run_once(self) -> Sweep:
        """Do one step. Each lease is returned in its own short transaction."""
        stuck = await self._postgres.value(SQL.end_stuck_claims, lease_s=self._config.lease_s)
        if stuck:
            _log.warning("stuck_claims_ended", claims=stuck)
        returned = await self._return_leases()
        moved = await self._postgres.value(SQL.move_due, jobs_max=JOBS_PER_SWEEP)
        dropped = await self._drop_old("job_failed", "ended_at", self._config.failed_kept_s)
        keys = await self._postgres.run(SQL.drop_old_keys, keys_max=JOBS_PER_SWEEP)
        hosts = await self._postgres.run(SQL.drop_hosts, lost_kept_s=LOST_KEPT_S)
        limiter, lane = self._lane_after
        seen: Any = await self._postgres.one(
            SQL.remove_idle_lanes,
            limiter=limiter,
            lane=lane,
            lanes_max=LANES_PER_SWEEP,
            idle_s=LANE_IDLE_S,
        )
        self._lane_after = (seen["last_limiter"] or "", seen["last_name"] or "")
        await self._postgres.run(SQL.restore_queues)
        for row in await self._postgres.all(SQL.unspread_limiters):
            await self._lanes.spread(row["name"])
        kept = await self._drop_old("job_done_rest", "drop_at", 0)
        events = await self._drop_old("workflow_event", "sent_at", self._config.events_kept_s)
        folded = await self._postgres.value(SQL.fold_counts, rows_max=JOBS_PER_SWEEP)
        await self._tend()
        leases_returned = sum(count > 0 for count in returned)
        return Sweep(
            leases_returned=leases_returned,
            jobs_returned=sum(returned),
            lane_jobs_moved=moved,
            failed_dropped=dropped,
            hosts_dropped=hosts,
            more=JOBS_PER_SWEEP in (moved, dropped, keys, kept, events, folded)
            or leases_returned == LEASES_PER_SWEEP,
            lanes_removed=seen["removed"],
        )

    async def _return_leases(self) -> list[int]:
        """Return expired leases. Return the number of jobs of each.

        A locked lease does not block the others. It is retried after them, one per sweep; after a
        few newly locked ones the sweep continues with its other work.
        """
        rows = await self._postgres.all(
            SQL.expired_leases, leases_max=LEASES_PER_SWEEP + len(self._busy)
        )
        found = [row["id"] for row in rows]
        again = [lease_id for lease_id in self._busy if lease_id in found]
        fresh = [lease_id for lease_id in found if lease_id not in self._busy]
        self._busy = dict.fromkeys(again[1:])
        returned: list[int] = []
        for lease_id in [*fresh, *again[:1]]:
            try:
                returned.append(
                    await self._postgres.value(
                        SQL.return_lease, lease=lease_id, losses_max=self._config.losses_max
                    )
                )
            except PostgresBusy as error:
                _often.warning("lease_not_returned", lease_id=lease_id, error=error.text)
                self._busy[lease_id] = None
                if len(self._busy) - len(again[1:]) == BUSY_PER_SWEEP:
                    break
        return returned

    async def _tend(self) -> None:
        """Maintain partitions, workflows and groups, once a minute or while much is left."""
        now_s = time.monotonic()
        if self._tended_s is None or now_s - self._tended_s > TEND_EVERY_S:
            is_more = await self._postgres.value(
                SQL.tend_workflows,
                kept_s=self._config.events_kept_s,
                rows_max=WORKFLOWS_PER_TENDING,
            )
            self._tended_s = None if is_more else now_s
            await self._postgres.value(SQL.maintain_done_partitions)
            forgotten = await self._drop_old("job_group", "opened_at", GROUP_OPEN_S_MAX)
            if forgotten:
                _log.warning("groups_left_open", groups=forgotten)

    async def _drop_old(self, table: str, column: str, kept_s: float) -> int:
        """Delete rows of a table whose moment is `kept_s` ago. Return how many."""
        dropped: int = await self._postgres.value(
            SQL.drop_old, table=table, column=column, kept_s=kept_s, rows_max=JOBS_PER_SWEEP
        )
        return dropped
