"""Everything dies at random moments under load: nothing acknowledged is lost, doubled or let in.

A row is a set of rooms, the faults that hit them, and the number of rounds. See `storm`.
"""

from __future__ import annotations

import pytest
from tests.kit.history import Event, History
from tests.kit.storm.room_feed import FeedRoom
from tests.kit.storm.room_fetch import (
    STARTS_MAX,
    FetchRoom,
    expected_outcomes,
    over_in_logs,
    undelivered,
    without_bytes,
    wrong_counts,
    wrong_outcomes,
)
from tests.kit.storm.room_jobs import JobsRoom, shared_keys
from tests.kit.storm.room_views import ViewsRoom
from tests.kit.storm.storm import FAULTS, FETCH_FAULTS, FLUSH_FAULTS, JOB_FAULTS, weather

ALL = (JobsRoom, FetchRoom, ViewsRoom, FeedRoom)


def row(name, *rooms, faults=tuple(FAULTS), rounds=1, pause_s=(0.1, 0.5), is_soak=False):
    marks = [pytest.mark.soak] if is_soak else [pytest.mark.slow]
    return pytest.param(rooms, faults, rounds, pause_s, id=name, marks=marks)


LONG = {"pause_s": (0.2, 1.5), "is_soak": True}
ROWS = (
    row("all rooms", *ALL),
    row("all rooms, long", *ALL, rounds=4, **LONG),
    row("jobs, long", JobsRoom, faults=JOB_FAULTS, rounds=10, **LONG),
    row("fetch, long", lambda: FetchRoom(8, 120), faults=FETCH_FAULTS, rounds=6, **LONG),
    row("views and feed, long", ViewsRoom, FeedRoom, faults=FLUSH_FAULTS, rounds=14, **LONG),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rooms", "faults", "rounds", "pause_s"), ROWS)
async def test_a_storm_breaks_no_promise(tmp_path, rooms, faults, rounds, pause_s):
    await weather(tmp_path, rooms=rooms, faults=faults, rounds=rounds, pause_s=pause_s)


# Planted bugs: each checker reports the fault that it is there for, and no other.

URL = "http://a.test:1/0/0.jpg"
LINKS = {URL: ("a.test", "/0/0.jpg")}
RESULT = {"customer": "a", "item": "i", "version": 1}


def need(outcome):
    return {"customer": "a", "run_id": 1, "item": "i", "url": URL, "outcome": outcome}


def count(outcome, counted, *, photos=1, state="done"):
    return {"id": 1, "state": state, "photos": photos, "outcome": outcome, "counted": counted}


RIGHT = min(expected_outcomes(*LINKS[URL]))
NEEDS = [need("stored")]
FULL = [n * 0.1 for n in range(STARTS_MAX)]


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        (wrong_outcomes([need(RIGHT)], LINKS), []),
        (wrong_outcomes([need(None)], LINKS), ["wrong outcome"]),
        (wrong_outcomes([need("failed:timeout")], LINKS), ["wrong outcome"]),
        (wrong_counts(NEEDS, [count("stored", 1)]), []),
        (wrong_counts(NEEDS, [count("stored", 2)]), ["wrong counts"]),
        (wrong_counts(NEEDS, [count("stored", 1, photos=2)]), ["wrong counts"]),
        (wrong_counts(NEEDS, [count("stored", 1), count("failed:dns", 1)]), ["wrong counts"]),
        (wrong_counts(NEEDS, [count(None, None)]), ["wrong counts"]),
        (wrong_counts(NEEDS, [count("stored", 1, state="applied")]), ["unfinished"]),
        (undelivered(NEEDS, [RESULT], {("a", "i")}), []),
        (undelivered(NEEDS, [], {("a", "i")}), ["results"]),
        (undelivered(NEEDS, [RESULT, RESULT], {("a", "i")}), ["results"]),
        (undelivered(NEEDS, [RESULT], set()), ["undelivered"]),
        (over_in_logs({"a.test": [*FULL, 1.0]}), []),
        (over_in_logs({"a.test": [*FULL, 0.999]}), ["over limit"]),
    ],
)
def test_a_planted_fault_of_a_catalogue_is_reported(found, faults):
    assert [finding.fault for finding in found] == faults


def test_a_row_without_its_bytes_is_reported(tmp_path):
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    rows = [{"key": "a.jpg", "sha256": empty}]
    assert [f.text for f in without_bytes(rows, tmp_path)] == ["a row without an object"]
    (tmp_path / "a.jpg").write_bytes(b"other")
    assert [f.text for f in without_bytes(rows, tmp_path)] == ["the object has other bytes"]
    (tmp_path / "a.jpg").write_bytes(b"")
    assert without_bytes(rows, tmp_path) == []


@pytest.mark.parametrize(("ended_ns", "subjects"), [(15, []), (25, ["k"])])
def test_a_key_of_two_unfinished_jobs_is_reported(ended_ns, subjects):
    events = [
        _event("ok", "enqueue", 10, key=["k"], job=[1]),
        _event("end", "noted", ended_ns, job=1),
        _event("ok", "enqueue", 20, key=["k"], job=[2]),
        _event("end", "noted", 30, job=2),
    ]
    found = shared_keys(History(tuple(events)))
    assert [finding.subject for finding in found] == subjects


def _event(kind, what, at_ns, **facts):
    return Event(kind=kind, what=what, at_ns=at_ns, pid=1, facts=facts)
