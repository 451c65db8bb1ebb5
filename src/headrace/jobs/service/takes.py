"""Jobs for other languages and for people: taken under a lease, acked one by one or together.

Each take has a host row whose expiry is the lease, so jobs of a client that disappears return by
themselves. They count no loss: a closed browser is no crash. The limits of lanes apply at the take.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres, Tx
from headrace.jobs import store
from headrace.jobs.errors import InvalidTake, LeaseLost
from headrace.jobs.headers import traceparent_of
from headrace.jobs.messages import Outcome
from headrace.jobs.model import (
    AT_AWAY_S_MAX,
    NAME_CHARACTERS_MAX,
    JobsConfig,
    Taken,
    TakenJob,
    TakenOutcome,
)
from headrace.jobs.outcomes import final_outcome
from headrace.jobs.sql import SQL
from headrace.jobs.store.claim_cursor import ClaimCursor, LaneCursor
from headrace.jobs.store.leases import Claims, TakenJobs
from headrace.jobs.validation import is_number, is_row_id, is_whole
from headrace.kernel.errors import FieldProblem, mismatch
from headrace.kernel.routes import PAYLOAD_BYTES_MAX

JOBS_PER_TAKE_MAX: Final = 1_000
LEASE_S_LEAST: Final = 1.0
LEASE_S_MAX: Final = 86_400.0
WAIT_S_MAX: Final = 30.0
FIRST_PAUSE_S: Final = 0.05
PAUSE_S_MAX: Final = 0.5
"""Longest pause between two polls of a waiting take. A poll is one query of index probes."""
OUTCOMES: Final = {
    "done": "done",
    "retry": "retry",
    "fail": "fail",
    "snooze": "snooze",
    "cancel": "cancel",
    "send_to": "moved",
    "return": "returned",
}


class Takes:
    """Lease jobs to people and other programs, and record their outcomes; `Jobs.takes`."""

    def __init__(self, postgres: Postgres, config: JobsConfig) -> None:
        self._postgres = postgres
        self._config = config
        self._scan = ClaimCursor()
        self._is_lanes_turn = False

    async def take(
        self, queue: str, n: int = 1, *, lease_s: float = 300.0, wait_s: float = 0.0
    ) -> Taken:
        """Take up to `n` due jobs of a queue for `lease_s`; wait up to `wait_s` for the first.

        A job whose process died before is taken alone. Raises: QueueUnknown, InvalidTake.
        """
        if not 0 <= wait_s <= WAIT_S_MAX:
            text = mismatch(f"seconds from 0 to {WAIT_S_MAX:.0f}", wait_s)
            _refuse(f"queue {queue[:160]!r}", [("wait_s", text)])
        ends_s = time.monotonic() + wait_s
        pause_s = FIRST_PAUSE_S
        while True:
            taken = await self._take(queue, n, lease_s)
            left_s = ends_s - time.monotonic()
            if taken.jobs or left_s <= 0:
                return taken
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, PAUSE_S_MAX)

    async def _take(self, queue: str, n: int, lease_s: float) -> Taken:
        problems = []
        if not is_whole(n, 1, JOBS_PER_TAKE_MAX):
            problems.append(("n", mismatch(f"1 to {JOBS_PER_TAKE_MAX} jobs", n)))
        problems += _lease_faults(lease_s)
        _refuse(f"queue {queue[:160]!r}", problems)
        queue_id = (await store.queues.require_queue(self._postgres, queue)).id
        nothing = Taken(lease_id=None, jobs=[], expires_at=None)
        ahead = await store.leases.work_ahead(self._postgres, [queue_id])
        if not ahead.queue_ids:
            return nothing
        async with self._postgres.transaction() as tx:
            host_id = await store.leases.add_host(tx, "taker", [queue_id], lease_s, kind="taker")
            claims = await self._claim(tx, host_id, queue_id, n)
            if claims is None:
                await tx.run(SQL.remove_host, host=host_id)
                return nothing
            expires_at = await tx.value(SQL.host_expires_at, host=host_id)
        return _taken(claims, expires_at)

    async def ack(
        self,
        lease_id: int,
        outcomes: Mapping[int, TakenOutcome],
        *,
        rest: TakenOutcome | None = None,
    ) -> None:
        """Record outcomes of jobs of a taken lease. Jobs not named get `rest`, or stay leased.

        Repeating has no effect. Another outcome for a settled job is refused.
        Raises: LeaseLost if the lease has ended or is settled; InvalidTake, with every fault.
        """
        if not is_row_id(lease_id):
            raise LeaseLost(lease_id)
        async with self._postgres.transaction() as tx:
            taken = await store.leases.taken_jobs(tx, lease_id)
            if taken is None:
                raise LeaseLost(lease_id)
            left = taken.attempts.keys() - taken.settled
            hashes = {id_: _hash_of(id_, outcome) for id_, outcome in outcomes.items()}
            new = {id_: one for id_, one in outcomes.items() if hashes[id_] not in taken.acked}
            others = {} if rest is None else dict.fromkeys(left, rest)
            recorded = await self._outcomes_to_record(tx, lease_id, taken, {**others, **new})
            if new and left != recorded.keys():
                await tx.run(SQL.add_acked, lease=lease_id, acked=[hashes[id_] for id_ in new])
            settled = await store.leases.settle(
                tx, jobs={lease_id: recorded}, losses_max=self._config.losses_max
            )
            if settled.lost or settled.busy:
                raise LeaseLost(lease_id)
            await tx.run(SQL.end_take, host=taken.host_id)

    async def extend(self, lease_id: int, lease_s: float = 300.0) -> datetime:
        """Extend a taken lease to `lease_s` from now. Return its new end.

        Raises: LeaseLost, InvalidTake.
        """
        _refuse(f"lease {lease_id}", _lease_faults(lease_s))
        expires_at: datetime | None = None
        if is_row_id(lease_id):
            expires_at = await self._postgres.value(
                SQL.extend_take, lease=lease_id, lease_s=lease_s
            )
        if expires_at is None:
            raise LeaseLost(lease_id)
        return expires_at

    async def _claim(self, tx: Tx, host_id: int, queue_id: int, n: int) -> Claims | None:
        """Claim from lanes and from other jobs alternately."""
        self._is_lanes_turn = not self._is_lanes_turn
        if self._is_lanes_turn:
            claims = await self._claim_lanes(tx, host_id, queue_id, n)
            if claims.leases:
                return claims
        claims = await store.leases.claim_ready(
            tx,
            host_id,
            queue_id,
            leases_max=1,
            batch=n,
            priorities=self._scan.next_order(),
            marks=ClaimCursor().marks,
        )
        if not claims.leases and (claims.moved or not self._is_lanes_turn):
            claims = await self._claim_lanes(tx, host_id, queue_id, n)
        return claims if claims.leases else None

    async def _claim_lanes(self, tx: Tx, host_id: int, queue_id: int, n: int) -> Claims:
        return await store.leases.claim_lanes(
            tx,
            host_id,
            queue_id,
            leases_max=1,
            batch=n,
            config=self._config,
            cursor=LaneCursor(),
        )

    async def _outcomes_to_record(
        self, tx: Tx, lease_id: int, taken: TakenJobs, outcomes: Mapping[int, TakenOutcome]
    ) -> dict[int, Outcome]:
        """The outcomes to record. Raises: InvalidTake, QueueUnknown."""
        problems = []
        for job_id, outcome in outcomes.items():
            faults = _outcome_faults(outcome, taken.decisions)
            if job_id not in taken.attempts:
                faults = ["expected a job of this lease"]
            elif job_id in taken.settled:
                faults = ["is settled with another outcome, which stays"]
            problems += [(str(job_id), fault) for fault in faults]
        _refuse(f"lease {lease_id}", problems)
        outcomes = {id_: _decided(given, taken.decisions) for id_, given in outcomes.items()}
        queues = {o.queue for o in outcomes.values() if o.outcome == "send_to" and o.queue}
        for queue in queues:
            await store.queues.require_queue(tx, queue)
        recorded = {}
        for job_id, given in outcomes.items():
            final = final_outcome(
                Outcome(OUTCOMES[given.outcome], given.after_s, given.why),
                attempt=taken.attempts[job_id] + 1,
                retries=taken.own_retries.get(job_id, taken.retries),
                backoff=self._config.backoff,
            )
            result = None if given.result is None else msgspec.json.encode(given.result)
            recorded[job_id] = msgspec.structs.replace(final, result=result, queue=given.queue)
        return recorded


def _hash_of(job_id: int, outcome: TakenOutcome) -> int:
    """A hash of an acked outcome, as PostgreSQL's bigint."""
    text = msgspec.json.encode((job_id, outcome), order="deterministic")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big", signed=True)


def _taken(claims: Claims, expires_at: datetime) -> Taken:
    [claim] = claims.leases
    jobs = [
        TakenJob(
            id=job_id,
            payload=msgspec.json.decode(claim.payloads[index]),
            priority=claim.priorities[index],
            run_at=claim.run_ats[index],
            attempt=claim.attempts[index] + 1,
            lane=claim.lanes[index],
            traceparent=traceparent_of(claim.headers[index]),
            version=claim.versions[index],
        )
        for index, job_id in enumerate(claim.ids)
    ]
    return Taken(lease_id=claim.lease_id, jobs=jobs, expires_at=expires_at)


def _lease_faults(lease_s: float) -> list[tuple[str, str]]:
    if is_number(lease_s, LEASE_S_LEAST, LEASE_S_MAX):
        return []
    text = f"seconds from {LEASE_S_LEAST:.0f} to {LEASE_S_MAX:.0f}"
    return [("lease_s", mismatch(text, lease_s))]


def _decided(given: TakenOutcome, decisions: Mapping[str, str | None]) -> TakenOutcome:
    """The outcome of a decision; `given` itself without one."""
    if given.decision is None:
        return given
    queue = decisions[given.decision]
    if queue is not None:
        return TakenOutcome(outcome="send_to", queue=queue)
    return TakenOutcome(result={"decision": given.decision, "by": given.by})


def _decision_faults(given: TakenOutcome, decisions: Mapping[str, str | None]) -> list[str]:
    faults = []
    if given.decision is None:
        return ["by: expected with a decision, and only there"] if given.by else []
    if given.decision not in decisions:
        declared = f"one of {', '.join(decisions)}" if decisions else "none, as the queue has none"
        faults.append(f"decision: {mismatch(declared, given.decision)}")
    if given.outcome != "done" or given.result is not None:
        faults.append("decision: expected without another outcome and without a result")
    if len(given.by) > NAME_CHARACTERS_MAX or not given.by.isprintable():
        faults.append(f"by: expected at most {NAME_CHARACTERS_MAX} printable characters")
    return faults


def _outcome_faults(given: TakenOutcome, decisions: Mapping[str, str | None]) -> list[str]:
    faults = _decision_faults(given, decisions)
    if given.outcome not in OUTCOMES:
        faults.append(mismatch(f"one of {', '.join(OUTCOMES)}", given.outcome))
    after_s = given.after_s
    if given.outcome == "snooze" and after_s is None:
        faults.append("snooze needs after_s, in seconds")
    if after_s is not None and not 0 <= after_s <= AT_AWAY_S_MAX:
        text = mismatch(f"seconds from 0 to {AT_AWAY_S_MAX:.0f}", after_s)
        faults.append(f"after_s: {text}")
    if (given.outcome == "send_to") != bool(given.queue):
        faults.append("queue: expected with send_to, and only there")
    if given.result is not None and len(msgspec.json.encode(given.result)) > PAYLOAD_BYTES_MAX:
        faults.append(f"result: expected at most {PAYLOAD_BYTES_MAX} bytes as JSON")
    return faults


def _refuse(subject: str, faults: Sequence[tuple[str, str]]) -> None:
    problems = [FieldProblem(f"/{name}", "invalid", text) for name, text in faults]
    InvalidTake.require_none(problems, subject, shown_max=5)
