"""The fleet as people see and steer it: hosts, the plan and its reasons, alerts; hosts that are to be emptied."""

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
    """The verbs of the fleet."""

    def __init__(self, postgres: Postgres, config: JobsConfig) -> None:
        self._postgres = postgres
        self._config = config

    async def state(self) -> FleetState:
        """Hosts with their slots, who plans, the last decisions, the newest open alerts of how many."""
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
        """Why slots moved, newest first; with `before` those of smaller ids. Raises: InvalidFilter."""
        require_page("decisions_max", decisions_max)
        if before is not None:
            before = max(0, min(before, JOB_ID_LAST))
        return await store.fleet.decisions(
            self._postgres, before=before, decisions_max=decisions_max
        )

    async def alerts(self, *, is_open: bool = False) -> list[Alert]:
        """The newest 100 alerts; with `is_open` only those not cleared."""
        return await store.fleet.find_alerts(
            self._postgres, is_open=is_open, alerts_max=ALERTS_SHOWN
        )

    async def load(self) -> FleetLoad:
        """What each queue did in the last five minutes and this one, and all of them in the minutes of the last hour."""
        return await store.fleet.fleet_load(
            self._postgres, minutes=LOAD_MINUTES, minutes_shown=MINUTES_SHOWN + 1
        )

    async def failures(self) -> list[QueueFailures]:
        """Jobs that failed or were quarantined in the last hour, by queue; of very many the newest 1,000."""
        return await store.fleet.recent_failures(
            self._postgres, span_s=FAILURES_SPAN_S, jobs_max=FAILURES_COUNTED_MAX
        )

    async def drain(self, host: str) -> None:
        """Let a host finish what it has and take nothing new, until `undrain` or its next start. Raises: HostUnknown."""
        await self._set_draining(host, is_draining=True)

    async def undrain(self, host: str) -> None:
        """Let a host take part again. Raises: HostUnknown."""
        await self._set_draining(host, is_draining=False)

    async def _set_draining(self, host: str, *, is_draining: bool) -> None:
        is_known = is_storable(host) and await store.fleet.set_draining(
            self._postgres, host, is_draining=is_draining
        )
        if not is_known:
            raise HostUnknown(host)
