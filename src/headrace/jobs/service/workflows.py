"""Workflows: start, show, cancel, send events; and the records of running ones.

Every record locks the row of the job's lease in its own transaction, so a run that lost its lease
records nothing. The methods that take a JobContext belong to `StepStore`, for running workflows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.errors import QueueUnknown, WorkflowUnknown
from headrace.jobs.job_context import JobContext
from headrace.jobs.model import JobPage, JobsConfig, NewJob, QueueStatus
from headrace.jobs.service.bulk import not_waiting
from headrace.jobs.service.inserts import Inserts
from headrace.jobs.service.queues import Queues
from headrace.jobs.sql import SQL
from headrace.jobs.steps import (
    JobResult,
    RecordedStep,
    WorkflowRun,
    encode_event,
    require_event,
)
from headrace.jobs.store.workflows import StepRecord
from headrace.jobs.tasks import Registry
from headrace.jobs.tasks.options import WORKFLOW_PREFIX
from headrace.jobs.validation import prepare_jobs, require_job_id
from headrace.kernel.batching import Batcher

if TYPE_CHECKING:
    from headrace.jobs.service.jobs import Jobs


class Workflows:
    """The workflows of an app; `app.workflows`."""

    def __init__(
        self,
        postgres: Postgres,
        config: JobsConfig,
        *,
        registry: Registry,
        queues: Queues,
        inserts: Inserts,
        jobs: Jobs,
    ) -> None:
        self.backoff = config.backoff
        self._postgres = postgres
        self._registry = registry
        self._queues = queues
        self._inserts = inserts
        self._jobs = jobs
        self._records: WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher[StepRecord, str]] = (
            WeakKeyDictionary()
        )
        """By event loop, since connections belong to one."""

    async def start(
        self,
        name: str,
        payload: Any = None,
        *,
        version: int | None = None,
        tx: Transaction | None = None,
        **options: Any,
    ) -> int:
        """Start a workflow by name, inside `tx` if given; return its id.

        `version` defaults to the newest of this code. `options` are those of a job, such as
        `unique` and `after_s`. Raises: WorkflowUnknown, InvalidJob, PayloadTooLarge.
        """
        queue = WORKFLOW_PREFIX + name
        declared = self._registry.find(queue)
        if declared is None:
            await self._require_known(name)
        newest = 1 if declared is None else declared.version
        job = NewJob(
            queue=queue, payload=payload, version=newest if version is None else version, **options
        )
        return await self._jobs.enqueue(job, tx=tx)

    async def send_event(
        self, name: str, key: str | int, payload: Any = None, *, tx: Transaction | None = None
    ) -> bool:
        """Send an event to every workflow that waits for `name` and `key`, now or later.

        The first payload of a name and key stays; return whether it is this one. With `tx`, the
        event exists if and only if the transaction commits. Raises: InvalidStep.
        """
        name, key = require_event(name, key)
        runner = self._postgres if tx is None else runner_for(tx)
        return bool(
            await runner.value(SQL.send_event, name=name, key=key, payload=encode_event(payload))
        )

    async def get(self, workflow_id: int) -> WorkflowRun:
        """A workflow with its steps. Raises: WorkflowUnknown, JobUnknown."""
        require_job_id(workflow_id)
        job = await self._jobs.job(workflow_id)
        begun = await self._postgres.one(SQL.find_workflow, job=workflow_id)
        if begun is None and not (job.queue or "").startswith(WORKFLOW_PREFIX):
            raise WorkflowUnknown(workflow_id)
        steps = await store.workflows.steps(self._postgres, workflow_id)
        waits = [step.waits_for for step in steps if step.waits_for is not None]
        return WorkflowRun(
            id=workflow_id,
            workflow=(job.queue or WORKFLOW_PREFIX)[len(WORKFLOW_PREFIX) :],
            version=None if begun is None else begun["version"],
            state=job.state,
            begun_at=None if begun is None else begun["begun_at"],
            ended_at=job.ended_at,
            error=job.error,
            payload=job.payload,
            result=job.result,
            waits_for="; ".join(waits) if job.ended_at is None and waits else None,
            steps=steps,
        )

    async def names(self) -> list[QueueStatus]:
        """Every workflow as the status of its queue."""
        found = await self._queues.all()
        return [status for status in found if status.queue.startswith(WORKFLOW_PREFIX)]

    async def find(
        self,
        name: str,
        *,
        state: str | None = None,
        cursor: int | None = None,
        workflows_max: int = 100,
    ) -> JobPage:
        """A page of the runs of one workflow, newest first. Raises: WorkflowUnknown."""
        await self._require_known(name)
        queue = WORKFLOW_PREFIX + name
        return await self._jobs.find(
            queue=queue, state=state, cursor=cursor, jobs_max=workflows_max
        )

    async def cancel(self, workflow_id: int) -> list[int]:
        """Cancel a workflow and all jobs that it started. Return the ids of those that still run.

        Waiting ones end at once. A running workflow ends at its next step, a running job when its
        handler looks or is cancelled.
        Raises: WorkflowUnknown, JobUnknown, JobNotWaiting if it has ended.
        """
        await self.get(workflow_id)
        # Twice, since a job that moves between tables can be missed once.
        for _ in range(2):
            ended, marked = await store.workflows.cancel_tree(self._postgres, [workflow_id])
            if workflow_id in (*ended, *marked):
                return marked
        raise not_waiting(await self._jobs.job(workflow_id), "cancelled")

    async def _require_known(self, name: str) -> None:
        """Raises: WorkflowUnknown."""
        try:
            await self._queues.settings(WORKFLOW_PREFIX + name)
        except QueueUnknown as error:
            raise WorkflowUnknown(name) from error

    async def begin(self, job: JobContext[Any]) -> tuple[str, Mapping[int, RecordedStep]]:
        """Begin a run. Return the state of the lease, and the recorded steps by number."""
        return await store.workflows.begin(self._postgres, job.lease_id, job.id, job.version)

    async def record(
        self, job: JobContext[Any], step: RecordedStep, *, tx: Transaction | None
    ) -> str:
        """Record a step, in `tx` if given. Return the state of the lease.

        Steps that end while a statement runs share the next one and its commit.
        """
        one = StepRecord(job.lease_id, job.id, step)
        if tx is not None:
            return (await store.workflows.record(runner_for(tx), [one]))[0]
        loop = asyncio.get_running_loop()
        if loop not in self._records:
            self._records[loop] = Batcher(self._record_all, wait_s=0, runs_at_once=1)
        return await self._records[loop].submit(one)

    async def _record_all(self, records: list[StepRecord]) -> Sequence[str | Exception]:
        return await store.workflows.record(self._postgres, records)

    async def wait(
        self, job: JobContext[Any], step: RecordedStep, event: tuple[str, str] | None = None
    ) -> tuple[str, RecordedStep]:
        """Record a wait, unless it is; return the state of the lease and the step as it is now."""
        return await store.workflows.wait(self._postgres, job.lease_id, job.id, step, event=event)

    async def mark_uncaught(self, job: JobContext[Any], number: int) -> None:
        """Let a retry of the job repeat a failed step."""
        await self._postgres.run(SQL.mark_uncaught, lease=job.lease_id, job=job.id, number=number)

    async def start_jobs(
        self, job: JobContext[Any], step: RecordedStep, jobs: Sequence[NewJob]
    ) -> str:
        """Enqueue jobs and record it, in one transaction. Return the state of the lease."""
        rows = prepare_jobs(jobs, self._registry)
        queue_ids = await self._queues.ids(rows)
        async with self._postgres.transaction() as tx:
            state, _ = await store.workflows.wait(tx, job.lease_id, job.id, step)
            if state == "held":
                group_id = await tx.value(SQL.add_workflow_group, job=job.id, pending=len(jobs))
                ids = await self._inserts.insert_members(
                    rows, queue_ids, [group_id] * len(jobs), tx=tx, is_counted=False
                )
                await tx.run(SQL.join_step, job=job.id, number=step.number, group=group_id, ids=ids)
        return state

    async def jobs_ended(
        self, job: JobContext[Any], step: RecordedStep
    ) -> tuple[str, list[JobResult] | None]:
        """The state of the lease, and the results of a step's jobs; None before all have ended."""
        results = await store.workflows.step_jobs(self._postgres, job.id, step.number)
        if results is None or step.state != "waiting":
            return "held", results
        failed = [one for one in results if one.state != "done"]
        error = None
        if failed:
            first = failed[0]
            error = f"{len(failed)} of {len(results)} jobs did not end done, first {first.job_id}"
        state = await store.workflows.end_jobs_step(
            self._postgres, job.lease_id, job.id, step.number, error=error
        )
        return state, results
