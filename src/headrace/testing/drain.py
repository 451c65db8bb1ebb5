"""Running an app's due jobs in the test's own process: claimed, called and settled as an agent and its slot do.

    await send_mail.enqueue(to="ann", text="hi")
    assert await drain(app) == {"done": 1}

Queues are worked one after the other and a lease at a time, so that a test's runs are alike. A job that is to
run again later, or whose lane allows no start now, is left for later. From sync code:
`app.sync(drain)(app)`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from headrace.jobs import Jobs, QueueUnknown, store
from headrace.jobs.claim_cursor import ClaimCursor
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack, FromSlot, Progress, Spend, SpendAnswer
from headrace.jobs.slots.runner import SlotRunner
from headrace.jobs.store.leases import Claims
from headrace.jobs.tasks import Task
from headrace.testing.enqueued import SQL, App

LEASE_S: Final = 3_600.0
"""Nothing renews the host of a drain, and a test may stand in a debugger."""
PUT_BACK: Final = ("returned", "unstarted")


async def drain(
    app: App, queue: str | None = None, *, jobs_max: int = 10_000, until_empty: bool = True
) -> dict[str, int]:
    """Run the due jobs of `queue`, or of every task of the app; return how many runs came to what.

    `until_empty` also runs the jobs that these bring about; else no more are run than were due at the start.
    A run that is tried again later counts as `retry`, the last of a job's as `fail`.
    Raises: QueueUnknown where the app has no task of that name.
    """
    tasks = [task for task in app.jobs.registry if queue in (None, task.queue)]
    if queue is not None and not tasks:
        raise QueueUnknown(queue)
    rows = await app.jobs.declare_queues()
    queues = [(task, rows[task.queue].id) for task in tasks]
    ids = [queue_id for _, queue_id in queues]
    postgres = app.engines.postgres
    if not until_empty:
        jobs_max = min(jobs_max, await postgres.value(SQL.count_due, queues=ids))
    host_id = await store.hosts.add_host(postgres, "drain", ids, LEASE_S)
    desk = LeaseManager(postgres, app.jobs.config, host_id)
    slot = _Slot(app.jobs, desk, dict(zip([t.queue for t in tasks], ids, strict=True)), jobs_max)
    await slot.runner.start()
    try:
        while await slot.work_each(queues):
            continue
    finally:
        await slot.runner.stop(0.0)
        await desk.flush()
        await desk.leave()
    return dict(slot.outcomes)


class _Slot:
    """A slot and its agent in one, at work on one lease at a time."""

    def __init__(
        self, jobs: Jobs, desk: LeaseManager, queue_ids: dict[str, int], jobs_left: int
    ) -> None:
        self.runner = SlotRunner(jobs.registry, send=self._hear, config=jobs.config)
        self.outcomes: Counter[str] = Counter()
        self._desk = desk
        self._queue_ids = queue_ids
        self._jobs_left = jobs_left
        self._open: set[int] = set()
        self._is_said = asyncio.Event()
        self._answers: set[asyncio.Task[None]] = set()

    async def work_each(self, queues: Sequence[tuple[Task, int]]) -> bool:
        """One round over the queues; whether any job ran, so that there may be more."""
        runs = self.outcomes.total()
        for task, queue_id in queues:
            while self._jobs_left > 0 and await self._work_once(task, queue_id):
                continue
        return self._jobs_left > 0 and self.outcomes.total() > runs

    async def _work_once(self, task: Task, queue_id: int) -> bool:
        """Claim one lease and see it settled; whether there was anything."""
        batch = min(task.batch or task.concurrency, self._jobs_left)
        claims = await self._desk.claim_ready(queue_id, ClaimCursor(), leases_max=1, batch=batch)
        start_before_s = None
        if not claims.leases:
            sent_s = time.monotonic()
            moved = claims.moved
            claims = await self._desk.claim_lanes(queue_id, leases_max=1, batch=batch)
            if not claims.leases:
                return moved > 0
            start_before_s = None if claims.slack_s is None else sent_s + claims.slack_s
        await self._run(task, claims, start_before_s)
        return True

    async def _run(self, task: Task, claims: Claims, start_before_s: float | None) -> None:
        for claim in claims.leases:
            self._open.update(claim.ids)
            self._jobs_left -= len(claim.ids)
            self._is_said.clear()
            self.runner.give(claim.as_work(task.queue, claims.retries, start_before_s))
            await self._is_said.wait()
            await self._desk.flush()

    def _hear(self, message: FromSlot) -> None:
        match message:
            case Ack():
                self._settle(message)
            case Spend():
                answer = asyncio.create_task(self._answer(message))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)
            case Progress():
                self._desk.note_progress(message)

    def _settle(self, settled: Ack) -> None:
        self._desk.settle(settled)
        words = ["done"] * len(self._open) if settled.ids is None else settled.kinds
        self.outcomes.update(word for word in words if word not in PUT_BACK)
        self._jobs_left += sum(word in PUT_BACK for word in words)
        self._open.difference_update(list(self._open) if settled.ids is None else settled.ids)
        if not self._open:
            self._is_said.set()

    async def _answer(self, ask: Spend) -> None:
        """A handler asks for further starts in a lane; without an answer it would wait for it."""
        wait_s = None
        try:
            queue_id = self._queue_ids[ask.queue]
            wait_s = await self._desk.spend(queue_id, ask.lane, ask.starts, ask.wait_max_s)
        finally:
            self.runner.answer(SpendAnswer(ask.call, wait_s))
