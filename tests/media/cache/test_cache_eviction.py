"""Eviction is SIEVE as published, in each set of 16 frames, and beats LRU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.media.cache.frame_table import MARKS_MAX, choose
from headrace.media.simulate.eviction import (
    SHIFT,
    TRACKS,
    Lru,
    Popularity,
    SieveGlobal,
    SieveSets,
    simulate,
)


def test_the_popularity_is_the_one_stated():
    law = Popularity(TRACKS // 100, shift=SHIFT / 100, seed=1)
    assert law.share_of_top(5000) == pytest.approx(0.9, abs=0.01)
    assert law.share_of_top(1) == pytest.approx(0.1 * 100 / 140, abs=0.02)
    drawn = list(law.draw(20_000))
    assert sum(track < 5000 for track in drawn) / 20_000 == pytest.approx(0.9, abs=0.02)


class SieveOfThePaper:
    """A queue from the oldest to the newest, and a hand."""

    def __init__(self, frames: int, *, marks_max: int = 1) -> None:
        self.frames, self.queue, self.hand = frames, [], None
        self.marks, self.marks_max = {}, marks_max

    def hit(self, track: int) -> bool:
        if track in self.queue:
            self.marks[track] = min(self.marks_max, self.marks[track] + 1)
            return True
        if len(self.queue) == self.frames:
            at = self.queue.index(self.hand) if self.hand is not None else 0
            while self.marks[self.queue[at]]:
                self.marks[self.queue[at]] -= 1
                at = (at + 1) % self.frames
            self.hand = self.queue[at + 1] if at + 1 < self.frames else None
            self.queue.pop(at)
        self.queue.append(track)
        self.marks[track] = 0
        return False


@pytest.mark.slow
@given(st.integers(1, 6), st.lists(st.integers(0, 12), max_size=150))
def test_the_global_sieve_is_the_one_of_the_paper(frames, tracks):
    ours, paper = SieveGlobal(frames), SieveOfThePaper(frames)
    for track in tracks:
        assert ours.hit(track) == paper.hit(track)


@pytest.mark.slow
@given(st.lists(st.integers(0, 40), max_size=200))
def test_one_set_is_one_sieve(tracks):
    ours, paper = SieveSets(16, seed=1), SieveOfThePaper(16, marks_max=MARKS_MAX)
    for track in tracks:
        assert ours.hit(track) == paper.hit(track)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 2**32 - 1), min_size=16, max_size=16, unique=True),
    st.lists(st.integers(0, MARKS_MAX), min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.sets(st.integers(0, 15)),
)
def test_a_frame_that_is_being_filled_is_never_chosen(generations, visited, hand, busy):
    choice = choose(generations, visited, hand=hand, busy=busy)
    if len(busy) == 16:
        assert choice is None
        return
    assert choice.way not in busy
    assert not busy & set(choice.unmarked)
    unmarked_all = all(visited[way] for way in range(16) if way not in busy)
    assert not visited[choice.way] or unmarked_all


def test_one_time_visitors_do_not_push_out_popular_tracks():
    cache = SieveSets(16, seed=1)
    popular = [1, 2, 3]
    for key in popular * 2:
        cache.hit(key)
    for stranger in range(100, 250):
        cache.hit(stranger)
        assert all(cache.hit(key) for key in popular)


def test_lru_forgets_what_was_asked_for_longest_ago():
    cache = Lru(2)
    assert [cache.hit(track) for track in (1, 2, 1, 3, 1, 2)] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.slow
def test_sieve_in_sets_beats_lru_and_stays_near_the_global_one():
    [row] = simulate([50_000], requests=60_000, scale=100)
    assert row.sieve_sets > row.lru + 0.025
    assert row.sieve_sets > row.sieve_global - 0.04
    assert row.lru < row.sieve_global < row.best_static
    assert simulate([50_000], requests=60_000, scale=100) == [row]


@pytest.mark.soak
def test_at_every_size_over_lru():
    rows = simulate([10_000, 50_000, 150_000, 500_000], requests=1_500_000, scale=20)
    for row in rows:
        assert row.sieve_sets >= row.lru + 0.02, row
        assert row.sieve_sets >= row.sieve_global - 0.02, row
