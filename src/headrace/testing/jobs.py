"""`drain`, `assert_enqueued` and `refute_enqueued` for tests of applications."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from headrace.engines import Engines
from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Row
from headrace.engines.sql import load_queries
from headrace.jobs import Jobs, QueueUnknown, store
from headrace.jobs.agent.token_batcher import TokenBatcher
from headrace.jobs.leases import LeaseManager
from headrace.jobs.messages import Ack, FromSlot, Progress, Spend
from headrace.jobs.outcomes import DONE
from headrace.jobs.slots.runner import SlotRunner
from headrace.jobs.store.claim_cursor import ClaimCursor
from headrace.jobs.store.leases import Claims
from headrace.jobs.tasks import Task

SQL: Final = load_queries("headrace.testing")
RUN_AT_TOLERANCE_S: Final = 1.0
JOBS_SHOWN_MAX: Final = 20
PAYLOAD_CHARACTERS_SHOWN_MAX: Final = 200
_ANY: Final[Any] = object()


class App(Protocol):
    """The parts of a `Headrace` app that the helpers use."""

    @property
    def engines(self) -> Engines:
        """The opened engines."""

    @property
    def jobs(self) -> Jobs:
        """The jobs service."""


async def assert_enqueued(
    app: App,
    queue: str,
    *,
    payload: Any = _ANY,
    at: datetime | None = None,
    lane: str | None = None,
    unique: str | None = None,
    priority: int | None = None,
    count: int = 1,
    tx: Transaction | None = None,
) -> list[int]:
    """Check that exactly `count` waiting jobs of `queue` match; return their ids.

    An omitted argument matches any value. An object as `payload` matches jobs that have its fields;
    `at` matches within a second. With `tx` the check reads through the caller's transaction and
    sees uncommitted jobs, for frameworks that wrap each test in a transaction.

    Raises: AssertionError that lists the waiting jobs.
    """
    runner = app.engines.postgres if tx is None else runner_for(tx)
    wanted: dict[str, Any] = {} if payload is _ANY else {"payload": _as_stored(payload)}
    given = {"at": at, "lane": lane, "unique": unique, "priority": priority}
    wanted |= {name: value for name, value in given.items() if value is not None}
    waiting = await runner.all(SQL.waiting_jobs, queue=None)
    mine = [row for row in waiting if row["queue"] == queue]
    found = [row["id"] for row in mine if _matches(row, wanted)]
    if len(found) == count:
        return found
    described = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    others = Counter(row["queue"] for row in waiting if row["queue"] != queue)
    raise AssertionError(
        f"queue {queue!r}: expected {count} waiting {'job' if count == 1 else 'jobs'}"
        f"{f' with {described}' if described else ''}, found {len(found)}\n"
        + "\n".join(_listing(queue, mine, others))
    )


async def refute_enqueued(app: App, queue: str, **described: Any) -> None:
    """Check that no waiting job of `queue` matches the arguments of `assert_enqueued`.

    Raises: AssertionError that lists the waiting jobs.
    """
    await assert_enqueued(app, queue, **described, count=0)


def _as_stored(payload: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(payload))


def _matches(row: Row, wanted: dict[str, Any]) -> bool:
    payload = msgspec.json.decode(row["payload"])
    checks: dict[str, Callable[[Any], bool]] = {
        "payload": lambda value: _holds(payload, value),
        "at": lambda value: abs((row["run_at"] - value).total_seconds()) <= RUN_AT_TOLERANCE_S,
        "lane": lambda value: row["lane"] == value,
        "unique": lambda value: row["unique_key"] == value,
        "priority": lambda value: row["priority"] == value,
    }
    return all(checks[name](value) for name, value in wanted.items())


def _holds(payload: Any, wanted: Any) -> bool:
    if isinstance(payload, dict) and isinstance(wanted, dict):
        return all(name in payload and payload[name] == wanted[name] for name in wanted)
    return bool(payload == wanted)


def _listing(queue: str, mine: list[Row], others: Counter[str]) -> list[str]:
    """Lines that describe the waiting jobs."""
    lines = [f"waiting in {queue!r}:" if mine else f"nothing waits in {queue!r}"]
    for row in mine[:JOBS_SHOWN_MAX]:
        payload = row["payload"].decode()
        if len(payload) > PAYLOAD_CHARACTERS_SHOWN_MAX:
            payload = payload[:PAYLOAD_CHARACTERS_SHOWN_MAX] + " ..."
        named = {"lane": row["lane"], "unique": row["unique_key"]}
        rest = "".join(f", {name}={value!r}" for name, value in named.items() if value is not None)
        moment = row["run_at"].isoformat(timespec="seconds")
        lines.append(f"  {row['id']}: {payload}, at={moment}, priority={row['priority']}{rest}")
    if len(mine) > JOBS_SHOWN_MAX:
        lines.append(f"  and {len(mine) - JOBS_SHOWN_MAX} more")
    if others:
        lines.append("in other queues: " + ", ".join(f"{n} in {q!r}" for q, n in others.items()))
    return lines


LEASE_S: Final = 3_600.0
"""Nothing renews the lease of a drain, and a debugger may stop a test for long."""
RETURNED: Final = ("returned", "unstarted")


async def drain(
    app: App, queue: str | None = None, *, jobs_max: int = 10_000, until_empty: bool = True
) -> dict[str, int]:
    """Run the due jobs of `queue`, or of every task; return the number of runs per outcome.

    Jobs run in this process as in an agent and its slot: claimed, called and settled, one lease at
    a time, so that runs of a test are alike. `until_empty` also runs jobs that these enqueue;
    otherwise at most the jobs that were due at the start run. Jobs that are scheduled for later,
    retried later, or limited by their lane are not run. A run that is retried counts as `retry`,
    the last failed run of a job as `fail`.

    Raises: QueueUnknown if the app has no task with that queue.
    """
    tasks = [task for task in app.jobs.registry if queue in (None, task.queue)]
    if queue is not None and not tasks:
        raise QueueUnknown(queue)
    rows = await app.jobs.queues.declare()
    queues = [(task, rows[task.queue].id) for task in tasks]
    ids = [queue_id for _, queue_id in queues]
    postgres = app.engines.postgres
    if not until_empty:
        jobs_max = min(jobs_max, await postgres.value(SQL.count_due, queues=ids))
    host_id = await store.leases.add_host(postgres, "drain", ids, LEASE_S)
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
    """A slot and its agent in one, which work on one lease at a time."""

    def __init__(
        self, jobs: Jobs, desk: LeaseManager, queue_ids: dict[str, int], jobs_left: int
    ) -> None:
        self.runner = SlotRunner(jobs.registry, send=self._on_message, config=jobs.config)
        self.outcomes: Counter[str] = Counter()
        self._desk = desk
        self._tokens = TokenBatcher(desk.spend)
        self._queue_ids = queue_ids
        self._jobs_left = jobs_left
        self._open: set[int] = set()
        self._is_settled = asyncio.Event()
        self._answers: set[asyncio.Task[None]] = set()

    async def work_each(self, queues: Sequence[tuple[Task, int]]) -> bool:
        """Work on each queue once; return whether any job ran."""
        runs = self.outcomes.total()
        for task, queue_id in queues:
            while self._jobs_left > 0 and await self._work_once(task, queue_id):
                continue
        return self._jobs_left > 0 and self.outcomes.total() > runs

    async def _work_once(self, task: Task, queue_id: int) -> bool:
        """Claim one lease and run it until it is settled; return whether there was work."""
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
            self._is_settled.clear()
            self.runner.give(claim.as_work(task.queue, claims.retries, start_before_s))
            await self._is_settled.wait()
            await self._desk.flush()

    def _on_message(self, message: FromSlot) -> None:
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
        outcomes = settled.outcomes or dict.fromkeys(self._open, DONE)
        self.outcomes.update(one.kind for one in outcomes.values() if one.kind not in RETURNED)
        self._jobs_left += sum(one.kind in RETURNED for one in outcomes.values())
        self._open.difference_update(outcomes)
        if not self._open:
            self._is_settled.set()

    async def _answer(self, ask: Spend) -> None:
        """Answer a handler that requests rate-limit tokens of a lane and waits for them."""
        self.runner.receive(await self._tokens.take(self._queue_ids[ask.queue], ask))
