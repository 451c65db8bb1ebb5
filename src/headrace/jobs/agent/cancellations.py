"""Cancels running jobs of this host: first by their slot, after a grace time with their slot.

An operator's mark is a row of `job_cancel`. The slot cancels the task of an async handler and sets
`JobContext.is_cancelled` for a sync one. A job that still runs after `jobs.grace` is ended by a
kill of its slot. Other jobs of that slot return to their queues without a counted loss. The marked
job is ended by the settlement that puts it back, whatever its outcome is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.messages import CancelJob
from headrace.kernel.logs import logger

_log: Final = logger(__name__)


class Cancellations:
    """The marked jobs of one host, and since when their slots know it; `kill` ends a slot."""

    def __init__(
        self, postgres: Postgres, kill: Callable[[WorkerProxy, str], None], grace_s: float
    ) -> None:
        self._postgres = postgres
        self._kill = kill
        self._grace_s = grace_s
        self._sent_s: dict[tuple[int, int], float] = {}
        """By job and lease."""

    async def run_once(self, host_id: int, dispatcher: Dispatcher) -> None:
        """Cancel newly marked jobs, and kill slots whose marked jobs exceed the grace time."""
        marked = await store.workflows.marked_jobs(self._postgres, host_id)
        now_s = time.monotonic()
        self._sent_s = {run: at for run, at in self._sent_s.items() if run in marked.items()}
        for job_id, lease_id in marked.items():
            run = job_id, lease_id
            worker = _worker_of(dispatcher, job_id, lease_id)
            if worker is None:
                continue
            if run not in self._sent_s:
                self._sent_s[run] = now_s
                worker.channel.send(CancelJob(job_id))
            elif now_s - self._sent_s[run] > self._grace_s:
                _log.warning("job_killed", job_id=job_id, grace_s=self._grace_s)
                self._kill(worker, f"job {job_id} was cancelled and did not end")


def _worker_of(dispatcher: Dispatcher, job_id: int, lease_id: int) -> WorkerProxy | None:
    """The slot that runs the job."""
    for worker in dispatcher.workers:
        lease = worker.leases.get(lease_id)
        if lease is not None and lease.is_open(job_id):
            return worker
    return None
