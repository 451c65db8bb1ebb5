"""Lists of jobs, and actions on many jobs at once.

A list is a bounded search: each statement reads a bounded number of rows in the order of an index,
and a page that took `SEARCH_S` is returned short, with the id to continue from. A bulk action
applies such a search in transactions of `JOBS_PER_STEP`, so it never holds many locks and is safe
to interrupt and rerun.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from headrace.engines.postgres import Postgres, Row, Runner
from headrace.engines.sql import Query
from headrace.jobs import store
from headrace.jobs.errors import (
    InvalidFilter,
    JobNotWaiting,
)
from headrace.jobs.model import (
    JOB_ID_LAST,
    JOBS_PER_CALL_MAX,
    STATES_BY_ENDING,
    BulkDone,
    Job,
    JobFilter,
    JobPage,
    JobState,
)
from headrace.jobs.sql import SQL
from headrace.jobs.validation import is_name, is_storable, require_page
from headrace.kernel.errors import FieldProblem, mismatch

WINDOW_ROWS: Final = 20_000
SEARCH_S: Final = 1.0
JOBS_PER_STEP: Final = 1_000
JOBS_PER_COUNT: Final = 10_000
BULK_S: Final = 5.0
AHEAD_MAX: Final = 10_000
"""Jobs before another one are counted up to this."""
TEXT_CHARACTERS_MAX: Final = 200
LISTED: Final = tuple(state.value for state in JobState if state is not JobState.GONE)
CHANGEABLE: Final = {
    "retry": STATES_BY_ENDING,
    "cancel": ("scheduled", "ready"),
    "delete": tuple(state for state in LISTED if state != JobState.LEASED),
}
"""The actions of `bulk`, and the states that each can change."""


class BulkActions:
    """Searches and bulk actions behind `Jobs.find` and `Jobs.bulk`."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def find(self, job_filter: JobFilter, *, cursor: int | None, jobs_max: int) -> JobPage:
        """A page of matching jobs. Raises: InvalidFilter, QueueUnknown."""
        require_page("jobs_max", jobs_max)
        criteria = await self._criteria(job_filter, LISTED)
        rows, left = await self._search(
            self._postgres.reads, SQL.list_jobs, criteria, cursor, rows_max=jobs_max
        )
        return JobPage(jobs=[store.jobs.listed_job(row) for row in rows], next_cursor=left)

    async def apply(
        self, action: str, job_filter: JobFilter, *, dry_run: bool, cursor: int | None
    ) -> BulkDone:
        """Apply one bounded step of an action. Raises: InvalidFilter, QueueUnknown."""
        _require_action(action, job_filter)
        criteria = await self._criteria(
            job_filter, CHANGEABLE[action], f"which {action} can change"
        )
        ends_s = time.monotonic() + BULK_S
        matched = changed = 0
        step = JOBS_PER_COUNT if dry_run else JOBS_PER_STEP
        left = cursor
        while True:
            rows, left = await self._search(
                self._postgres, SQL.list_ids, criteria, left, rows_max=step
            )
            matched += len(rows)
            if rows and not dry_run:
                changed += await self._change(
                    action, [row["id"] for row in rows], criteria["states"]
                )
            if left is None or time.monotonic() >= ends_s:
                break
        return BulkDone(
            action=action,
            dry_run=dry_run,
            matched=matched,
            changed=changed,
            skipped=0 if dry_run else matched - changed,
            more=left is not None,
            next_cursor=left,
        )

    async def _change(self, action: str, ids: list[int], states: Sequence[str]) -> int:
        """Change jobs that are still in `states`. Return how many."""
        if action == "retry":
            retried, _ = await store.jobs.retry_jobs(self._postgres, ids, states)
            return len(retried)
        if action == "cancel":
            return len(await self._postgres.value(SQL.end_waiting, ids=ids))
        return len(await self._postgres.value(SQL.delete_jobs, ids=ids, states=states))

    async def _search(
        self,
        runner: Runner,
        query: Query,
        criteria: dict[str, Any],
        before: int | None,
        *,
        rows_max: int,
    ) -> tuple[list[Row], int | None]:
        """Up to `rows_max` rows, newest first, and the id to continue before; None: complete.

        A row without a state marks where the search of a table was cut off.
        """
        found: list[Row] = []
        left = JOB_ID_LAST if before is None else max(0, min(before, JOB_ID_LAST))
        ends_s = time.monotonic() + SEARCH_S
        while True:
            room = rows_max - len(found)
            rows = await runner.all(
                query, **criteria, before=left, jobs_max=room + 1, window=WINDOW_ROWS
            )
            cut = max((row["id"] for row in rows if row["state"] is None), default=0)
            hits = [row for row in rows if row["state"] is not None and row["id"] >= cut]
            hits.sort(key=lambda row: row["id"], reverse=True)
            found += hits[:room]
            if len(hits) > room:
                return found, found[-1]["id"]
            if not cut:
                return found, None
            left = cut
            if len(found) == rows_max or time.monotonic() >= ends_s:
                return found, left

    async def _criteria(
        self, job_filter: JobFilter, states: Sequence[str], whose: str = "of a job"
    ) -> dict[str, Any]:
        """The arguments of a list query: None matches any.

        Raises: InvalidFilter, with every fault; QueueUnknown.
        """
        _refuse(_faults(job_filter, states, whose))
        queue_id = None
        if job_filter.queue is not None:
            queue_id = (await store.queues.require_queue(self._postgres, job_filter.queue)).id
        if job_filter.state is not None:
            states = (job_filter.state,)
        elif job_filter.q is not None:
            states = [state for state in states if state in STATES_BY_ENDING]
        return {
            "queue": queue_id,
            "states": list(states),
            "lane": job_filter.lane,
            "q": job_filter.q,
            "older_than_s": job_filter.older_than_s,
            "from_at": job_filter.from_at,
            "to_at": job_filter.to_at,
            "ids": job_filter.ids,
        }


def not_waiting(job: Job, action: str) -> JobNotWaiting:
    """The error of an action on a job that does not wait, with advice for its state."""
    match job.state:
        case JobState.LEASED:
            advice = (
                f"{job.host} runs it: wait for its end, or request it with"
                f" `headrace jobs cancel {job.id} --running` (`running=True`, `?running=true`)"
            )
        case JobState.GONE:
            advice = "it ended and nothing is kept of it"
        case _:
            advice = "only a job that is scheduled or ready can be"
    return JobNotWaiting(f"job {job.id} is {job.state.value} and cannot be {action}: {advice}")


def _require_action(action: str, job_filter: JobFilter) -> None:
    """Refuse unknown actions and filters that match every job. Raises: InvalidFilter."""
    if action not in CHANGEABLE:
        _refuse([("action", f"expected one of {', '.join(CHANGEABLE)}, got {str(action)[:40]!r}")])
    if (job_filter.queue, job_filter.state, job_filter.lane, job_filter.ids) == (
        None,
        None,
        None,
        None,
    ):
        _refuse(
            [("filter", "expected a queue, a state, a lane or ids: this filter matches every job")]
        )


def _faults(job_filter: JobFilter, states: Sequence[str], whose: str) -> list[tuple[str, str]]:
    found = []
    if job_filter.state is not None and job_filter.state not in states:
        expected = f"expected a state {whose}: {', '.join(states)}"
        found.append(("state", f"{expected}; got {job_filter.state[:40]!r}"))
    if job_filter.q is not None:
        if not 1 <= len(job_filter.q) <= TEXT_CHARACTERS_MAX or not is_storable(job_filter.q):
            found.append(("q", f"expected 1 to {TEXT_CHARACTERS_MAX} characters of an error"))
        if not set(STATES_BY_ENDING) & set(
            states if job_filter.state is None else [job_filter.state]
        ):
            found.append(("q", f"only jobs with errors have them: {', '.join(STATES_BY_ENDING)}"))
    if job_filter.lane is not None and not is_name(job_filter.lane):
        found.append(("lane", mismatch("the name of a lane", job_filter.lane)))
    found += _time_faults(job_filter)
    if job_filter.ids is not None:
        if len(job_filter.ids) > JOBS_PER_CALL_MAX:
            text = f"at most {JOBS_PER_CALL_MAX} ids"
            found.append(("ids", mismatch(text, len(job_filter.ids))))
        if not all(type(one) is int and 0 < one <= JOB_ID_LAST for one in job_filter.ids):
            found.append(("ids", "expected ids that enqueue returned"))
    return found


def _time_faults(job_filter: JobFilter) -> Iterator[tuple[str, str]]:
    older_than_s = job_filter.older_than_s
    if older_than_s is not None and not (math.isfinite(older_than_s) and 0 <= older_than_s < 1e9):
        yield "older_than_s", mismatch("seconds of at least 0", older_than_s)
    for name, moment in (("from_at", job_filter.from_at), ("to_at", job_filter.to_at)):
        if moment is not None and moment.tzinfo is None:
            yield name, "expected a moment with a time zone"


def _refuse(found: Sequence[tuple[str, str]]) -> None:
    problems = [FieldProblem(f"/{name}", "invalid", text) for name, text in found]
    InvalidFilter.require_none(problems, "which jobs")
