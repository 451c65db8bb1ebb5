"""A slot's runner in a test's own process: give it work, see what it says, let nothing be said twice."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
from tests.kit.waiting import wait_true

from headrace.jobs.model import JobsConfig
from headrace.jobs.slots.messages import Left, Ready, Settled, Spend, SpendAnswer, Work
from headrace.jobs.slots.runner import SlotRunner


class Slot:
    """A runner and what it said."""

    def __init__(self, registry, board=None):
        self.said = []
        self.runner = SlotRunner(
            registry, say=self._hear, config=JobsConfig(retry_first_s=1.0), board=board
        )
        self.outcomes = {}
        self.calls = 0
        self._leases = {}
        self.on_spend = lambda spend: SpendAnswer(spend.call, 0.0)

    def give(self, payloads, *, queue="q", **columns):
        """Give jobs 1, 2, ... under a new lease; its id."""
        lease_id = len(self._leases) + 1
        first = sum(len(work.ids) for work in self._leases.values()) + 1
        work = work_of(queue, payloads, lease_id=lease_id, first=first, **columns)
        self._leases[lease_id] = work
        self.runner.give(work)
        return list(work.ids)

    async def wait_settled(self, jobs):
        """Until every one of `jobs` has its outcome."""
        await wait_true(lambda: self.outcomes.keys() >= set(jobs), what="all jobs are settled")
        return [self.outcomes[job][0] for job in jobs]

    def _hear(self, message):
        self.said.append(message)
        if isinstance(message, Spend):
            if (answer := self.on_spend(message)) is not None:
                self.runner.answer(answer)
        elif isinstance(message, Settled):
            self._note(message)

    def _note(self, settled):
        self.calls += settled.calls
        if settled.ids is None:
            rows = dict.fromkeys(self._leases[settled.lease_id].ids, ("done", None, "", None, None))
        else:
            jobs = len(settled.ids)
            rows = dict(
                zip(
                    settled.ids,
                    zip(
                        settled.words,
                        settled.delays_s,
                        settled.errors,
                        settled.results or [None] * jobs,
                        settled.queues or [None] * jobs,
                        strict=True,
                    ),
                    strict=True,
                )
            )
        assert not self.outcomes.keys() & rows.keys(), "a job was settled twice"
        self.outcomes |= rows


def work_of(queue, payloads, *, lease_id=1, first=1, **columns):
    jobs = len(payloads)
    values = {
        "attempts": [0] * jobs,
        "losses": [0] * jobs,
        "lanes": [None] * jobs,
        "traceparents": [None] * jobs,
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
async def running_slot(registry, board=None):
    """A started slot, which has stopped with nothing open when the block ends."""
    slot = Slot(registry, board)
    await slot.runner.start()
    yield slot
    if not any(isinstance(message, Left) for message in slot.said):
        await slot.runner.stop(5.0)
    assert slot.runner.jobs_open == 0
    assert isinstance(slot.said[0], Ready)
    assert isinstance(slot.said[-1], Left)
