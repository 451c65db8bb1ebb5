"""Recent history for panels: rates of the newest minute, deaths of the last hour, last values.

The first reading of this machine's metrics gives no rates, and a browser without scripts takes no
second one. The history of all hosts has them for the last minute that was recorded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeVar

from headrace.console.history import RECORDED_AFTER_S
from headrace.console.views import PanelData, ViewContext, attempt
from headrace.web.marks import Mark

Value = TypeVar("Value")
LOOKED_BACK: Final = timedelta(minutes=10)
MINUTE_S: Final = 60.0
READ_EVERY_S: Final = 10.0
OF_FLUSHER: Final = 'role="flusher"'
"""Selects the role that counts; every role declares its series."""
OF_NODE: Final = 'role="media"'
"""The same for media."""
OF_ROLES: Final = (("views_flushed_total", OF_FLUSHER), ("media_requests_total", OF_NODE))
"""Series that one role alone counts."""
MARKS_S: Final = 3_600.0
"""Time span of deaths and restarts."""
OUTAGES_SHOWN_FOR: Final = timedelta(hours=24)
OUTAGES_EVERY_S: Final = 30.0
SERIES: Final = (
    "jobs_ended",
    "fetch_photos",
    "fetch_bytes",
    "views_flushed",
    "feed_pages",
    "media_requests",
    "media_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMinute:
    """The newest recorded minute: rates per second by series and key."""

    ended_at: datetime
    per_s: Mapping[str, Mapping[str, float]]

    def rate_per_s(self, series: str, key: str = "") -> float:
        """The rate of a key of a series, or the sum of all; 0 if nothing was recorded."""
        rates = self.per_s.get(series, {})
        return rates.get(key, 0.0) if key else sum(rates.values())

    @property
    def note(self) -> str:
        """When it was: `minute to 17:02`."""
        return f"minute to {self.ended_at:%H:%M}"


async def attempt_or_last(
    context: ViewContext, name: str, call: Callable[[], Awaitable[Value]]
) -> PanelData[Value]:
    """As `attempt`; while `call` fails, the last value of this console beside the error."""
    found = await attempt(call)
    if found.error is None:
        context.rates.remember(name, (context.now_at, found.value))
        return found
    at, value = context.rates.last(name) or (None, None)
    return replace(found, value=value, at=at)


async def newest_minute(context: ViewContext) -> StoredMinute | None:
    """The newest recorded minute, while rates of this machine are missing.

    They are not measured yet, or their roles do not run here.
    """
    rates = context.rates
    if not rates.is_measuring and all(rates.total(*one) is not None for one in OF_ROLES):
        return None
    read = partial(read_minute, context)
    return (await attempt(context.rates.kept, "stored_minute", READ_EVERY_S, read)).value


async def recent_marks(context: ViewContext) -> list[Mark]:
    """Starts, deaths and outages of the last hour, on all hosts."""
    since_at = context.now_at - timedelta(seconds=MARKS_S)
    read = partial(context.history.marks, from_at=since_at, to_at=context.now_at)
    found: list[Mark] = await context.rates.kept("marks", READ_EVERY_S, read)
    return found


async def recent_outages(context: ViewContext) -> PanelData[list[Mark]]:
    """Outages of engines in the last day, newest first."""
    since_at = context.now_at - OUTAGES_SHOWN_FOR
    marks = partial(context.history.marks, from_at=since_at, to_at=context.now_at, kind="outage")
    read = partial(context.rates.kept, "outages", OUTAGES_EVERY_S, marks)
    found = await attempt_or_last(context, "last_outages", read)
    return found.map(lambda outages: outages[::-1])


async def read_minute(context: ViewContext) -> StoredMinute | None:
    """The newest minute that any host recorded in the last LOOKED_BACK.

    None if nothing happened in it: the first minute after a start has no growth yet.
    """
    recorded_at = context.now_at - timedelta(seconds=RECORDED_AFTER_S)
    this_at = recorded_at.replace(second=0, microsecond=0)
    found = await context.history.read(SERIES, from_at=this_at - LOOKED_BACK, to_at=this_at)
    recorded: Sequence[int] = [n for n, is_recorded in enumerate(found.is_recorded) if is_recorded]
    if not recorded:
        return None
    last = recorded[-1]
    if not any(line.values[last] for one in found.series for line in one.lines):
        return None
    return StoredMinute(
        ended_at=found.from_at + timedelta(seconds=(last + 1) * found.step_s),
        per_s={
            one.series: {line.label: (line.values[last] or 0.0) / MINUTE_S for line in one.lines}
            for one in found.series
        },
    )
