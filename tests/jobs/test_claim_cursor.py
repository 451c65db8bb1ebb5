"""Cursors of claims and polls: their marks, dropped often if a search is cheap, else rarely."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from headrace.jobs.store.claim_cursor import (
    FIRST_AT,
    LATE_COMMIT_S,
    ClaimCursor,
    LaneCursor,
    PollCursor,
)
from headrace.jobs.store.leases import Claim, Claims, WorkAhead

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FIRST = ClaimCursor().marks[0]
LATE = (NOW - timedelta(seconds=LATE_COMMIT_S), 0)


def claims(*jobs, moved=0, scan_s=0.001):
    """A claim that returned jobs given as (priority, seconds before now, id)."""
    columns = dict.fromkeys(("attempts", "losses", "lanes", "headers", "versions", "payloads"))
    lease = Claim(
        lease_id=1,
        is_plain=True,
        ids=[job_id for _, _, job_id in jobs],
        priorities=[priority for priority, _, _ in jobs],
        run_ats=[NOW - timedelta(seconds=age_s) for _, age_s, _ in jobs],
        **columns,
    )
    return Claims([lease] if jobs else [], NOW, retries=5, moved=moved, scan_s=scan_s)


def key(age_s, job_id):
    return (NOW - timedelta(seconds=age_s), job_id)


def test_a_full_claim_moves_the_marks_up_to_where_it_ended():
    cursor = ClaimCursor()
    cursor.next_order()
    cursor.note(claims((2, 90, 7), (5, 100, 1), (5, 99, 2)), jobs_max=3, now_s=1000.0)
    assert cursor.marks == [LATE, LATE, LATE, LATE, LATE, key(99, 2), *[FIRST] * 4]


def test_a_turned_claim_ends_the_other_way_round():
    cursor = ClaimCursor()
    for _ in range(8):
        order = cursor.next_order()
    assert order[0] == 9
    cursor.note(claims((8, 100, 1)), jobs_max=1, now_s=1000.0)
    assert cursor.marks == [*[FIRST] * 8, key(100, 1), LATE]


def test_a_short_claim_drops_the_marks():
    cursor = ClaimCursor()
    cursor.next_order()
    cursor.note(claims((5, 1, 1)), jobs_max=1, now_s=1000.0)
    cursor.note(claims((5, 1, 2)), jobs_max=2, now_s=1000.1)
    assert cursor.marks == [FIRST] * 10


def test_marks_are_dropped_each_second():
    cursor = ClaimCursor()
    cursor.next_order()
    cursor.note(claims((5, 1, 1)), jobs_max=1, now_s=1000.0)
    cursor.note(claims((5, 1, 2)), jobs_max=1, now_s=1000.9)
    assert cursor.marks[5] == key(1, 2)
    cursor.note(claims((5, 1, 3)), jobs_max=1, now_s=1001.1)
    assert cursor.marks == [FIRST] * 10


def test_where_looking_back_is_slow_it_is_done_seldom():
    """A scan of 0.1 s is not repeated for 2 s, not even after a short claim."""
    cursor = ClaimCursor()
    cursor.next_order()
    cursor.note(claims((5, 1, 1), scan_s=0.1), jobs_max=2, now_s=1000.0)
    assert cursor.is_costly
    assert cursor.marks == [LATE] * 10
    cursor.note(claims(), jobs_max=2, now_s=1001.9)
    assert cursor.marks[5] == LATE
    cursor.note(claims(), jobs_max=2, now_s=1002.1)
    assert cursor.marks == [FIRST] * 10
    cursor.note(claims(), jobs_max=2, now_s=1002.2)
    assert not cursor.is_costly
    cursor.note(claims((5, 1, 9), scan_s=9.0), jobs_max=2, now_s=1002.3)
    cursor.note(claims(), jobs_max=2, now_s=1031.0)
    assert cursor.marks == [LATE] * 10
    cursor.note(claims(), jobs_max=2, now_s=1033.0)
    assert cursor.marks == [FIRST] * 10


def test_a_claim_that_used_all_its_leases_may_have_left_jobs():
    cursor = ClaimCursor()
    cursor.note(claims((5, 3, 1), (5, 2, 2)), jobs_max=16, leases_max=1, now_s=1000.0)
    assert not cursor.saw_all
    cursor = ClaimCursor()
    cursor.note(claims((5, 3, 1), (5, 2, 2)), jobs_max=32, leases_max=2, now_s=1000.0)
    assert cursor.saw_all


def poll(cursor, seconds, event, took_s=0.001):
    """A poll that found nothing, so many seconds after NOW."""
    at = NOW + timedelta(seconds=seconds)
    nothing = WorkAhead(
        frozenset(), frozenset(), None, polled_at=at, last_event=event, took_s=took_s
    )
    cursor.note(nothing, 1000.0 + seconds)


def test_quick_polls_search_from_the_beginning():
    cursor = PollCursor()
    for seconds in range(5):
        assert cursor.mark == (FIRST_AT, 0)
        poll(cursor, seconds, 7)


def test_slow_polls_search_after_what_had_committed_at_an_earlier_one():
    """A poll of 0.1 s from the beginning is repeated after 2 s."""
    cursor = PollCursor()
    poll(cursor, 0, 7, took_s=0.1)
    assert cursor.mark == (FIRST_AT, 0), "nothing is known of what was not committed then"
    poll(cursor, 0.6, 8)
    assert cursor.mark == (NOW, 7)
    poll(cursor, 1.2, 9)
    assert cursor.mark == (NOW + timedelta(seconds=0.6), 8)
    poll(cursor, 2.1, 9)
    assert cursor.mark == (FIRST_AT, 0)


def test_slow_claims_of_lanes_search_after_their_marks():
    cursor = LaneCursor()

    def note(now_s, event, first_ready=None, scan_s=0.001):
        claimed = Claims(
            [],
            NOW + timedelta(seconds=now_s),
            retries=5,
            last_event=event,
            first_ready=first_ready,
            scan_s=scan_s,
        )
        cursor.note(claimed, 1000.0 + now_s)

    note(0, 7, scan_s=0.1)
    assert (cursor.event, cursor.ready_from) == (0, NOW - timedelta(seconds=LATE_COMMIT_S))
    note(0.6, 3, first_ready=NOW - timedelta(seconds=9))
    assert (cursor.event, cursor.ready_from) == (7, NOW - timedelta(seconds=9))
    note(2.1, 8)
    assert (cursor.event, cursor.ready_from) == (0, FIRST_AT)
