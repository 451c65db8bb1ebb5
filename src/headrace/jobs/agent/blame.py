"""What becomes of the jobs of a slot that died: whose doing it was, and whose not. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.jobs.agent.board import Doing
from headrace.jobs.agent.seats import Hand, Seat
from headrace.jobs.handling import Outcome, settled_outcome
from headrace.jobs.slots.messages import Settled, Work
from headrace.kernel.resilience import Backoff


def begun_jobs(seat: Seat, doing: Doing) -> set[int]:
    """Which jobs of a seat had begun when it died, by what its cell says.

    One that ran alone is named. Else everything given may have: a batch begins as a whole, and of calls
    side by side the oldest without an outcome have begun.
    """
    if doing.jobs == 0:
        return set()
    given = [job_id for hand in seat.hands.values() for job_id in hand.open_ids()]
    if doing.job_id is not None:
        return {doing.job_id} & set(given)
    if seat.line is not None and seat.line.facts.batch is None:
        return set(given[: seat.line.facts.concurrency])
    return set(given)


def settled_for_dead(
    seat: Seat, doing: Doing, why: str, *, is_overtime: bool, backoff: Backoff
) -> list[tuple[Hand, Settled]]:
    """What is to be settled for a dead slot: what had begun is `lost`, the rest is `returned`.

    With `is_overtime` it was killed for a call over its timeout: a job alone in it has failed a run.
    """
    begun = begun_jobs(seat, doing)
    settled = []
    for hand in seat.hands.values():
        ids = hand.open_ids()
        outcomes = [Outcome("lost" if job_id in begun else "returned") for job_id in ids]
        if is_overtime and len(begun) == 1:
            attempts = dict(zip(hand.ids, hand.attempts, strict=True))
            outcomes = [
                settled_outcome(
                    Outcome("retry", None, why),
                    attempt=attempts[job_id] + 1,
                    retries=hand.retries,
                    backoff=backoff,
                )
                if job_id in begun
                else outcome
                for job_id, outcome in zip(ids, outcomes, strict=True)
            ]
        settled.append((hand, _settled(hand.lease_id, ids, outcomes, why)))
    return settled


def given_back(work: Work) -> Settled:
    """Work that no slot has begun, as if it had never been claimed."""
    word = "returned" if work.start_before_s is None else "unstarted"
    return _settled(work.lease_id, work.ids, [Outcome(word)] * len(work.ids), "")


def _settled(lease_id: int, ids: Sequence[int], outcomes: Sequence[Outcome], why: str) -> Settled:
    return Settled(
        lease_id=lease_id,
        ids=ids,
        words=[outcome.word for outcome in outcomes],
        delays_s=[outcome.after_s for outcome in outcomes],
        errors=["" if outcome.word == "returned" else why for outcome in outcomes],
        tracebacks=[""] * len(ids),
    )
