"""The door: what is asked for is checked whole, then turned into arrays for one statement. No I/O.

Either every job of a call passes or nothing is enqueued; all faults of a call are told at once (the first
hundred of them).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from headrace.jobs.errors import (
    BatchTooLarge,
    InvalidFilter,
    InvalidJob,
    JobUnknown,
    PayloadTooLarge,
)
from headrace.jobs.model import (
    AT_AWAY_S_MAX,
    BYTES_PER_CALL_MAX,
    JOB_ID_LAST,
    JOBS_PER_CALL_MAX,
    NAME_CHARACTERS_MAX,
    PRIORITY_LAST,
    VERSION_LAST,
    WEIGHT_MAX,
    WINDOW_S_MAX,
    NewGroup,
    NewJob,
)
from headrace.kernel.errors import FieldProblem
from headrace.kernel.routes import PAGE_ROWS_MAX, PAYLOAD_BYTES_MAX

PROBLEMS_MAX: Final = 100
LIMIT_MAX: Final = 10**9
"""Of what a lane may start or hold."""


def _plain(value: Any) -> Any:
    """A `JobRef` or the name of a lane in hand as what it stands for. Raises: TypeError for all else."""
    for kind in (int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_encoder: Final = msgspec.json.Encoder(enc_hook=_plain)


@dataclass(slots=True)
class Rows:
    """Jobs as columns, one list a column, in the order they were given."""

    queues: list[str] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    run_ats: list[datetime | None] = field(default_factory=list)
    delays_s: list[float | None] = field(default_factory=list)
    lanes: list[str | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(self.queues)


def too_many_jobs(count: int) -> BatchTooLarge:
    """The error of a call with `count` jobs."""
    return BatchTooLarge(f"{count} jobs in one call: send at most {JOBS_PER_CALL_MAX} at a time")


def prepare_jobs(jobs: Sequence[NewJob]) -> Rows:
    """Check `jobs` and encode their payloads.

    Raises: InvalidJob, PayloadTooLarge, BatchTooLarge.
    """
    if len(jobs) > JOBS_PER_CALL_MAX:
        raise too_many_jobs(len(jobs))
    rows = _append_all(jobs)
    if rows.size_bytes > BYTES_PER_CALL_MAX:
        raise BatchTooLarge(
            f"{rows.size_bytes} bytes of payload in one call: send at most {BYTES_PER_CALL_MAX}"
        )
    return rows


def prepare_groups(groups: Sequence[NewGroup]) -> tuple[Rows, Rows]:
    """Check `groups`; return their callbacks' rows and all their members' rows, in order.

    Raises: InvalidJob, PayloadTooLarge, BatchTooLarge.
    """
    callbacks = prepare_jobs([group.on_done for group in groups])
    for index, payload in enumerate(callbacks.payloads):
        value = msgspec.json.decode(payload)
        if value is None:
            callbacks.payloads[index] = b"{}"
        elif not isinstance(value, dict) or "group" in value:
            raise InvalidJob(
                f"group {index}: the payload of on_done is an object without the key 'group',"
                " which is added"
            )
    return callbacks, _append_all([member for group in groups for member in group.members])


def refuse(problems: Sequence[FieldProblem], what: str = "") -> None:
    """Refuse a call over `problems`, if there are any. Raises: InvalidJob."""
    if problems:
        lines = "; ".join(f"{p.pointer}: {what}{p.text}" for p in problems[:3])
        raise InvalidJob(f"nothing was enqueued: {lines}", problems=tuple(problems[:PROBLEMS_MAX]))


def _append_all(jobs: Sequence[NewJob]) -> Rows:
    problems: list[FieldProblem] = []
    latest = datetime.now(UTC) + timedelta(seconds=AT_AWAY_S_MAX)
    for index, job in enumerate(jobs):
        found = _faults(job, latest)
        if found and len(problems) < PROBLEMS_MAX:
            problems += [FieldProblem(f"/{index}/{name}", "invalid", text) for name, text in found]
    refuse(problems)
    rows = Rows(
        queues=[job.queue for job in jobs],
        priorities=[job.priority for job in jobs],
        run_ats=[job.at for job in jobs],
        delays_s=[job.after_s for job in jobs],
        lanes=[job.lane for job in jobs],
        keys=[job.unique for job in jobs],
        payloads=[_encoded(index, job.payload) for index, job in enumerate(jobs)],
        versions=[job.version for job in jobs],
    )
    rows.size_bytes = sum(map(len, rows.payloads))
    for index, job in enumerate(jobs):
        if job.spread_s:
            _spread(rows, index, random.random() * job.spread_s)
    return rows


def _spread(rows: Rows, index: int, late_s: float) -> None:
    """Let a job run `late_s` after it would be due; a moment in the past is due now."""
    at = rows.run_ats[index]
    if at is None:
        rows.delays_s[index] = (rows.delays_s[index] or 0.0) + late_s
    else:
        rows.run_ats[index] = max(at, datetime.now(UTC)) + timedelta(seconds=late_s)


def _encoded(index: int, payload: Any) -> bytes:
    try:
        encoded = _encoder.encode(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"expected what JSON can hold: {error}"
        raise InvalidJob(
            f"nothing was enqueued: /{index}/payload: {text}",
            problems=(FieldProblem(f"/{index}/payload", "invalid", text),),
        ) from error
    if len(encoded) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLarge(
            f"/{index}/payload: {len(encoded)} bytes, at most {PAYLOAD_BYTES_MAX} are taken: put the"
            " bytes into the object store and their key into the payload"
        )
    # JSON has neither NaN nor Infinity, and the encoder writes null for them.
    if payload is not None and b"null" in encoded:
        _require_finite(index, payload)
    return encoded


def _require_finite(index: int, payload: Any) -> None:
    """Raises: InvalidJob, with the place of the first number that is none."""
    place = _place_of_infinite(msgspec.to_builtins(payload, enc_hook=_plain_or_raw))
    if place is not None:
        text = "expected a finite number: JSON has neither NaN nor Infinity"
        refuse([FieldProblem(f"/{index}/payload{place}", "invalid", text)])


def _plain_or_raw(value: Any) -> Any:
    return None if isinstance(value, msgspec.Raw) else _plain(value)


def _place_of_infinite(value: Any) -> str | None:
    """The JSON pointer of the first NaN or Infinity."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for name, one in inner:
        place = _place_of_infinite(one)
        if place is not None:
            return f"/{str(name).replace('~', '~0').replace('/', '~1')}{place}"
    return None


def _faults(job: NewJob, latest: datetime) -> list[tuple[str, str]]:
    """(field, what is wrong) of one job; empty for a good one."""
    found = []
    if type(job.priority) is not int or not 0 <= job.priority <= PRIORITY_LAST:
        found.append(("priority", f"expected a whole number 0 to {PRIORITY_LAST}"))
    if type(job.version) is not int or not 1 <= job.version <= VERSION_LAST:
        found.append(("version", f"expected a whole number 1 to {VERSION_LAST}"))
    if job.at is not None and (fault := _fault_of_moment(job, latest)):
        found.append(("at", fault))
    if job.spread_s is not None:
        found += _spread_faults(job, job.spread_s, latest)
    if job.after_s is not None and not is_number(job.after_s, 0, AT_AWAY_S_MAX):
        found.append(("after_s", f"expected seconds from 0 to {AT_AWAY_S_MAX:.0f}"))
    for name, value in (("unique", job.unique), ("lane", job.lane)):
        if value is not None and not is_name(value):
            found.append((name, f"expected 1 to {NAME_CHARACTERS_MAX} printable characters"))
    return found


def _fault_of_moment(job: NewJob, latest: datetime) -> str:
    """What is wrong with the moment that a job gives; empty for nothing."""
    if not isinstance(job.at, datetime) or not _has_utc(job.at):
        return "expected a moment with its time zone, from year 1 on in UTC"
    if job.after_s is not None:
        return "expected `at` or `after_s`, not both"
    return "expected a moment within a year" if job.at > latest else ""


def _spread_faults(job: NewJob, spread_s: float, latest: datetime) -> list[tuple[str, str]]:
    """The last moment of the spread must be within a year as well."""
    if not is_number(spread_s, 0, AT_AWAY_S_MAX):
        return [("spread_s", f"expected seconds from 0 to {AT_AWAY_S_MAX:.0f}")]
    first = datetime.now(UTC)
    if isinstance(job.at, datetime) and _has_utc(job.at) and job.at <= latest:
        first = max(first, job.at)
    elif is_number(job.after_s, 0, AT_AWAY_S_MAX):
        first += timedelta(seconds=job.after_s or 0.0)
    if first + timedelta(seconds=spread_s) > latest + timedelta(seconds=1):
        return [("spread_s", "expected to end within a year")]
    return []


def _has_utc(moment: datetime) -> bool:
    """Whether `moment` can be said in UTC; the first and last hours of the calendar cannot all."""
    try:
        return moment.utcoffset() is not None and moment.astimezone(UTC) is not None
    except (OverflowError, ValueError):
        return False


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can be asked for `text` at all: no NUL, no lone surrogates."""
    try:
        return "\0" not in text.encode().decode()
    except UnicodeEncodeError:
        return False


def is_name(value: Any) -> bool:
    """Whether `value` may name a lane, a limiter or a key."""
    return isinstance(value, str) and 1 <= len(value) <= NAME_CHARACTERS_MAX and value.isprintable()


def is_row_id(value: Any) -> bool:
    """Whether a row can have the id `value`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= JOB_ID_LAST


def require_job_id(job_id: int) -> None:
    """Refuse an id that no row can have. Raises: JobUnknown."""
    if not is_row_id(job_id):
        raise JobUnknown(job_id)


def require_page(name: str, rows_max: int) -> None:
    """Refuse a page of no rows, or of more than one call may ask for. Raises: InvalidFilter."""
    if type(rows_max) is not int or not 1 <= rows_max <= PAGE_ROWS_MAX:
        text = f"expected a whole number 1 to {PAGE_ROWS_MAX}"
        raise InvalidFilter(
            f"a page: /{name}: {text}", problems=(FieldProblem(f"/{name}", "invalid", text),)
        )


def require_lane(
    limiter: str,
    lane: str,
    *,
    starts_max: int | None,
    window_s: float | None,
    concurrency: int | None,
    weight: int,
) -> None:
    """Check a lane's limits. Raises: InvalidJob, with every fault."""
    found = []
    if not is_name(limiter) or not is_name(lane):
        found.append(("lane", f"expected names of 1 to {NAME_CHARACTERS_MAX} printable characters"))
    if (starts_max is None) != (window_s is None):
        found.append(("starts_max", "expected together with window_s, or both left out"))
    if starts_max is not None and not is_number(starts_max, 1, LIMIT_MAX):
        found.append(("starts_max", f"expected 1 to {LIMIT_MAX}"))
    if window_s is not None and not is_number(window_s, 0.001, WINDOW_S_MAX):
        found.append(("window_s", f"expected seconds over 0, up to {WINDOW_S_MAX:.0f}"))
    if concurrency is not None and not is_number(concurrency, 1, LIMIT_MAX):
        found.append(("concurrency", f"expected 1 to {LIMIT_MAX}; to stop a lane set paused"))
    if not is_number(weight, 1, WEIGHT_MAX):
        found.append(("weight", f"expected 1 to {WEIGHT_MAX}"))
    if found:
        problems = tuple(FieldProblem(f"/{name}", "invalid", text) for name, text in found)
        lines = "; ".join(f"{p.pointer}: {p.text}" for p in problems)
        raise InvalidJob(f"lane {str(lane)[:160]!r}: {lines}", problems=problems)


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether `value` is a number from `least` to `most`; NaN is none."""
    is_any = isinstance(value, int | float) and not isinstance(value, bool)
    # No `isfinite`: it fails for whole numbers beyond what a float holds, and comparisons refuse the rest.
    return is_any and least <= value <= most
