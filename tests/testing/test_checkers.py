"""Each checker by small histories written by hand; see test_planted_bugs for real ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.checkers import (
    counted_twice,
    doubled,
    lost,
    over_concurrency,
    over_limit,
    overlapping,
)
from tests.kit.history import Event, History


def history(*rows):
    """Rows `(ms, kind, what, call, facts)`, of process 1 unless a fact `pid` differs."""
    return History(
        tuple(
            Event(
                kind=kind,
                what=what,
                at_ns=ms * 1_000_000,
                pid=facts.get("pid", 1),
                call=call,
                facts={name: value for name, value in facts.items() if name != "pid"},
            )
            for ms, kind, what, call, facts in sorted(rows, key=lambda row: row[0])
        )
    )


def starts(*ms, lane="a"):
    rows = ((m, "start", "mail", f"c{i}", {"job": i, "lane": lane}) for i, m in enumerate(ms))
    return history(*rows)


ADDED = (1, "ok", "enqueue", "1", {"job": 7})
LOST = [
    ([], {}, []),
    ([ADDED], {7}, []),
    ([ADDED], {}, [7]),
    ([(1, "unknown", "enqueue", "1", {"key": "a"})], {}, []),
    ([(1, "ok", "enqueue", "1", {"job": [7, 8, 9]})], {8}, [7, 9]),
    ([ADDED, (2, "start", "q", "2", {"job": 7})], {}, [7]),
    ([ADDED, (2, "end", "q", "2", {"job": [6, 7]})], {}, []),
    ([ADDED, (2, "end", "q", "2", {"job": 7, "error": "x"})], {}, [7]),
]


@pytest.mark.parametrize(("rows", "stored", "expected"), LOST)
def test_lost(rows, stored, expected):
    assert [f.subject for f in lost(history(*rows), stored=stored)] == expected


def ack(job, lease, kind="ok"):
    return kind, {"job": job, "lease": lease}


DOUBLED = [
    ([ack(1, 5)], None, []),
    ([ack(1, 5), ack(2, 5)], None, []),
    ([ack(1, 5), ack(1, 5)], None, [1]),
    ([ack(1, 5), ack(1, 5)], "lease", []),
    ([ack(1, 5), ack(1, 6)], "lease", [1]),
    ([ack(1, 5), ack(1, 6, "unknown")], "lease", []),
    ([ack([1, 2], 5), ack([2], 6)], "lease", [2]),
    ([("ok", {"other": 1}), ("ok", {"other": 1})], None, []),
]


@pytest.mark.parametrize(("rows", "witness", "expected"), DOUBLED)
def test_doubled(rows, witness, expected):
    found = history(*((n, kind, "settle", str(n), facts) for n, (kind, facts) in enumerate(rows)))
    subjects = [f.subject for f in doubled(found, what="settle", by="job", witness=witness)]
    assert subjects == expected


def test_a_groups_callback_may_run_again_but_not_as_another_job():
    again = [(1, "start", "reported", "1", {"job": 1, "group": 9})] * 2
    another = (2, "start", "reported", "2", {"job": 2, "group": 9})
    asked = {"what": "reported", "by": "group", "witness": "job", "kind": "start"}
    assert doubled(history(*again), **asked) == []
    [found] = doubled(history(*again, another), **asked)
    assert (found.subject, len(found.events)) == (9, 2)


def test_counted_twice():
    assert counted_twice("settlement", [1, 2, 3]) == []
    assert [f.subject for f in counted_twice("settlement", [1, 2, 2, 3, 2])] == [2]


@given(st.lists(st.integers(0, 400), max_size=12), st.integers(1, 4))
def test_over_limit_finds_every_window_that_has_too_many_starts(ms, starts_max):
    ms.sort()
    full = [at for at in ms if sum(at <= other < at + 100 for other in ms) > starts_max]
    found = over_limit(starts(*ms), starts_max=starts_max, window_s=0.1)
    assert [f.subject for f in found] == (["a"] if full else [])


def test_over_limit_shows_the_tightest_window_and_counts_all():
    [found] = over_limit(starts(0, 90, 500, 510, 520, 1000), starts_max=1, window_s=0.1)
    assert "3 windows of 0.1 s are over 1 starts" in found.text
    assert "2 within 0.010000 s" in repr(found)
    assert [event.facts["job"] for event in found.events] == [2, 3]
    [found] = over_limit(starts(*range(40)), starts_max=30, window_s=1)
    assert repr(found).startswith("\nover limit a: 10 windows of 1 s are over 30 starts")
    assert "pid=1 start mail job=0 lane=a" in repr(found)
    assert repr(found).endswith("and 19 more")


def test_lanes_are_judged_separately_and_jobs_without_one_are_not():
    both = History((*starts(0, 1).events, *starts(0, 1, lane="b").events))
    assert {f.subject for f in over_limit(both, starts_max=1, window_s=1)} == {"a", "b"}
    [found] = over_limit(both, starts_max=1, window_s=1, lane="b")
    assert found.subject == "b"
    assert over_limit(starts(0, 1, lane=None), starts_max=1, window_s=1) == []
    batch = history((0, "start", "mail", "1", {"job": [1, 2, 3], "lane": ["a", "a", "b"]}))
    assert [f.subject for f in over_limit(batch, starts_max=1, window_s=1)] == ["a"]


def run(ms, call, job, **facts):
    return (ms, "start", "mail", call, {"job": job, "lane": "a", **facts})


OVERLAPS = [
    ([run(0, "1", 1), (5, "end", "mail", "1", {"job": 1}), run(5, "2", 2)], 0),
    ([run(0, "1", 1), run(5, "2", 2), (6, "end", "mail", "1", {"job": 1})], 2),
    ([run(0, "1", 1), run(5, "2", 2)], 2),
    ([run(0, "1", 1, pid=4), (4, "lost", "process", "", {"pid": 4}), run(5, "2", 2)], 0),
    ([run(0, "1", 1, pid=4), (4, "lost", "process", "", {"pid": 5}), run(5, "2", 2)], 2),
    ([run(0, "1", 1), run(5, "2", 1)], 0),
    ([run(0, "1", 1), run(5, "2", 1), run(6, "3", 2)], 2),
    ([run(0, "1", [1, 2])], 2),
]


@pytest.mark.parametrize(("rows", "at_once"), OVERLAPS)
def test_over_concurrency(rows, at_once):
    found = over_concurrency(history(*rows), concurrency=1)
    assert [len(f.events) for f in found] == ([at_once] if at_once else [])
    assert over_concurrency(history(*rows), concurrency=2) == []


def effect(began_ms, ended_ms, lease, kind="ok"):
    call, facts = f"{began_ms}", {"job": 1, "lease": lease}
    return [(began_ms, "invoke", "effect", call, facts), (ended_ms, kind, "effect", call, facts)]


FIRST, SECOND = run(0, "a", 1, lease=5), run(1, "b", 1, lease=6)
EFFECTS = [
    ([FIRST, *effect(1, 2, 5)], 0),
    ([FIRST, *effect(1, 2, 5), run(3, "b", 1, lease=6), *effect(4, 5, 6)], 0),
    ([FIRST, SECOND, *effect(2, 3, 6), *effect(4, 5, 5)], 1),
    ([FIRST, SECOND, *effect(2, 3, 5, "fail")], 0),
    ([FIRST, *effect(1, 4, 5), run(2, "b", 1, lease=6)], 0),
    ([FIRST, *effect(1, 2, 5), *effect(3, 4, 5)], 1),
]


@pytest.mark.parametrize(("rows", "findings"), EFFECTS)
def test_overlapping(rows, findings):
    assert len(overlapping(history(*rows))) == findings
