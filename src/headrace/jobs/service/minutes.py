"""Minute statistics of a queue."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.errors import InvalidSpan, QueueUnknown
from headrace.jobs.fleet.facts import QueueMinute
from headrace.jobs.intake import is_storable

SPAN_MAX: Final = timedelta(days=2)
SPAN: Final = timedelta(hours=1)


async def queue_minutes(
    postgres: Postgres, queue: str, *, from_at: datetime | None, to_at: datetime | None
) -> list[QueueMinute]:
    """What the queue did in each minute of the span, oldest first: the last hour, where nothing is said.

    Minutes without work are left out. Raises: QueueUnknown, InvalidSpan.
    """
    try:
        until_at = _in_utc(to_at or datetime.now(UTC) + timedelta(minutes=1))
        since_at = _in_utc(from_at or until_at - SPAN)
    except (OverflowError, ValueError) as error:
        raise InvalidSpan(
            "minutes: from and to are moments with a time zone such as 2026-11-21T10:00:00Z"
        ) from error
    if not timedelta() < until_at - since_at <= SPAN_MAX:
        raise InvalidSpan(
            f"minutes from {since_at.isoformat()} to {until_at.isoformat()}: ask for a span of at"
            f" most {SPAN_MAX.days} days that begins before it ends"
        )
    rows = await store.queues.find_queues(postgres, [queue]) if is_storable(queue) else []
    if not rows:
        raise QueueUnknown(queue)
    return await store.minutes.queue_minutes(
        postgres,
        rows[0].id,
        from_at=since_at,
        to_at=until_at,
        minutes_max=int(SPAN_MAX.total_seconds() / 60) + 1,
    )


def _in_utc(moment: datetime) -> datetime:
    """The same moment in UTC. Raises: ValueError without a time zone; OverflowError before all time."""
    if moment.tzinfo is None:
        raise ValueError(moment)
    return moment.astimezone(UTC)
