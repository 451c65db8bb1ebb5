"""Waiting for what a job's handler returned.

Its ending is looked for again and again, at first after 20 ms, at last every 0.5 s: a look costs the database two
reads by primary key and holds no connection. Whether the job still is anywhere costs more and is asked at the
first look and every 5 s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.errors import JobFailed, NoResultKept, ResultGone, ResultLate
from headrace.jobs.model import Job, JobState
from headrace.jobs.store.results import Ending

FIRST_WAIT_S: Final = 0.02
WAIT_S_MAX: Final = 0.5
WHEREABOUTS_EVERY_S: Final = 5.0
FindJob = Callable[[int], Awaitable[Job]]


async def wait_result(
    postgres: Postgres,
    find_job: FindJob,
    job_id: int,
    *,
    timeout_s: float | None,
    keeps_result: bool,
) -> Any:
    """The result of a job, once there is one; `keeps_result`: whether its task keeps any.

    Raises: JobFailed, ResultGone, NoResultKept, ResultLate, JobUnknown.
    """
    if not keeps_result:
        raise NoResultKept(job_id)
    began_s = asked_s = time.monotonic()
    wait_s = FIRST_WAIT_S
    while True:
        ending = await store.results.find_ending(postgres, job_id)
        now_s = time.monotonic()
        if ending is None and (asked_s == began_s or now_s - asked_s > WHEREABOUTS_EVERY_S):
            ending, asked_s = await _ending_if_over(postgres, find_job, job_id), now_s
        if ending is not None:
            return _result_of(job_id, ending)
        if timeout_s is not None:
            wait_s = min(wait_s, began_s + timeout_s - now_s)
            if wait_s <= 0:
                raise ResultLate(job_id, timeout_s)
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 1.5, WAIT_S_MAX)


async def _ending_if_over(postgres: Postgres, find_job: FindJob, job_id: int) -> Ending | None:
    """None for a job that is not over. Raises: ResultGone, JobUnknown."""
    job = await find_job(job_id)
    if job.state not in (JobState.DONE, JobState.GONE):
        return None
    # It may have ended between the two looks.
    ending = await store.results.find_ending(postgres, job_id)
    if ending is None:
        raise ResultGone(job_id)
    return ending


def _result_of(job_id: int, ending: Ending) -> Any:
    if ending.state != JobState.DONE:
        raise JobFailed(job_id, ending.state, ending.error)
    return None if ending.result is None else msgspec.json.decode(ending.result)
