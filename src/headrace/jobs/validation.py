"""Validation of enqueue calls: check everything, then build columns for one statement. No I/O.

Either every job of a call passes or nothing is enqueued. One error reports up to a hundred faults.
Each payload is encoded once; the bytes are then decoded by the task that will run it, if this
process has that task, so that the caller gets the error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from headrace.jobs.columns import JobColumns, JobsAlike
from headrace.jobs.errors import (
    BatchTooLarge,
    InvalidFilter,
    InvalidJob,
    JobUnknown,
    PayloadTooLarge,
)
from headrace.jobs.headers import OwnOptions
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
from headrace.jobs.tasks import Queue, Registry, Task
from headrace.jobs.tasks.options import RETRIES_MAX, TIMEOUT_S_MAX
from headrace.kernel.errors import FieldProblem, mismatch
from headrace.kernel.routes import PAGE_ROWS_MAX, PAYLOAD_BYTES_MAX
from headrace.kernel.storable import NUL, find_unstorable, plain_model

JOB: Final = "a job such as task.job(field=value)"
PROBLEMS_MAX: Final = 100
LIMIT_MAX: Final = 10**9
"""Greatest limit of a lane."""
SECONDS: Final = f"seconds from 0 to {AT_AWAY_S_MAX:.0f}"
NAME: Final = f"1 to {NAME_CHARACTERS_MAX} printable characters"


def _plain(value: Any) -> Any:
    """The plain value of a `JobRef`, a lane's name or a pydantic model. Raises: TypeError."""
    for kind in (int, str):
        if isinstance(value, kind):
            return kind(value)
    return plain_model(value)


_encoder: Final = msgspec.json.Encoder(enc_hook=_plain)


def too_many_jobs(count: int) -> BatchTooLarge:
    """The error of a call with `count` jobs."""
    return BatchTooLarge(f"{count} jobs in one call: send at most {JOBS_PER_CALL_MAX} at a time")


def prepare_jobs(jobs: Sequence[NewJob], registry: Registry | None = None) -> JobColumns:
    """Check `jobs`, encode each payload once, and decode it against its task in `registry`.

    Raises: InvalidJob, PayloadTooLarge, BatchTooLarge.
    """
    try:
        if len(jobs) > JOBS_PER_CALL_MAX:
            raise too_many_jobs(len(jobs))
        rows = _alike_to_columns(jobs) if isinstance(jobs, JobsAlike) else _to_columns(jobs)
    except (AttributeError, TypeError):
        _require_jobs(jobs)
        raise
    if rows.size_bytes > BYTES_PER_CALL_MAX:
        raise BatchTooLarge(
            f"{rows.size_bytes} bytes of payload in one call: send at most {BYTES_PER_CALL_MAX}"
        )
    if registry is not None:
        _require_decodable(rows, registry)
    return rows


def _require_jobs(jobs: object) -> None:
    """Refuse what is no list of jobs. Raises: InvalidJob."""
    if not isinstance(jobs, Sequence) or isinstance(jobs, str | bytes):
        raise InvalidJob(f"nothing was enqueued: {mismatch(f'a list, each of them {JOB}', jobs)}")
    for index, job in enumerate(jobs):
        if not isinstance(job, NewJob):
            raise not_a_job(job, f"/{index}: ")


def not_a_job(given: object, pointer: str = "") -> InvalidJob:
    """The error for a queue, a task or a payload where a job is expected."""
    queue = getattr(given, "queue", given if isinstance(given, str) else "NAME")
    shown = f"task {queue}" if isinstance(given, Queue) else given
    return InvalidJob(
        f"nothing was enqueued: {pointer}{mismatch(JOB, shown)}: enqueue into a task by"
        " `await task.enqueue(field=value)`, into another queue by"
        f" `await jobs.enqueue(NewJob(queue={queue!r}, payload=...))`"
    )


def prepare_change(job: NewJob, registry: Registry | None) -> JobColumns:
    """Check the new values of a stored job. Raises: InvalidJob, PayloadTooLarge."""
    try:
        return prepare_jobs([job], registry)
    except InvalidJob as error:
        problems = [
            FieldProblem(problem.pointer.removeprefix("/0"), problem.code, problem.text)
            for problem in error.problems
        ]
        InvalidJob.require_none(problems, "nothing was changed", shown_max=3)
        raise


def prepare_groups(groups: Sequence[NewGroup], registry: Registry) -> tuple[JobColumns, JobColumns]:
    """Check `groups`; return the columns of their callbacks and of all members, in order.

    Raises: InvalidJob, PayloadTooLarge, BatchTooLarge.
    """
    callbacks = prepare_jobs([group.on_done for group in groups])
    if any(group.on_done.unique_for_s or group.on_done.chain for group in groups):
        raise InvalidJob("on_done: expected neither unique_for nor chain")
    for index, payload in enumerate(callbacks.payloads):
        if payload == b"null":
            callbacks.payloads[index] = b"{}"
        elif not payload.startswith(b"{") or _has_group(payload):
            raise InvalidJob(
                f"group {index}: the payload of on_done is an object without the key 'group',"
                " which is added"
            )
    _require_decodable(callbacks, registry, has_group=True)
    members = _to_columns([member for group in groups for member in group.members])
    _require_decodable(members, registry)
    return callbacks, members


def _has_group(payload: bytes) -> bool:
    """Whether the JSON object has the key `group`."""
    return b'"group"' in payload and "group" in msgspec.json.decode(payload)


def refuse(problems: Sequence[FieldProblem], what: str = "") -> None:
    """Refuse a call with `problems`. Raises: InvalidJob."""
    if problems:
        lines = "; ".join(f"{p.pointer}: {what}{p.text}" for p in problems[:3])
        raise InvalidJob(f"nothing was enqueued: {lines}", problems=tuple(problems[:PROBLEMS_MAX]))


def _to_columns(jobs: Sequence[NewJob]) -> JobColumns:
    problems: list[FieldProblem] = []
    latest = datetime.now(UTC) + timedelta(seconds=AT_AWAY_S_MAX)
    for index, job in enumerate(jobs):
        found = _faults(job, latest)
        if found and len(problems) < PROBLEMS_MAX:
            problems += [FieldProblem(f"/{index}/{name}", "invalid", text) for name, text in found]
    refuse(problems)
    rows = JobColumns(
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
    if any(map(_has_options, jobs)):
        rows.options = [_own_options(job) for job in jobs]
        rows.key_times_s = [job.unique_for_s for job in jobs]
        if any(job.chain is not None for job in jobs):
            rows.chains = [job.chain for job in jobs]
    for index, job in enumerate(jobs):
        if job.spread_s:
            _spread(rows, index, random.random() * job.spread_s)
    return rows


def _alike_to_columns(jobs: JobsAlike) -> JobColumns:
    """As `_to_columns`, at a fraction of its cost: the options are checked once."""
    job, count = jobs.job, len(jobs)
    if (
        job.spread_s
        or _has_options(job)
        or _faults(job, datetime.now(UTC) + timedelta(seconds=AT_AWAY_S_MAX))
    ):
        return _to_columns(jobs)
    try:
        payloads = [_encoder.encode(payload) for payload in jobs.payloads]
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _to_columns(jobs)
    if max(map(len, payloads), default=0) > PAYLOAD_BYTES_MAX or b"null" in b"".join(payloads):
        return _to_columns(jobs)
    return JobColumns(
        queues=[job.queue] * count,
        priorities=[job.priority] * count,
        run_ats=[job.at] * count,
        delays_s=[job.after_s] * count,
        lanes=[job.lane] * count,
        keys=[job.unique] * count,
        payloads=payloads,
        versions=[job.version] * count,
        size_bytes=sum(map(len, payloads)),
    )


def _has_options(job: NewJob) -> bool:
    own = (job.retries, job.timeout_s, job.expires_s, job.unique_for_s, job.chain)
    return any(value is not None for value in own)


def _own_options(job: NewJob) -> OwnOptions:
    expires_s = None
    if job.expires_s is not None:
        now_s = time.time()
        due_s = now_s if job.at is None else max(job.at.timestamp(), now_s)
        expires_s = round(due_s + (job.after_s or 0) + (job.spread_s or 0) + job.expires_s, 3)
    return OwnOptions(job.retries, job.timeout_s, expires_s, job.chain)


def _spread(rows: JobColumns, index: int, late_s: float) -> None:
    """Delay a job by `late_s` after it would be due."""
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
            f"/{index}/payload: {len(encoded)} bytes, at most {PAYLOAD_BYTES_MAX} are allowed: put"
            " the bytes into the object store and their key into the payload"
        )
    # The encoder writes NaN and Infinity as null.
    if NUL in encoded or (b"null" in encoded and payload is not None):
        _require_storable(index, payload)
    return encoded


def _require_storable(index: int, payload: Any) -> None:
    """Raises: InvalidJob, with the path of each NUL, NaN and Infinity."""
    tree = msgspec.to_builtins(payload, enc_hook=_plain_or_decoded)
    refuse(list(find_unstorable(tree, f"/{index}/payload")))


def _plain_or_decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else _plain(value)


def _faults(job: NewJob, latest: datetime) -> list[tuple[str, str]]:
    """The faults of one job as (field, text)."""
    found = []
    if not is_whole(job.priority, 0, PRIORITY_LAST):
        found.append(("priority", mismatch(f"a whole number 0 to {PRIORITY_LAST}", job.priority)))
    if not is_whole(job.version, 1, VERSION_LAST):
        found.append(("version", mismatch(f"a whole number 1 to {VERSION_LAST}", job.version)))
    if job.at is not None and (fault := _fault_of_moment(job, latest)):
        found.append(("at", fault))
    if job.spread_s is not None:
        found += _spread_faults(job, job.spread_s, latest)
    if job.after_s is not None and not is_number(job.after_s, 0, AT_AWAY_S_MAX):
        found.append(("after_s", mismatch(SECONDS, job.after_s)))
    for name, value in (("unique", job.unique), ("lane", job.lane), ("chain", job.chain)):
        if value is not None and not is_name(value):
            found.append((name, mismatch(NAME, value)))
    return found + _option_faults(job) if _has_options(job) else found


def _option_faults(job: NewJob) -> list[tuple[str, str]]:
    """The faults of what differs from the job's task."""
    found = []
    if job.retries is not None and not is_whole(job.retries, 0, RETRIES_MAX):
        found.append(("retries", mismatch(f"a whole number 0 to {RETRIES_MAX}", job.retries)))
    for name, value, most in (
        ("timeout_s", job.timeout_s, TIMEOUT_S_MAX),
        ("expires_s", job.expires_s, AT_AWAY_S_MAX),
        ("unique_for_s", job.unique_for_s, AT_AWAY_S_MAX),
    ):
        if value is not None and not is_number(value, 0.001, most):
            found.append((name, mismatch(f"seconds over 0, up to {most:.0f}", value)))
    if job.unique_for_s is not None and job.unique is None:
        found.append(("unique_for_s", "expected together with `unique`"))
    return found


def _fault_of_moment(job: NewJob, latest: datetime) -> str:
    """The fault of a job's `at`; empty if it has none."""
    if not isinstance(job.at, datetime) or not _has_utc(job.at):
        return mismatch("a moment with its time zone, from year 1 on in UTC", job.at)
    if job.after_s is not None:
        return "expected `at` or `after_s`, not both"
    return mismatch("a moment within a year", job.at) if job.at > latest else ""


def _spread_faults(job: NewJob, spread_s: float, latest: datetime) -> list[tuple[str, str]]:
    """The faults of `spread_s`. The last moment of the spread must be within a year."""
    if not is_number(spread_s, 0, AT_AWAY_S_MAX):
        return [("spread_s", mismatch(SECONDS, spread_s))]
    first = datetime.now(UTC)
    if isinstance(job.at, datetime) and _has_utc(job.at) and job.at <= latest:
        first = max(first, job.at)
    elif is_number(job.after_s, 0, AT_AWAY_S_MAX):
        first += timedelta(seconds=job.after_s or 0.0)
    if first + timedelta(seconds=spread_s) > latest + timedelta(seconds=1):
        return [("spread_s", mismatch("to end within a year", spread_s))]
    return []


def _has_utc(moment: datetime) -> bool:
    """Whether `moment` can be converted to UTC."""
    try:
        return moment.utcoffset() is not None and moment.astimezone(UTC) is not None
    except (OverflowError, ValueError):
        return False


def is_storable(text: str) -> bool:
    """Whether PostgreSQL can store `text`: no NUL, no lone surrogates."""
    try:
        return "\0" not in text.encode().decode()
    except UnicodeEncodeError:
        return False


def is_name(value: Any) -> bool:
    """Whether `value` is a valid name of a lane, limiter or key."""
    return isinstance(value, str) and 1 <= len(value) <= NAME_CHARACTERS_MAX and value.isprintable()


def is_row_id(value: Any) -> bool:
    """Whether `value` is a possible row id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= JOB_ID_LAST


def require_job_id(job_id: int) -> None:
    """Refuse an impossible id. Raises: JobUnknown."""
    if not is_row_id(job_id):
        raise JobUnknown(job_id)


def require_page(name: str, rows_max: int) -> None:
    """Refuse a page size out of range. Raises: InvalidFilter."""
    if not is_whole(rows_max, 1, PAGE_ROWS_MAX):
        text = mismatch(f"a whole number 1 to {PAGE_ROWS_MAX}", rows_max)
        InvalidFilter.require_none([FieldProblem(f"/{name}", "invalid", text)], "a page")


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
        wrong_name = lane if is_name(limiter) else limiter
        found.append(("lane", mismatch(f"names of {NAME}", wrong_name)))
    if (starts_max is None) != (window_s is None):
        found.append(("starts_max", "expected together with window_s, or both left out"))
    if starts_max is not None and not is_whole(starts_max, 1, LIMIT_MAX):
        found.append(("starts_max", mismatch(f"1 to {LIMIT_MAX}", starts_max)))
    if window_s is not None and not is_number(window_s, 0.001, WINDOW_S_MAX):
        found.append(("window_s", mismatch(f"seconds over 0, up to {WINDOW_S_MAX:.0f}", window_s)))
    if concurrency is not None and not is_whole(concurrency, 1, LIMIT_MAX):
        text = f"1 to {LIMIT_MAX} (to stop a lane set paused)"
        found.append(("concurrency", mismatch(text, concurrency)))
    if not is_whole(weight, 1, WEIGHT_MAX):
        found.append(("weight", mismatch(f"1 to {WEIGHT_MAX}", weight)))
    problems = [FieldProblem(f"/{name}", "invalid", text) for name, text in found]
    InvalidJob.require_none(problems, f"lane {str(lane)[:160]!r}")


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether `value` is a whole number from `least` to `most`."""
    return type(value) is int and least <= value <= most


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether `value` is a number from `least` to `most`; NaN is none."""
    is_any = isinstance(value, int | float) and not isinstance(value, bool)
    # No `isfinite`: it fails for integers that no float can hold.
    return is_any and least <= value <= most


COUNTS: Final = b'"group":{"id":1,"done":0,"failed":0,"cancelled":0,"quarantined":0}}'
"""End of a group callback's payload, as added when it is enqueued."""


def _require_decodable(rows: JobColumns, registry: Registry, *, has_group: bool = False) -> None:
    """Refuse payloads that the tasks of `registry` cannot decode.

    `has_group`: check them as group callbacks. Jobs without a task here, or of another version, are
    skipped. Raises: InvalidJob.
    """
    tasks = {queue: registry.get(queue) for queue in set(rows.queues)}
    if not has_group and len(tasks) == 1 and _are_decodable(rows, *tasks.values()):
        return
    problems: list[FieldProblem] = []
    for index, payload in enumerate(rows.payloads):
        task = tasks[rows.queues[index]]
        if task is None or rows.versions[index] != task.version:
            continue
        whole = _with_counts(payload) if has_group else payload
        for fault in task.payloads.faults(whole, f"/{index}/payload"):
            text = fault.text
            if has_group and fault.code == "unknown" and fault.pointer.endswith("/payload/group"):
                text = "the callback gets the field `group`: add the parameter to its handler"
            text = f"queue {task.queue!r}: {text}"
            problems.append(FieldProblem(fault.pointer, fault.code, text))
        if len(problems) >= PROBLEMS_MAX:
            break
    refuse(problems, "on_done: " if has_group else "")


def _are_decodable(rows: JobColumns, task: Task | None) -> bool:
    """Whether the task can decode all payloads; False where only a closer look can decide."""
    if task is None:
        return True
    if rows.versions.count(task.version) < len(rows):
        return False
    try:
        task.payloads.decode_all(rows.payloads)
    except Exception:  # noqa: BLE001 - also of a type's own code
        return False
    return True


def _with_counts(payload: bytes) -> bytes:
    return payload[:-1] + (b"," if len(payload) > len(b"{}") else b"") + COUNTS
