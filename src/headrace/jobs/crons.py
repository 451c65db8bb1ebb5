"""Schedules of recurring jobs.

`cronsim` parses the five fields. It follows Debian's cron through clock changes. A job at fixed
hours runs once on a day that skips its hour, and once on a day that has it twice. A job with `*` in
minute or hour follows elapsed time. Missed times cause one run; the next one is at the first
scheduled time in the future.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from headrace.jobs.errors import InvalidCron

SPEC_CHARACTERS_MAX: Final = 128
FIELD_VALUES: Final = (60, 24, 31, 12, 7)
FIELDS: Final = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31 (in these months) or L",
    "month": "1 to 12 or JAN to DEC",
    "day-of-week": "0 to 7 or SUN to SAT",
}
"""The fields by the names that cronsim gives them, with their values."""
STEP: Final = re.compile(r"/([0-9]+)")
NO_ZONES: Final = frozenset({"localtime", "posixrules", "Factory"})
"""Zone files that differ between machines or name no zone."""


class NewCron(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cron to create. `spec` has five fields: minute, hour, day, month, day of week."""

    name: str
    spec: str
    queue: str
    tz: str = "UTC"
    payload: Any = None
    priority: int = 5


class Cron(NewCron, frozen=True, kw_only=True):
    """A stored cron."""

    next_at: datetime
    """If paused: the next scheduled time at the time of the pause."""
    last_at: datetime | None
    last_job: int | None
    paused: bool
    source: str
    """`code` if declared by @app.cron, else `api`."""
    error: str | None
    """Why it paused itself."""


def next_moment(spec: str, tz: str, after_at: datetime) -> datetime:
    """The first scheduled time of `spec` after `after_at`, in UTC. Raises: InvalidCron."""
    zone = _zone(tz)
    if len(spec) > SPEC_CHARACTERS_MAX or len(spec.split()) != 5:
        raise InvalidCron(
            f"cron {spec[:SPEC_CHARACTERS_MAX]!r}: expected five fields such as '0 4 * * *':"
            " minute, hour, day of month, month, day of week"
        )
    for text, values in zip(spec.split(), FIELD_VALUES, strict=True):
        for step in STEP.findall(text):
            if int(step) > values:
                raise InvalidCron(
                    f"cron {spec!r}: /{step} steps over all {values} values of its field:"
                    " give the values"
                )
    try:
        moments = CronSim(spec, after_at.astimezone(zone))
    except CronSimError as error:
        raise InvalidCron(_wrong_field(spec, str(error))) from error
    # In the repeated hour cronsim may return a moment of the first pass during the second.
    for moment in moments:
        moment_at = moment.astimezone(UTC)
        if moment_at > after_at:
            return moment_at
    raise InvalidCron(f"cron {spec!r}: never fires: give it a day that its months have")


def _wrong_field(spec: str, reason: str) -> str:
    """The text of a wrong field; `reason` of cronsim is such as `Bad minute`."""
    name = reason.lower().removeprefix("bad ")
    names = list(FIELDS)
    if name not in names:
        return f"cron {spec!r}: {reason}: write fields as in '*/10 8-18 * * MON-FRI'"
    given = spec.split()[names.index(name)]
    return (
        f"cron {spec!r}: {name.replace('-', ' ')} {given!r} is not valid: expected {FIELDS[name]},"
        " `*`, a range such as 1-5, a list such as 1,5 or a step such as */2"
    )


def _zone(tz: str) -> ZoneInfo:
    try:
        return ZoneInfo("" if tz in NO_ZONES else tz)
    except (KeyError, ValueError, OSError) as error:
        raise InvalidCron(
            f"time zone {tz[:80]!r} is unknown: use a name such as UTC or Europe/Berlin"
        ) from error
