"""This process's share of the connections to a host: what the fleet may have, by the slots that fetch.

Every slot bound to a timeout class counts, whichever hosts it happens to work for: nobody has to be asked
before a connection is opened. Floating slots are not counted; they fetch where no bound slot does. The
number is read from the plan every REFRESH_S.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from headrace.fetch.places import Places
from headrace.fetch.routing import Classes
from headrace.jobs import Jobs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

REFRESH_S: Final = 30.0
_LOG: Final = logger(__name__)


class Share:
    """Keeps `places.each` at the share of this process."""

    def __init__(self, jobs: Jobs, classes: Classes, places: Places, *, connections: int) -> None:
        self._jobs = jobs
        self._queues = {c.queue for c in (*classes.listed, *classes.former)}
        self._places = places
        self._connections = connections
        self._due_s = 0.0
        self._refreshing: asyncio.Task[None] | None = None

    def refresh_soon(self) -> None:
        """Read the plan again, if that was not done for a while; returns at once."""
        if time.monotonic() >= self._due_s and self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())

    async def close(self) -> None:
        """End what is under way."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def _refresh(self) -> None:
        try:
            state = await self._jobs.fleet.state()
            slots = sum(
                1 if host.kind == "work" else planned_slots(host.planned, self._queues)
                for host in state.hosts
                if not host.is_silent
            )
            self._places.each = share_of(self._connections, slots)
        except HeadraceError as error:
            _LOG.info("share_not_read", error=error.text)
        finally:
            self._due_s = time.monotonic() + REFRESH_S
            self._refreshing = None


def planned_slots(planned: dict[str, int], queues: set[str]) -> int:
    """Slots of a host that are bound to one of `queues`."""
    return sum(slots for queue, slots in planned.items() if queue in queues)


def share_of(connections: int, slots: int) -> int:
    """Connections to one host that each of `slots` processes keeps to; at least one."""
    return max(1, math.ceil(connections / max(1, slots)))
