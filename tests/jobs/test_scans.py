"""Scan marks: behind what was claimed, dropped often where looking back is cheap and seldom where it is not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from headrace.jobs.scans import LATE_COMMIT_S, Scan
from headrace.jobs.store.leases import Claim, Claims

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FIRST = Scan().marks[0]
LATE = (NOW - timedelta(seconds=LATE_COMMIT_S), 0)


def claims(*jobs, moved=0):
    """A claim of (priority, seconds before now, id)."""
    columns = dict.fromkeys(("attempts", "losses", "lanes", "traceparents", "versions", "payloads"))
    lease = Claim(
        lease_id=1,
        is_plain=True,
        ids=[job_id for _, _, job_id in jobs],
        priorities=[priority for priority, _, _ in jobs],
        run_ats=[NOW - timedelta(seconds=age_s) for _, age_s, _ in jobs],
        **columns,
    )
    return Claims([lease] if jobs else [], NOW, retries=5, moved=moved)


def key(age_s, job_id):
    return (NOW - timedelta(seconds=age_s), job_id)


def test_a_full_claim_moves_the_marks_up_to_where_it_ended():
    scan = Scan()
    scan.next_order()
    scan.note(claims((2, 90, 7), (5, 100, 1), (5, 99, 2)), jobs_max=3, now_s=1000.0)
    assert scan.marks == [LATE, LATE, LATE, LATE, LATE, key(99, 2), *[FIRST] * 4]


def test_a_turned_claim_ends_the_other_way_round():
    scan = Scan()
    for _ in range(8):
        order = scan.next_order()
    assert order[0] == 9
    scan.note(claims((8, 100, 1)), jobs_max=1, now_s=1000.0)
    assert scan.marks == [*[FIRST] * 8, key(100, 1), LATE]


def test_a_short_claim_drops_the_marks():
    scan = Scan()
    scan.next_order()
    scan.note(claims((5, 1, 1)), jobs_max=1, now_s=1000.0)
    scan.note(claims((5, 1, 2)), jobs_max=2, now_s=1000.1)
    assert scan.marks == [FIRST] * 10


def test_marks_are_dropped_each_second():
    scan = Scan()
    scan.next_order()
    scan.note(claims((5, 1, 1)), jobs_max=1, now_s=1000.0)
    scan.note(claims((5, 1, 2)), jobs_max=1, now_s=1000.9)
    assert scan.marks[5] == key(1, 2)
    scan.note(claims((5, 1, 3)), jobs_max=1, now_s=1001.1)
    assert scan.marks == [FIRST] * 10


def test_where_looking_back_is_slow_it_is_done_seldom():
    """A tenth of a second: then not again for two, and a short claim does not change that."""
    scan = Scan()
    scan.next_order()
    scan.note(claims((5, 1, 1)), jobs_max=2, now_s=1000.0, took_s=0.1)
    assert scan.is_costly
    assert scan.marks == [LATE] * 10
    scan.note(claims(), jobs_max=2, now_s=1001.9, took_s=0.001)
    assert scan.marks[5] == LATE
    scan.note(claims(), jobs_max=2, now_s=1002.1, took_s=0.001)
    assert scan.marks == [FIRST] * 10
    scan.note(claims(), jobs_max=2, now_s=1002.2, took_s=0.001)
    assert not scan.is_costly
    scan.note(claims((5, 1, 9)), jobs_max=2, now_s=1002.3, took_s=9.0)
    scan.note(claims(), jobs_max=2, now_s=1031.0, took_s=0.001)
    assert scan.marks == [LATE] * 10
    scan.note(claims(), jobs_max=2, now_s=1033.0, took_s=0.001)
    assert scan.marks == [FIRST] * 10


def test_a_claim_that_used_all_its_leases_may_have_left_jobs():
    scan = Scan()
    scan.note(claims((5, 3, 1), (5, 2, 2)), jobs_max=16, leases_max=1, now_s=1000.0)
    assert not scan.saw_all
    scan = Scan()
    scan.note(claims((5, 3, 1), (5, 2, 2)), jobs_max=32, leases_max=2, now_s=1000.0)
    assert scan.saw_all
