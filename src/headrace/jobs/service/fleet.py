"""The fleet for operators: hosts, the plan and its decisions, alerts, draining."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.errors import HostUnknown
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.state import (
    DECISIONS_SHOWN,
    FAILURES_COUNTED_MAX,
    FAILURES_SPAN_S,
    LOAD_MINUTES,
    MINUTES_SHOWN,
    Decision,
    FleetLoad,
    FleetState,
    QueueFailures,
)
from headrace.jobs.model import JOB_ID_LAST, JobsConfig
from headrace.jobs.validation import is_storable, require_page

ALERTS_SHOWN: Final = 100


class Fleet:
    """The fleet of an app; `Jobs.fleet`."""

    def __init__(self, postgres: Postgres, config: JobsConfig) -> None:
        self._postgres = postgres
        self._config = config

    async def state(self) -> FleetState:
        """Hosts with their slots, the plan, the newest decisions and open alerts."""
        hosts = await store.fleet.fleet_hosts(self._postgres, silent_s=self._config.host_silent_s)
        planned = await store.fleet.slot_map(self._postgres)
        return FleetState(
            hosts=[
                msgspec.structs.replace(host.shown, planned=planned.get(host.shown.name, {}))
                for host in hosts
            ],
            plan=await store.fleet.find_plan(self._postgres),
            decisions=await self.decisions(decisions_max=DECISIONS_SHOWN),
            alerts_open=await store.fleet.count_open_alerts(self._postgres),
            alerts=await self.alerts(is_open=True),
        )

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

    async def load(self) -> FleetLoad:
        """Counts of each queue in the last five minutes, and of all queues per minute of the last
        hour.
        """
        return await store.fleet.fleet_load(
            self._postgres, minutes=LOAD_MINUTES, minutes_shown=MINUTES_SHOWN + 1
        )

    async def failures(self) -> list[QueueFailures]:
        """Failed and quarantined jobs of the last hour by queue, from the newest 1,000."""
        return await store.fleet.recent_failures(
            self._postgres, span_s=FAILURES_SPAN_S, jobs_max=FAILURES_COUNTED_MAX
        )

    async def drain(self, host: str) -> None:
        """Drain a host until `undrain` or its next start; running jobs finish.

        Raises: HostUnknown.
        """
        await self._set_draining(host, is_draining=True)

    async def undrain(self, host: str) -> None:
        """Stop draining a host. Raises: HostUnknown."""
        await self._set_draining(host, is_draining=False)

    async def _set_draining(self, host: str, *, is_draining: bool) -> None:
        is_known = is_storable(host) and await store.fleet.set_draining(
            self._postgres, host, is_draining=is_draining
        )
        if not is_known:
            raise HostUnknown(host)
