"""Jobs in PostgreSQL: enqueue, groups, lookup, lists, bulk actions and kept results.

`Notifier` sends agents at most one NOTIFY per queue and GAP_S. NOTIFY takes a lock that all commits
share. Unused notifications are saved, up to BURST, so that jobs enqueued now and then are not
delayed. After suppressed notifications a trailing one follows. A lost notification does no harm:
agents also poll.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres, Row, Runner, from_row
from headrace.jobs.columns import JobColumns
from headrace.jobs.headers import options_of
from headrace.jobs.messages import Progress
from headrace.jobs.model import (
    Job,
    JobFailure,
    JobProgress,
    JobState,
)
from headrace.jobs.outcomes import bounded_text
from headrace.jobs.sql import SQL
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger

PARKED_YEAR: Final = 9999
"""`run_at` of a job that waits for the one before it in its chain."""


async def enqueue(
    runner: Runner,
    rows: JobColumns,
    queue_ids: list[int],
    *,
    group_ids: list[int] | None,
    headers: list[str],
    is_hinted: bool,
) -> list[int]:
    """Insert `rows` in one round trip; return their ids in order.

    `headers` has one element for all jobs, or one per job.
    """
    if group_ids is None and len(headers) == 1 and _are_alike(rows, queue_ids):
        return await _enqueue_alike(runner, rows, queue_ids[0], headers[0], is_hinted=is_hinted)
    ids = await runner.value(
        SQL.enqueue,
        queues=queue_ids,
        groups=group_ids,
        **_columns(rows),
        headers=headers,
        is_hinted=is_hinted,
        key_times_s=rows.key_times_s,
        chains=rows.chains,
    )
    return list(ids)


def _are_alike(rows: JobColumns, queue_ids: list[int]) -> bool:
    """Whether the jobs differ only in payload and have no lane, key, chain or group."""
    if rows.chains is not None:
        return False
    if len(rows) == 1:
        return rows.lanes[0] is None and rows.keys[0] is None
    n = len(rows)
    if rows.lanes.count(None) < n or rows.keys.count(None) < n:
        return False
    columns: tuple[list[Any], ...] = (queue_ids, rows.priorities, rows.run_ats, rows.delays_s)
    return all(column.count(column[0]) == n for column in (*columns, rows.versions))


async def _enqueue_alike(
    runner: Runner, rows: JobColumns, queue_id: int, headers: str, *, is_hinted: bool
) -> list[int]:
    """Insert jobs without the general function: a quarter to half of its cost per job."""
    alike = {
        "queue": queue_id,
        "priority": rows.priorities[0],
        # Arrays, since every driver passes them the same way.
        "run_ats": _none_if_empty(rows.run_ats[:1]),
        "delays_s": _none_if_empty(rows.delays_s[:1]),
        "version": rows.versions[0],
        "headers": headers,
        "is_hinted": is_hinted,
    }
    if len(rows) == 1:
        return [await runner.value(SQL.enqueue_one, payload=rows.payloads[0], **alike)]
    return list(await runner.value(SQL.enqueue_alike, payloads=rows.payloads, **alike))


def _columns(rows: JobColumns) -> dict[str, list[Any] | None]:
    """The columns that all jobs and callbacks have, as arguments."""
    return {
        "priorities": rows.priorities,
        "run_ats": _none_if_empty(rows.run_ats),
        "delays_s": _none_if_empty(rows.delays_s),
        "lanes": _none_if_empty(rows.lanes),
        "keys": _none_if_empty(rows.keys),
        "payloads": rows.payloads,
        "versions": None if rows.versions.count(1) == len(rows) else rows.versions,
    }


def _none_if_empty(column: list[Any]) -> list[Any] | None:
    """The column, or None if it has no value: the driver visits every element."""
    return None if column.count(None) == len(column) else column


async def add_groups(
    tx: Runner,
    pending: list[int],
    callbacks: JobColumns,
    *,
    queue_ids: list[int],
    headers: list[str],
) -> list[int]:
    """Insert groups with `pending` members each. Return their ids in order."""
    ids = await tx.value(
        SQL.add_groups,
        pending=pending,
        queues=queue_ids,
        **_columns(callbacks),
        headers=headers,
    )
    return list(ids)


async def add_members(
    runner: Runner,
    rows: JobColumns,
    queue_ids: list[int],
    group_ids: list[int],
    *,
    headers: list[str],
    is_hinted: bool,
) -> list[int] | None:
    """Insert `rows` as members of their groups. Return ids; None if a group does not exist.

    For a taken unique key the id is that of a job which is no member.
    """
    ids = await runner.value(
        SQL.add_members,
        groups=group_ids,
        queues=queue_ids,
        **_columns(rows),
        headers=headers,
        is_hinted=is_hinted,
        key_times_s=rows.key_times_s,
        chains=rows.chains,
    )
    return None if ids is None else list(ids)


async def find_job(runner: Runner, job_id: int) -> Job | None:
    """The job from any table, if it exists."""
    row = await runner.one(SQL.find_job, job=job_id)
    if row is None:
        return None
    own = options_of(row["headers"])
    return listed_job(
        row,
        payload=msgspec.json.decode(row["payload"]),
        result=None if row["result"] is None else msgspec.json.decode(row["result"]),
        progress=None if row["ratio"] is None else from_row(JobProgress, row),
        retries=own.retries,
        timeout_s=own.timeout_s,
        expires_at=None if own.expires_s is None else datetime.fromtimestamp(own.expires_s, UTC),
        chain=own.chain,
        failure=None
        if own.failed is None
        else JobFailure(at=datetime.fromtimestamp(own.failed[0], UTC), error=own.failed[1]),
    )


def listed_job(row: Row, **further: Any) -> Job:
    """A job from a row of `list_jobs`."""
    return from_row(
        Job,
        row,
        state=JobState(row["state"]),
        queue=row["queue_name"],
        run_at=None if row["run_at"].year == PARKED_YEAR else row["run_at"],
        unique=row["unique_key"],
        **further,
    )


PROGRESS_CHARACTERS_MAX: Final = 500


async def write_progress(runner: Runner, reports: Sequence[tuple[int, Progress]]) -> None:
    """Store progress reports with their leases. Reports of settled jobs are ignored."""
    await runner.run(
        SQL.write_progress,
        leases=[lease_id for lease_id, _ in reports],
        ids=[one.job_id for _, one in reports],
        ratios=[one.ratio for _, one in reports],
        texts=[bounded_text(one.text, PROGRESS_CHARACTERS_MAX) for _, one in reports],
    )


async def retry_jobs(
    runner: Runner, ids: Sequence[int], states: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Make jobs that ended in `states` ready. Return which, and which have a taken key."""
    row: Any = await runner.one(SQL.retry_jobs, ids=list(ids), states=list(states))
    return list(row["retried"] or ()), list(row["taken"] or ())


GAP_S: Final = 0.01
BURST: Final = 5
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class NotifyRate:
    """A token bucket per queue: BURST at once, one per GAP_S in the long run. No I/O."""

    def __init__(self) -> None:
        self._whole_s: dict[int, float] = {}
        """When the whole BURST is available again, by queue id."""

    def wait_s(self, queue_id: int, now_s: float) -> float:
        """Seconds until a notification is allowed; 0 or less: now."""
        return self._whole_s.get(queue_id, now_s) - (BURST - 1) * GAP_S - now_s

    def take(self, queue_id: int, now_s: float) -> None:
        """Count a notification that is sent."""
        whole_s = max(self._whole_s.get(queue_id, now_s), now_s) + GAP_S
        # A statement for several queues also notifies those that are over their limit.
        self._whole_s[queue_id] = min(whole_s, now_s + BURST * GAP_S)


class Notifier:
    """The notifications of this process."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._rate = NotifyRate()
        self._trailing: dict[int, asyncio.Task[None]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def is_due(self, queue_ids: set[int]) -> bool:
        """Whether this statement should notify; else call `notify_later` after its commit."""
        now_s = time.monotonic()
        if all(self._rate.wait_s(queue_id, now_s) > 0 for queue_id in queue_ids):
            return False
        for queue_id in queue_ids:
            self._rate.take(queue_id, now_s)
        return True

    def notify_later(self, queue_ids: set[int]) -> None:
        """Send a trailing notification. Call after the commit: an earlier one would find no job."""
        for queue_id in queue_ids:
            # A done one was cancelled with its loop, or another thread's loop is removing it.
            trailing = self._trailing.get(queue_id)
            if trailing is None or trailing.done():
                trailing = asyncio.create_task(self._notify_later(queue_id))
                self._trailing[queue_id] = trailing
                # It leaves `_trailing` before it is sent, so that later jobs get their own.
                self._under_way.add(trailing)
                trailing.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Wait until the pending notifications of this loop are sent."""
        here = asyncio.get_running_loop()
        await asyncio.gather(*[t for t in list(self._under_way) if t.get_loop() is here])

    async def _notify_later(self, queue_id: int) -> None:
        try:
            await asyncio.sleep(self._rate.wait_s(queue_id, time.monotonic()))
            self._trailing.pop(queue_id, None)
            self._rate.take(queue_id, time.monotonic())
            await self._postgres.run(SQL.notify_queue, queue=str(queue_id))
        except HeadraceError as error:
            _often.info("notification_lost", queue_id=queue_id, error=error.text)
