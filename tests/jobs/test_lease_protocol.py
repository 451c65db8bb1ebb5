"""Random enqueues, claims, acks, deaths, takes and manual changes, compared with a model.

After each step every stored job, key, group and count of in-flight leases equals the model's, and
the counts of lanes agree with each other.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from lease_model import ENDED, WAITING, LeaseOracle
from lease_steps import RunningHost, broken_books, claim_lane_jobs, told

from headrace.jobs import JobState, LeaseLost, NewGroup, NewJob
from headrace.jobs.errors import JobNotEnded, JobNotWaiting, KeyTaken
from headrace.jobs.model import JobFilter, TakenOutcome
from headrace.jobs.outcomes import DONE, RETURNED, UNSTARTED, Outcome
from headrace.jobs.store.claim_cursor import ClaimCursor

STEPS = {
    "enqueue": 6,
    "enqueue_group": 2,
    "claim": 6,
    "claim_of_lanes": 3,
    "ack": 8,
    "ack_on_a_claim": 2,
    "ack_late": 1,
    "lose_the_answer_of_a_claim": 1,
    "expire_a_host": 1,
    "take": 2,
    "ack_a_take": 3,
    "expire_takes": 1,
    "change_one": 3,
    "change_many": 2,
    "make_due": 3,
    "pause_or_resume": 1,
    "drain_or_undrain": 1,
}
OUTCOMES = (
    DONE,
    DONE,
    Outcome("retry", 100.0, "busy"),
    Outcome("snooze", 100.0),
    Outcome("fail", None, "broken", "a traceback"),
    Outcome("cancel", None, "unwanted"),
    RETURNED,
    UNSTARTED,
    Outcome("lost"),
    Outcome("lost"),
    Outcome("quarantined"),
    Outcome("moved", queue="kept"),
    Outcome("moved", queue="nowhere"),
)
TAKEN_OUTCOMES = {
    "done": DONE,
    "retry": Outcome("retry", 100.0, "later"),
    "fail": Outcome("fail", None, "no"),
    "snooze": Outcome("snooze", 100.0),
    "cancel": Outcome("cancel"),
    "send_to": Outcome("moved", queue="kept"),
    "return": RETURNED,
}
STORED = """
    SELECT p.id, q.name, p.state, p.priority, p.attempt, p.losses, p.lane, p.unique_key, p.group_id,
           p.error
    FROM (
        SELECT id, queue, CASE WHEN run_at > now() THEN 'scheduled' ELSE 'ready' END AS state,
               priority, attempt, losses, lane, unique_key, group_id, last_error AS error
        FROM headrace.job_ready
        UNION ALL SELECT id, queue, 'ready', priority, attempt, losses, lane, unique_key, group_id,
               last_error FROM headrace.lane_job
        UNION ALL SELECT u.id, l.queue, 'leased', u.priority, u.attempt, u.losses, u.lane,
               u.unique_key, u.group_id, NULL
        FROM headrace.job_lease l CROSS JOIN LATERAL unnest(l.ids, l.priorities, l.attempts,
            l.losses, l.lanes, l.unique_keys, l.group_ids)
            AS u(id, priority, attempt, losses, lane, unique_key, group_id)
        WHERE u.id <> ALL(l.settled)
        UNION ALL SELECT id, queue, state, priority, attempt, losses, lane, unique_key, group_id,
               error FROM headrace.job_failed
        UNION ALL SELECT id, queue, 'done', priority, attempt, losses, lane, unique_key, group_id,
               NULL FROM headrace.job_done
    ) p JOIN headrace.queue q ON q.id = p.queue WHERE q.name <> 'callbacks' ORDER BY p.id"""


class LeaseDriver:
    """Takes random steps on the service and on the model."""

    def __init__(self, postgres, jobs, sql, *, queue_ids, seed):
        self.postgres, self.jobs, self.sql, self.queue_ids = postgres, jobs, sql, queue_ids
        self.dice = random.Random(seed)
        self.oracle = LeaseOracle(keeping=["kept"])
        self.hosts = []
        self.former = []
        """Hosts that expired, with leases that were returned."""
        self.paused, self.draining = set(), set()

    async def start(self):
        """Register two hosts."""
        self.hosts = [await self.new_host() for _ in range(2)]

    async def new_host(self):
        return await RunningHost.add(self.postgres, self.jobs.config, self.queue_ids.values())

    @property
    def queue(self):
        return self.dice.choice(("q", "q", "kept"))

    async def run(self, steps):
        """Take `steps` random steps, and compare after each."""
        for step in self.dice.choices(list(STEPS), list(STEPS.values()), k=steps):
            self.oracle.clock += 1
            await getattr(self, step)()
            await self.compare(step)

    async def compare(self, step):
        """Fail if PostgreSQL differs from the model."""
        stored = [tuple(row) for row in await self.sql(STORED)]
        assert stored == self.oracle.rows(), step
        keys = await self.sql(
            "SELECT q.name, u.key, u.job_id FROM headrace.job_unique u"
            " JOIN headrace.queue q ON q.id = u.queue"
        )
        assert {(row["name"], row["key"]): row["job_id"] for row in keys} == self.oracle.keys, step
        groups = await self.sql("SELECT id, pending FROM headrace.job_group")
        pending = {group: counts["pending"] for group, counts in self.oracle.groups.items()}
        assert {row["id"]: row["pending"] for row in groups} == pending, step
        assert await broken_books(self.postgres) == [], step
        for host in self.hosts:
            held = sum(lease.holder is host for lease in self.oracle.leases.values())
            assert (host.manager.leases_held, host.manager.unsettled) == (held, 0), step

    async def enqueue(self):
        given = [
            NewJob(
                queue=self.queue,
                priority=self.dice.choice((0, 5, 5, 5, 9)),
                unique=self.dice.choice((None, None, "a", "b", "c")),
                lane=self.dice.choice((None, None, None, "x", "y")),
                after_s=self.dice.choice((None, None, None, 3600)),
            )
            for _ in range(self.dice.randint(1, 4))
        ]
        ids = await self.jobs.enqueue_many(given)
        for job_id, job in zip(ids, given, strict=True):
            state = "ready" if job.after_s is None else "scheduled"
            columns = {"priority": job.priority, "lane": job.lane, "state": state}
            assert job_id == self.oracle.add(job_id, job.queue, key=job.unique, **columns)

    async def enqueue_group(self):
        members = [
            NewJob(queue=self.queue, lane=self.dice.choice((None, "x")))
            for _ in range(self.dice.randint(1, 3))
        ]
        new = NewGroup(members=members, on_done=NewJob(queue="callbacks", payload={"of": 1}))
        [group] = await self.jobs.enqueue_groups([new])
        rows = await self.sql(
            f"SELECT id FROM headrace.job_ready WHERE group_id = {group}"
            f" UNION ALL SELECT id FROM headrace.lane_job WHERE group_id = {group} ORDER BY id"
        )
        for row, job in zip(rows, members, strict=True):
            self.oracle.add(row["id"], job.queue, lane=job.lane, group=group)
        self.oracle.groups[group] = Counter(pending=len(members))

    async def claim(self):
        await self.claimed_by(self.dice.choice(self.hosts), self.queue)

    async def claimed_by(self, host, queue):
        size = {"leases_max": self.dice.randint(1, 3), "batch": self.dice.randint(1, 3)}
        claims = await host.manager.claim_ready(self.queue_ids[queue], ClaimCursor(), **size)
        is_open = queue not in self.paused and host not in self.draining
        expected = self.oracle.claimed(queue, **size) if is_open else []
        assert [list(lease.ids) for lease in claims.leases] == expected
        assert claims.retries == (1 if is_open else 0)
        for lease in claims.leases:
            self.note(host, queue, lease)

    def note(self, holder, queue, lease):
        """Note a lease whose jobs have the attempts and losses of the model."""
        jobs = [self.oracle.jobs[job_id] for job_id in lease.ids]
        assert list(lease.attempts) == [job.attempt for job in jobs]
        assert list(lease.losses) == [job.losses for job in jobs]
        assert list(lease.lanes) == [job.lane for job in jobs]
        is_plain = queue != "kept" and all(job.key is job.group is None for job in jobs)
        assert lease.is_plain is is_plain
        self.oracle.lease(lease.lease_id, queue, holder, lease.ids)
        if holder in self.hosts:
            holder.claims[lease.lease_id] = lease

    async def claim_of_lanes(self):
        host, queue = self.dice.choice(self.hosts), self.queue
        lease = await claim_lane_jobs(host.manager, self.queue_ids[queue], 4)
        waiting = [job for job in self.oracle.of("ready", queue=queue) if job.lane]
        is_open = queue not in self.paused and host not in self.draining
        assert (lease is not None) == (is_open and bool(waiting))
        if lease is not None:
            self.note(host, queue, lease)

    def outcomes_for(self, lease, queue):
        """Outcomes of some jobs; True: all of them are done."""
        if self.dice.random() < 0.3:
            return DONE
        allowed = [o for o in OUTCOMES if queue == "q" or o.kind != "moved"]
        some = self.dice.sample(list(lease.ids), self.dice.randint(1, len(lease.ids)))
        return {job_id: self.dice.choice(allowed) for job_id in some}

    async def ack(self):
        """Settle one or two leases in one statement, sometimes twice."""
        host = self.dice.choice(self.hosts)
        chosen = self.dice.sample(sorted(host.claims), min(len(host.claims), 2))
        for _ in range(self.dice.choice((1, 1, 2))):
            self.oracle.clock += 1
            settled = {}
            for lease_id in [i for i in chosen if i in self.oracle.leases]:
                model, claim = self.oracle.leases[lease_id], host.claims[lease_id]
                given = self.outcomes_for(claim, model.queue)
                host.manager.settle(told(claim, given))
                settled[lease_id] = dict.fromkeys(model.open, DONE) if given is DONE else given
            await host.manager.flush()
            self.oracle.settle(settled)
        assert host.lost == []

    async def ack_on_a_claim(self):
        """The ack of jobs without lanes rides on the next claim, which may grant nothing."""
        host = self.dice.choice(self.hosts)
        held = [self.oracle.leases[i] for i in host.claims if i in self.oracle.leases]
        for lease in [lease for lease in held if len(lease.open) == len(lease.ids)]:
            if self.oracle.jobs[lease.ids[0]].lane is None:
                host.manager.settle(told(host.claims[lease.id]))
                self.oracle.settle({lease.id: dict.fromkeys(lease.ids, DONE)})
                break
        await self.claimed_by(host, self.queue)

    async def ack_late(self):
        """A host that lost its leases records nothing."""
        for host in self.former[-2:]:
            late = list(host.claims.values())
            for claim in late:
                host.manager.settle(told(claim, self.outcomes_for(claim, "q")))
            await host.manager.flush()
            assert set(host.lost) >= {c.lease_id for c in late if c.lease_id in host.open_when_lost}
            host.claims.clear()

    async def lose_the_answer_of_a_claim(self):
        """A lease that its host does not know is returned at the second heartbeat."""
        host = self.dice.choice(self.hosts)
        held = [i for i, lease in self.oracle.leases.items() if lease.holder is host]
        if held:
            host.manager.forget(lost := self.dice.choice(held))
            await host.manager.return_unknown()
            await self.compare_states_of(self.oracle.leases[lost].open, JobState.LEASED)
            await host.manager.return_unknown()
            self.oracle.give_back([lost], "returned")

    async def compare_states_of(self, ids, state):
        for job_id in ids:
            assert (await self.jobs.job(job_id)).state is state

    async def expire_a_host(self):
        place = self.dice.randrange(2)
        host = self.hosts[place]
        await self.sql(
            f"UPDATE headrace.host SET expires_at = now() WHERE id = {host.manager.host_id}"
        )
        self.draining.discard(host)
        held = [i for i, lease in self.oracle.leases.items() if lease.holder is host]
        host.open_when_lost = set(held)
        empty = await host.manager.claim_ready(
            self.queue_ids["q"], ClaimCursor(), leases_max=1, batch=1
        )
        assert empty.leases == []
        swept = await self.jobs.sweep()
        expected = (len(held), self.oracle.give_back(held, "lost"), 1)
        assert (swept.leases_returned, swept.jobs_returned, swept.hosts_dropped) == expected
        self.former.append(host)
        self.hosts[place] = await self.new_host()

    async def take(self):
        queue, count = self.queue, self.dice.randint(1, 3)
        taken = await self.jobs.takes.take(queue, count, lease_s=3600)
        ids = [job.id for job in taken.jobs]
        found = [self.oracle.jobs[job_id] for job_id in ids]
        can_take = queue not in self.paused and self.oracle.of("ready", queue=queue)
        assert bool(ids) == bool(can_take)
        if ids and found[0].lane is None:
            is_turned = self.jobs.takes._scan._claims % 8 == 0
            size = {"leases_max": 1, "batch": count, "is_turned": is_turned}
            assert [ids] == self.oracle.claimed(queue, **size)
        if ids:
            assert [job.attempt for job in taken.jobs] == [job.attempt + 1 for job in found]
            self.oracle.lease(taken.lease_id, queue, "taker", ids)

    def taken(self):
        return [lease for lease in self.oracle.leases.values() if lease.holder == "taker"]

    async def ack_a_take(self):
        for lease in self.taken()[:2]:
            self.oracle.clock += 1
            queue, later = lease.queue, {}
            kinds = [kind for kind in TAKEN_OUTCOMES if queue == "q" or kind != "send_to"]
            left = sorted(lease.open)
            for job_id in self.dice.sample(left, self.dice.randint(1, len(left))):
                kind = self.dice.choice(kinds)
                outcome = TAKEN_OUTCOMES[kind]
                later[job_id] = kind, outcome
                if kind == "retry" and self.oracle.jobs[job_id].attempt >= 1:
                    later[job_id] = kind, Outcome("fail", None, "later")
            given = {
                job_id: TakenOutcome(
                    outcome=kind,
                    after_s=100.0 if kind in {"retry", "snooze"} else None,
                    why=TAKEN_OUTCOMES[kind].error,
                    queue=TAKEN_OUTCOMES[kind].queue,
                )
                for job_id, (kind, _) in later.items()
            }
            await self.jobs.takes.ack(lease.id, given)
            self.oracle.settle({lease.id: {job_id: o for job_id, (_, o) in later.items()}})

    async def expire_takes(self):
        """The jobs of takers return without a loss, and a late taker is refused."""
        taken = self.taken()
        await self.sql("UPDATE headrace.host SET expires_at = now() WHERE kind = 'taker'")
        swept = await self.jobs.sweep()
        ids = [lease.id for lease in taken]
        assert swept.jobs_returned == self.oracle.give_back(ids, "returned")
        for lease_id in ids:
            with pytest.raises(LeaseLost):
                await self.jobs.takes.ack(lease_id, {}, rest=TakenOutcome())
            with pytest.raises(LeaseLost):
                await self.jobs.takes.extend(lease_id)

    async def change_one(self):
        """Cancel, delete or retry one job, and expect its refusal in every other state."""
        if not self.oracle.jobs:
            return
        job = self.dice.choice(list(self.oracle.jobs.values()))
        verb = self.dice.choice((self.jobs.cancel, self.jobs.delete, self.jobs.retry))
        refusal = self.refusal_of(verb, job)
        if refusal is not None:
            with pytest.raises(refusal):
                await verb(job.id)
            return
        await verb(job.id)
        if verb == self.jobs.retry:
            assert self.oracle.retry([job.id]) == [job.id]
            await self.jobs.sweep()
        elif job.state in WAITING:
            self.oracle.end_waiting(job, "cancelled" if verb == self.jobs.cancel else "gone")
        else:
            job.state = "gone"

    def refusal_of(self, verb, job):
        """The error of a verb that the job's state refuses."""
        if verb == self.jobs.retry:
            if job.state not in ENDED:
                return JobNotEnded
            return KeyTaken if (job.queue, job.key) in self.oracle.keys else None
        allowed = WAITING if verb == self.jobs.cancel else (*WAITING, *ENDED, "done")
        return None if job.state in allowed else JobNotWaiting

    async def change_many(self):
        action = self.dice.choice(("cancel", "delete", "retry"))
        states = {"cancel": WAITING, "retry": ENDED, "delete": (*WAITING, *ENDED, "done")}[action]
        ids = self.dice.sample(sorted(self.oracle.jobs), min(len(self.oracle.jobs), 4))
        fits = [job for job in map(self.oracle.jobs.get, ids) if job.state in states]
        counted = await self.jobs.bulk(action, JobFilter(ids=ids), dry_run=True)
        assert (counted.matched, counted.changed) == (len(fits), 0)
        done = await self.jobs.bulk(action, JobFilter(ids=ids))
        if action == "retry":
            changed = len(self.oracle.retry(job.id for job in fits))
            await self.jobs.sweep()
        else:
            changed = len(fits)
            for job in fits:
                if job.state in WAITING:
                    self.oracle.end_waiting(job, "cancelled" if action == "cancel" else "gone")
                job.state = "cancelled" if action == "cancel" else "gone"
        assert (done.matched, done.changed, done.skipped) == (
            len(fits),
            changed,
            len(fits) - changed,
        )

    async def make_due(self):
        """All scheduled jobs become due; a sweep moves those of lanes into their lane."""
        scheduled = self.oracle.of("scheduled")
        await self.sql("UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now()")
        swept = await self.jobs.sweep()
        assert swept.lane_jobs_moved == sum(job.lane is not None for job in scheduled)
        for job in scheduled:
            job.state, job.due = "ready", self.oracle.clock

    async def pause_or_resume(self):
        queue = self.queue
        is_paused = queue in self.paused
        await (self.jobs.queues.resume if is_paused else self.jobs.queues.pause)(queue)
        self.paused ^= {queue}

    async def drain_or_undrain(self):
        host = self.dice.choice(self.hosts)
        self.draining ^= {host}
        await self.sql(
            f"UPDATE headrace.host SET is_draining = {host in self.draining}"
            f" WHERE id = {host.manager.host_id}"
        )

    async def finish(self):
        """Compare single jobs, callbacks and counts of the whole run."""
        for job in self.oracle.jobs.values():
            found = await self.jobs.job(job.id)
            assert found.state == job.state
            if job.state in ENDED:
                assert found.traceback == ("a traceback" if job.error == "broken" else "")
        rows = await self.sql(
            "SELECT convert_from(payload, 'UTF8') AS payload FROM headrace.job_ready r"
            " JOIN headrace.queue q ON q.id = r.queue WHERE q.name = 'callbacks'"
        )
        states = ("done", "failed", "cancelled", "quarantined")
        expected = [
            {"group": {"id": group, **{state: counts[state] for state in states}}, "of": 1}
            for group, counts in self.oracle.callbacks.items()
        ]
        found = [json.loads(row["payload"]) for row in rows]
        assert sorted(found, key=str) == sorted(expected, key=str)
        await self.jobs.sweep()
        for queue in ("q", "kept"):
            minutes = await self.jobs.queues.minutes(queue)
            for name in ("claimed", "done", "failed", "cancelled", "retried", "lost"):
                counted = sum(getattr(minute, name) for minute in minutes)
                assert counted == self.oracle.counts[queue][name], (queue, name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_every_step_leaves_what_the_model_has(postgres, jobs, sql, declare, seed):
    options = {"retries": 1, "limiter": "l", "lane": "optional"}
    ids = await declare(q=options, kept={**options, "keep_done": "1h"}, callbacks={})
    driver = LeaseDriver(postgres, jobs, sql, queue_ids=ids, seed=seed)
    await driver.start()
    await driver.run(250)
    await driver.finish()
