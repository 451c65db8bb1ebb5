"""Pure rules: states, retries, outcomes, declared tasks, rates, and how a spread delays jobs."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs import (
    Batch,
    Cancel,
    Fail,
    JobContext,
    NewJob,
    Registry,
    Retry,
    Snooze,
    Task,
)
from headrace.jobs.errors import InvalidTask, LaneExhausted
from headrace.jobs.model import jobs_run_seconds, jobs_wait_seconds
from headrace.jobs.outcomes import (
    DONE,
    Outcome,
    bounded_text,
    final_outcome,
    outcome_of,
)
from headrace.jobs.validation import prepare_jobs
from headrace.kernel.config import parse_rate
from headrace.kernel.resilience import Backoff

BACKOFF = Backoff(2.0, 60.0)


class Photo(msgspec.Struct):
    """A payload with a shape."""

    number: int


@dataclasses.dataclass
class Point:
    """Another one."""

    x: int


@given(attempt=st.integers(1, 40), retries=st.integers(0, 30))
def test_a_retry_gets_a_delay_until_retries_are_used_up(attempt, retries):
    settled = final_outcome(
        Outcome("retry", None, "why"), attempt=attempt, retries=retries, backoff=BACKOFF
    )
    assert settled.error == "why"
    if attempt > retries:
        assert (settled.kind, settled.after_s) == ("fail", None)
    else:
        assert settled.kind == "retry"
        assert settled.after_s is not None
        assert 1.0 <= settled.after_s <= 60.0


def test_the_outcome_of_raised_errors():
    assert outcome_of(Retry(3, "busy")) == Outcome("retry", 3.0, "busy")
    assert outcome_of(Fail("no")) == Outcome("fail", None, "no")
    assert outcome_of(Snooze(5)).kind == "snooze"
    assert outcome_of(Cancel("off")) == Outcome("cancel", None, "off")
    assert outcome_of(LaneExhausted("a", 1, 7.0)).after_s == 7.0
    assert outcome_of(KeyError("x")) == Outcome("retry", None, "KeyError: 'x'", "KeyError: 'x'\n")


class Bare(Snooze):
    """A subclass that takes any delay as it is."""

    def __init__(self, after_s: object) -> None:
        self.after_s = after_s


NO_DELAYS = [-1, float("nan"), float("inf"), 1e30, 10**400]


@pytest.mark.parametrize("given_s", NO_DELAYS)
def test_an_invalid_delay_is_an_error_of_the_handler(given_s):
    job = JobContext(1, None, lease_id=7)
    for method in (Retry, Snooze, job.retry, job.snooze):
        with pytest.raises((TypeError, ValueError), match="after_s: expected seconds"):
            method(given_s)
    assert job.outcome is None
    assert outcome_of(Bare(given_s)).kind == "retry"
    exhausted = LaneExhausted("a", 1, 7.0)
    exhausted.retry_after_s = given_s
    assert outcome_of(exhausted).kind == "retry"
    final = final_outcome(
        Outcome("snooze", given_s), attempt=1, retries=5, backoff=Backoff(3.0, 3.0)
    )
    assert final.kind == "retry"
    assert final.after_s is not None
    assert 1.5 <= final.after_s <= 3.0


@pytest.mark.parametrize(("given_s", "kept_s"), [(None, None), (0, 0.0), (2, 2.0)])
def test_a_delay_is_kept(given_s, kept_s):
    job = JobContext(1, None, lease_id=7)
    job.retry(given_s)
    assert job.outcome is not None
    assert job.outcome.after_s == kept_s
    job.done()
    assert job.outcome is DONE


@given(st.text())
def test_any_text_can_be_stored(text):
    stored = bounded_text(text, 20)
    assert "\0" not in stored
    assert stored.encode().decode() == stored
    assert len(stored) <= 24
    assert bounded_text("\ud800\0x", 20) == "?\N{SYMBOL FOR NULL}x"


def test_payload_types_come_from_the_signature():
    async def typed(batch: Batch[Photo]): ...
    async def untyped(batch): ...
    async def whole(photo: Photo): ...
    async def point(point: Point): ...
    async def fields(to: str, count: int = 1): ...
    async def one_field(to: str): ...

    def task(handler: Any, **options: Any) -> Task:
        return Task(queue="q", handler=handler, **options)

    assert task(typed, batch=5).decode(b'{"number":1}') == Photo(1)
    assert task(untyped, batch=5).decode(b'{"number":1}') == {"number": 1}
    assert task(whole).decode(b'{"number":1}') == Photo(1)
    assert task(point).decode(b'{"x":1}') == Point(1)
    assert task(fields).decode(b'{"to":"a"}').count == 1
    assert task(one_field).decode(b'{"to":"a"}').to == "a"
    assert task(untyped, payload=Photo).decode(b'{"number":1}') == Photo(1)
    for wrong in (b'{"to":1}', b'{"to":"a","extra":1}', b"[]", b"{", b"null"):
        with pytest.raises(ValueError):
            task(fields).decode(wrong)


def test_a_bound_method_is_a_handler():
    class Room:
        async def handle(self, batch: Batch[Photo]) -> None: ...

    task = Task(queue="room", handler=Room().handle, batch=50)
    assert task.is_async
    assert task.decode(b'{"number":2}') == Photo(2)


def test_a_handler_whose_types_cannot_be_read_is_refused():
    async def handler(photo: Unknown): ...  # noqa: F821

    with pytest.raises(InvalidTask, match="payload="):
        Task(queue="q", handler=handler)
    assert Task(queue="q", handler=handler, payload=Photo).decode(b'{"number":1}') == Photo(1)


async def test_tasks_know_their_queue_and_check_their_fields():
    registry = Registry()

    @registry.task("mail")
    async def mail(to: str, text: str = "hi"):
        return to + text

    assert mail.job(to="ann").payload == {"to": "ann"}
    assert mail.job({"to": "ann"}, lane="x").lane == "x"
    assert await mail("a", text="b") == "ab"
    for wrong in ({}, {"too": "ann"}):
        with pytest.raises(InvalidTask):
            mail.job(**wrong)
    with pytest.raises(InvalidTask):
        mail.job({"to": "ann"}, to="bob")
    with pytest.raises(InvalidTask):
        registry.task("mail")(mail.handler)
    with pytest.raises(InvalidTask, match="bound to no app"):
        await mail.enqueue(to="ann")
    with pytest.raises(InvalidTask, match="belongs to no app"):
        await Task(queue="x", handler=mail.handler).enqueue(to="ann")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("600/m", (600, 60.0)), ("10/30s", (10, 30.0)), ("5/500ms", (5, 0.5))],
)
def test_rates_as_they_are_written(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "600", "/m", "-1/m", "6/x", "6/", "1e3/m", "6/1.2.3s"])
def test_invalid_rates_are_refused(text):
    with pytest.raises(ValueError, match="such as"):
        parse_rate(text)


def test_a_delay_of_another_type_is_refused_when_it_is_set():
    job = JobContext(1, {}, lease_id=1)
    for method in (Snooze, Retry, job.retry, job.snooze):
        with pytest.raises(TypeError, match="after_s: expected seconds, got a str"):
            method("abc")
    for method in (Snooze, job.snooze):
        with pytest.raises(TypeError, match="NoneType"):
            method(None)
    assert job.outcome is None


SPREAD_S = st.floats(0, 86_400.0)


@given(SPREAD_S, st.none() | st.floats(0, 86_400.0), st.floats(-86_400.0, 86_400.0))
def test_a_spread_delays_a_job_by_at_most_itself(spread_s, after_s, away_s):
    """A moment in the past counts as now."""
    now = datetime.now(UTC)
    at = now + timedelta(seconds=away_s)
    rows = prepare_jobs(
        [
            NewJob(queue="q", after_s=after_s, spread_s=spread_s),
            NewJob(queue="q", at=at, spread_s=spread_s),
        ]
    )
    first_s = after_s or 0.0
    assert first_s <= (rows.delays_s[0] or 0.0) <= first_s + spread_s
    assert at <= rows.run_ats[1]
    if spread_s:
        assert max(now, at) <= rows.run_ats[1]
        assert rows.run_ats[1] <= max(datetime.now(UTC), at) + timedelta(seconds=spread_s)


def test_a_spread_uses_its_whole_window():
    rows = prepare_jobs([NewJob(queue="q", spread_s=1_000.0)] * 2_000)
    assert {int(delay_s // 100) for delay_s in rows.delays_s} == set(range(10))


async def test_a_job_is_enqueued_into_its_window(jobs, registry):
    @registry.task("q")
    async def handle(n: int): ...

    now = datetime.now(UTC)
    refs = [await handle.enqueue(n=n, after_s=3_600, spread="2h") for n in range(5)]
    moments = [(await ref.job()).run_at for ref in refs]
    assert len(set(moments)) == 5
    assert all(3_590 <= (at - now).total_seconds() <= 3 * 3_600 + 60 for at in moments)
    with pytest.raises(InvalidTask, match="spread: expected a duration"):
        await handle.enqueue(n=1, spread="some time")


@pytest.mark.parametrize("metric", [jobs_wait_seconds, jobs_run_seconds])
def test_times_of_hours_are_measured(metric):
    [family] = metric.collect()
    bounds_s = {float(one.labels["le"]) for one in family.samples if "le" in one.labels}
    assert {60.0, 600.0, 3_600.0, 86_400.0} <= bounds_s
