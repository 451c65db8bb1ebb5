"""A slot's runner in the test's process, with a check that no job is settled twice."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
from tests.kit.waiting import wait_true

from headrace.jobs.messages import Ack, Left, Ready, Spend, SpendAnswer, Work
from headrace.jobs.model import JobsConfig
from headrace.jobs.outcomes import DONE
from headrace.jobs.slots.runner import SlotRunner


class Slot:
    """A runner and its messages."""

    def __init__(self, registry, status=None):
        self.said = []
        self.runner = SlotRunner(
            registry, send=self._receive, config=JobsConfig(retry_first_s=1.0), status=status
        )
        self.outcomes = {}
        self.calls = 0
        self._leases = {}
        self.on_spend = lambda spend: SpendAnswer(spend.call, 0.0)

    def give(self, payloads, *, queue="q", **columns):
        """Give jobs under a new lease. Return their ids."""
        lease_id = len(self._leases) + 1
        first = sum(len(work.ids) for work in self._leases.values()) + 1
        work = work_of(queue, payloads, lease_id=lease_id, first=first, **columns)
        self._leases[lease_id] = work
        self.runner.give(work)
        return list(work.ids)

    async def wait_settled(self, jobs):
        """Wait until all `jobs` have an outcome. Return the outcomes."""
        await wait_true(lambda: self.outcomes.keys() >= set(jobs), what="all jobs are settled")
        return [self.outcomes[job][0] for job in jobs]

    def _receive(self, message):
        self.said.append(message)
        if isinstance(message, Spend):
            if (answer := self.on_spend(message)) is not None:
                self.runner.receive(answer)
        elif isinstance(message, Ack):
            self._note(message)

    def _note(self, ack):
        self.calls += ack.calls
        outcomes = ack.outcomes or dict.fromkeys(self._leases[ack.lease_id].ids, DONE)
        rows = {
            job: (one.kind, one.after_s, one.error, one.result, one.queue)
            for job, one in outcomes.items()
        }
        assert not self.outcomes.keys() & rows.keys(), "a job was settled twice"
        self.outcomes |= rows


def work_of(queue, payloads, *, lease_id=1, first=1, **columns):
    jobs = len(payloads)
    values = {
        "attempts": [0] * jobs,
        "losses": [0] * jobs,
        "lanes": [None] * jobs,
        "headers": [None] * jobs,
        "versions": [1] * jobs,
        "retries": 5,
    }
    return Work(
        queue=queue,
        lease_id=lease_id,
        ids=list(range(first, first + jobs)),
        payloads=[msgspec.json.encode(payload) for payload in payloads],
        **(values | columns),
    )


@asynccontextmanager
async def running_slot(registry, status=None):
    """A started slot; at the end of the block it stops and must have no open job."""
    slot = Slot(registry, status)
    await slot.runner.start()
    yield slot
    if not any(isinstance(message, Left) for message in slot.said):
        await slot.runner.stop(5.0)
    assert slot.runner.jobs_open == 0
    assert isinstance(slot.said[0], Ready)
    assert isinstance(slot.said[-1], Left)
