"""Random starts, acks and limits of lanes, compared with a model; time passes by aging rows.

A claim must grant exactly what rate, concurrency and pause leave, and no window may exceed its
limit, whatever changed before. The moments of starts are the model's own.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict

import pytest
from lease_steps import RunningHost, broken_books, told

from headrace.jobs import NewJob
from headrace.jobs.errors import LaneUnknown
from headrace.jobs.outcomes import DONE, RETURNED, UNSTARTED, Outcome

LANES = ("x", "y", "z")
WINDOW_S = 60.0
MARGIN_S = 6.0
"""No step is judged this near to the end of a window."""
STEPS = {
    "enqueue": 6,
    "claim": 8,
    "spend": 4,
    "ack": 7,
    "pass_time": 4,
    "make_due": 1,
    "cancel": 1,
    "limit": 1,
    "limit_all": 1,
    "follow": 1,
    "pause_or_resume": 2,
}
OUTCOMES = (
    DONE,
    DONE,
    DONE,
    RETURNED,
    UNSTARTED,
    UNSTARTED,
    Outcome("lost"),
    Outcome("retry", 100.0),
    Outcome("moved", queue="q"),
    Outcome("moved", queue="next"),
    Outcome("moved", queue="far"),
)
RATES = ((None, None), (2, WINDOW_S), (3, 20.0), (5, WINDOW_S), (40, WINDOW_S))


class LaneModel:
    """A lane: limits, waiting jobs by queue, jobs in flight, and its starts."""

    def __init__(self):
        self.waiting = defaultdict(dict)
        """Priorities by queue and job."""
        self.inflight = 0
        self.log = []
        """Pairs of moment and count that the rate counts."""
        self.starts = []
        """Moments of all starts, except those that were returned."""
        self.starts_max = self.window_s = self.concurrency = None
        self.slack_s, self.weight = 0.25, 1
        self.is_paused = self.is_own = False
        self.changed_s = 0.0

    @property
    def span_s(self):
        return self.window_s + self.slack_s

    def live(self, at_s):
        # A microsecond more: `moment + span_s - span_s` may be rounded below `moment`.
        return sum(n for moment, n in self.log if moment > at_s - self.span_s + 1e-6)

    def is_near_edge(self, now_s):
        """Whether a start leaves the window at about this moment."""
        edges = (self.window_s, self.span_s) if self.window_s else ()
        return any(abs(now_s - edge - s) < MARGIN_S for edge in edges for s, _ in self.log)

    def gives(self, queue, now_s):
        """Jobs of a queue that a claim must grant."""
        allowed = [len(self.waiting[queue])]
        if self.concurrency is not None:
            allowed.append(self.concurrency - self.inflight)
        if self.starts_max is not None:
            allowed.append(self.starts_max - self.live(now_s))
        return 0 if self.is_paused else max(0, min(allowed))

    def spend(self, count, wait_max_s, now_s):
        """Consume tokens; the moment from which they are valid, or None."""
        if self.is_paused or (self.starts_max is not None and count > self.starts_max):
            return None
        if self.starts_max is None:
            return now_s
        last_s = max([now_s, *(moment for moment, _ in self.log)])
        moments = [last_s, *(max(last_s, moment + self.span_s) for moment, _ in self.log)]
        fits = [m for m in moments if self.live(m) + count <= self.starts_max]
        if not fits or min(fits) > now_s + wait_max_s:
            return None
        self.log.append((min(fits), count))
        return min(fits)

    def require_window(self, now_s):
        """No window that ends now or at a later start holds more starts than the limit."""
        for end_s in [now_s, *(s for s in self.starts if s > now_s)]:
            starts = sum(end_s - self.window_s < s <= end_s for s in self.starts)
            assert starts <= self.starts_max


class LaneDriver:
    """Takes random steps on the service and on the model."""

    def __init__(self, jobs, sql, *, host, queue_ids, seed):
        self.jobs, self.sql, self.host, self.queue_ids = jobs, sql, host, queue_ids
        self.dice = random.Random(seed)
        self.lanes = {name: LaneModel() for name in LANES}
        self.limiter = (None, None, 0.25, None)
        self.leases, self.losses = {}, Counter()
        self.later = {}
        self.ahead_s = 0.0

    @property
    def now_s(self):
        return time.monotonic() + self.ahead_s

    @property
    def queue(self):
        return self.dice.choice(("q", "next"))

    async def run(self, steps):
        """Take `steps` random steps, and compare after each."""
        for step in self.dice.choices(list(STEPS), list(STEPS.values()), k=steps):
            while any(lane.is_near_edge(self.now_s) for lane in self.lanes.values()):
                await self.pass_time(2 * MARGIN_S + 1)
            await getattr(self, step)()
            await self.compare(step)

    async def compare(self, step):
        """Fail if PostgreSQL differs from the model."""
        assert await broken_books(self.host.manager._postgres) == [], step
        for name, lane in self.lanes.items():
            try:
                found = await self.jobs.lanes.get("l", name)
            except LaneUnknown:
                assert not any(lane.waiting.values()), step
                continue
            waiting = sum(map(len, lane.waiting.values()))
            assert (found.waiting, found.inflight) == (waiting, lane.inflight), (step, name)
            limits = (lane.starts_max, lane.window_s, lane.concurrency, lane.weight)
            stored = (found.starts_max, found.window_s, found.concurrency, found.weight)
            assert (stored, found.paused) == (limits, lane.is_paused), (step, name)
            assert found.follows_limiter is not lane.is_own, (step, name)
            near = lane.is_near_edge(self.now_s)
            if lane.starts_max is not None and lane.starts_max <= 16 and not near:
                live = sum(n for s, n in lane.log if s > self.now_s - lane.span_s and n < 10**9)
                assert found.starts_live == live, (step, name)

    async def read_log(self, name):
        """Take over the stored log where only its effect is specified."""
        rows = await self.sql(
            "SELECT extract(epoch FROM clock_timestamp() - u.at)::float8 AS age_s, u.n"
            " FROM headrace.lane l, unnest(l.at, l.n) AS u(at, n)"
            f" WHERE l.limiter = 'l' AND l.name = '{name}'"
        )
        self.lanes[name].log = [(self.now_s - row["age_s"], row["n"]) for row in rows]

    async def enqueue(self):
        queue, name = self.queue, self.dice.choice(LANES)
        waiting = self.lanes[name].waiting[queue]
        count = self.dice.randint(1, 4) if len(waiting) < 12 else 0
        given = [
            NewJob(queue=queue, lane=name, priority=self.dice.choice((0, 5, 9)))
            for _ in range(count)
        ]
        ids = await self.jobs.enqueue_many(given)
        waiting.update({i: job.priority for i, job in zip(ids, given, strict=True)})

    async def claim(self):
        queue = self.queue
        expected = {name: lane.gives(queue, self.now_s) for name, lane in self.lanes.items()}
        manager = self.host.manager
        claims = await manager.claim_lanes(self.queue_ids[queue], leases_max=40, batch=5)
        now_s = self.now_s
        granted = {name: [] for name in LANES}
        for lease in claims.leases:
            pairs = list(zip(lease.ids, lease.lanes, strict=True))
            assert len(lease.ids) == 1 or not any(self.losses[job] for job in lease.ids)
            self.leases[lease.lease_id] = (lease, queue, now_s)
            for job_id, name in pairs:
                granted[name].append(job_id)
        assert {name: len(ids) for name, ids in granted.items()} == expected
        for name, ids in granted.items():
            await self.note_grant(name, queue, ids, now_s)
        slacks = [self.lanes[name].slack_s for name in LANES if granted[name]]
        assert claims.slack_s == (min(slacks) if slacks else None)

    async def note_grant(self, name, queue, ids, now_s):
        """Note granted jobs, which must be the most urgent of their lane."""
        lane = self.lanes[name]
        order = sorted(lane.waiting[queue], key=lambda job: (lane.waiting[queue][job], job))
        assert set(ids) == set(order[: len(ids)])
        for job_id in ids:
            self.later[job_id] = (name, lane.waiting[queue].pop(job_id))
        lane.inflight += len(ids)
        lane.starts += [now_s] * len(ids)
        if ids and lane.starts_max is not None:
            lane.require_window(now_s)
            lane.log.append((now_s, len(ids)))
            if lane.starts_max > 16:
                await self.read_log(name)
                assert len(lane.log) <= 17, "starts of a sixteenth of the window share an entry"

    async def spend(self):
        queue, name, count = self.queue, self.dice.choice(LANES), self.dice.randint(1, 3)
        lane, wait_max_s = self.lanes[name], self.dice.choice((0.0, 100.0, 3600.0))
        now_s = self.now_s
        expected = lane.spend(count, wait_max_s, now_s)
        if self.dice.random() < 0.5:
            wait_s = await self.host.manager.spend(self.queue_ids[queue], name, count, wait_max_s)
        else:
            wait_s = await self.jobs.lanes.spend("l", name, count, wait_max_s=wait_max_s)
        if (lane.starts_max or 0) > 16:
            await self.read_log(name)
        assert (wait_s is None) == (expected is None), (name, count, wait_max_s)
        if expected is not None:
            assert wait_s == pytest.approx(expected - now_s, abs=MARGIN_S)
            lane.starts += [now_s + wait_s] * count
            if lane.starts_max is not None:
                lane.require_window(now_s + wait_s)

    async def ack(self):
        """Settle all jobs of some leases."""
        chosen = self.dice.sample(sorted(self.leases), min(len(self.leases), 3))
        read = set()
        for lease_id in chosen:
            lease, queue, granted_s = self.leases.pop(lease_id)
            given = {job_id: self.dice.choice(OUTCOMES) for job_id in lease.ids}
            given = {
                job_id: DONE if self.losses[job_id] == 2 and o.kind == "lost" else o
                for job_id, o in given.items()
            }
            self.host.manager.settle(told(lease, given))
            for job_id, outcome in given.items():
                name, _ = self.later[job_id]
                if outcome is UNSTARTED and self.lanes[name].changed_s > granted_s:
                    read.add(name)
                self.settle(job_id, outcome, queue, granted_s)
        await self.host.manager.flush()
        for name in read | {n for n, lane in self.lanes.items() if (lane.starts_max or 0) > 16}:
            await self.read_log(name)
        assert self.host.lost == []

    def settle(self, job_id, outcome, queue, granted_s):
        """One job's outcome; `later` keeps jobs that a lane may get again."""
        name, priority = self.later.pop(job_id)
        lane = self.lanes[name]
        lane.inflight -= 1
        if outcome.kind in {"returned", "lost", "unstarted"}:
            lane.waiting[queue][job_id] = priority
            self.losses[job_id] += outcome.kind == "lost"
        elif outcome.kind == "moved" and outcome.queue != "far":
            lane.waiting[outcome.queue][job_id] = priority
            self.losses[job_id] = 0
        elif outcome.kind == "retry":
            self.later[job_id] = (name, priority, queue)
        if outcome is UNSTARTED and lane.window_s and granted_s > self.now_s - lane.window_s:
            lane.starts.remove(granted_s)
            moments = [moment for moment, _ in lane.log]
            if granted_s in moments:
                place = moments.index(granted_s)
                lane.log[place] = (granted_s, lane.log[place][1] - 1)

    async def pass_time(self, seconds=None):
        """Age every moment that the lanes have stored."""
        seconds = seconds or self.dice.choice((1.0, 25.0, 25.0, 70.0))
        past = f"interval '{seconds} s'"
        await self.sql(
            "UPDATE headrace.lane SET"
            f" started_at = started_at - {past}, free_at = free_at - {past},"
            f" at = ARRAY(SELECT u.at - {past} FROM unnest(at) WITH ORDINALITY AS u(at, i)"
            " ORDER BY u.i)"
        )
        await self.sql(f"UPDATE headrace.lane_queue SET ready_at = ready_at - {past}")
        await self.sql(f"UPDATE headrace.job_lease SET granted_at = granted_at - {past}")
        self.ahead_s += seconds

    async def make_due(self):
        """Retried jobs return to their lanes."""
        await self.sql("UPDATE headrace.job_ready SET run_at = now()")
        await self.jobs.sweep()
        for job_id, kept in [pair for pair in self.later.items() if len(pair[1]) == 3]:
            name, priority, queue = kept
            self.lanes[name].waiting[queue][job_id] = priority
            del self.later[job_id]

    async def cancel(self):
        lane, queue = self.lanes[self.dice.choice(LANES)], self.queue
        if lane.waiting[queue]:
            job_id = self.dice.choice(sorted(lane.waiting[queue]))
            await self.jobs.cancel(job_id)
            del lane.waiting[queue][job_id]

    async def changed(self, names):
        """The limits of lanes changed: their logs may hold more than before."""
        for name in names:
            self.lanes[name].changed_s = self.now_s
            await self.read_log(name)

    async def limit(self):
        """Set a lane's own limits."""
        name, (starts_max, window_s) = self.dice.choice(LANES), self.dice.choice(RATES)
        lane = self.lanes[name]
        limits = {"starts_max": starts_max, "window_s": window_s}
        concurrency = self.dice.choice((None, 1, 3))
        lane.weight, lane.is_paused, lane.is_own = self.dice.randint(1, 3), False, True
        await self.jobs.lanes.set("l", name, **limits, concurrency=concurrency, weight=lane.weight)
        lane.starts_max, lane.window_s, lane.concurrency = starts_max, window_s, concurrency
        lane.slack_s = self.own_slack_s(lane.window_s)
        await self.changed([name])

    def own_slack_s(self, window_s):
        """The slack of a lane with limits of its own grows with the window."""
        return max(self.limiter[2], min(1.0, (window_s or 60.0) / 60))

    async def limit_all(self):
        """Set the limiter's limits, which lanes without limits of their own follow."""
        starts_max, window_s = self.dice.choice(RATES)
        slack_s, concurrency = self.dice.choice((0.25, 2.0)), self.dice.choice((None, 2))
        self.limiter = (starts_max, window_s, slack_s, concurrency)
        await self.jobs.lanes.set_limiter(
            "l", starts_max=starts_max, window_s=window_s, slack_s=slack_s, concurrency=concurrency
        )
        following = [name for name, lane in self.lanes.items() if not lane.is_own]
        for name in following:
            self.copy_limits(self.lanes[name])
        await self.changed(following)

    def copy_limits(self, lane):
        lane.starts_max, lane.window_s, lane.slack_s, lane.concurrency = self.limiter

    async def follow(self):
        """Let a lane follow its limiter again."""
        name = self.dice.choice(LANES)
        if self.lanes[name].is_own:
            await self.jobs.lanes.reset("l", name)
            lane = self.lanes[name]
            lane.is_own, lane.weight, lane.is_paused = False, 1, False
            self.copy_limits(lane)
            await self.changed([name])

    async def pause_or_resume(self):
        name = self.dice.choice(LANES)
        lane = self.lanes[name]
        if lane.is_own:
            verb = self.jobs.lanes.resume if lane.is_paused else self.jobs.lanes.pause
            await verb("l", name)
            lane.is_paused = not lane.is_paused
            lane.slack_s = self.own_slack_s(lane.window_s)
            await self.changed([name])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_every_claim_grants_what_the_limits_leave(
    *, postgres, jobs, sql, queue_ids, config, seed
):
    host = await RunningHost.add(postgres, config, queue_ids.values())
    driver = LaneDriver(jobs, sql, host=host, queue_ids=queue_ids, seed=seed)
    await driver.run(250)
