"""SIEVE in a set against the published algorithm: a queue and a hand, up to MARKS_MAX marks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.media.cache.frame_table import MARKS_MAX, choose

WAYS = 4


class SieveOfThePaper:
    """A queue from the oldest to the newest, and a hand that moves towards the newest."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.marks: dict[int, int] = {}
        self.hand: int | None = None

    def access(self, key: int) -> int | None:
        """The evicted key, if any."""
        if key in self.queue:
            self.marks[key] = min(MARKS_MAX, self.marks[key] + 1)
            return None
        gone = self.evict() if len(self.queue) == WAYS else None
        self.queue.append(key)
        self.marks[key] = 0
        return gone

    def evict(self) -> int:
        at = self.queue.index(self.hand) if self.hand is not None else 0
        while self.marks[self.queue[at]]:
            self.marks[self.queue[at]] -= 1
            at = (at + 1) % WAYS
        gone = self.queue[at]
        self.hand = self.queue[at + 1] if at + 1 < WAYS else None
        self.queue.remove(gone)
        return gone


class SieveOfTheSet:
    """The same through `choose`, with the data of the cache."""

    def __init__(self) -> None:
        self.keys: list[int | None] = [None] * WAYS
        self.generations = [0] * WAYS
        self.visited = [0] * WAYS
        self.hand = 0

    def access(self, key: int) -> int | None:
        if key in self.keys:
            way = self.keys.index(key)
            self.visited[way] = min(MARKS_MAX, self.visited[way] + 1)
            return None
        gone = None
        if None in self.keys:
            way = self.keys.index(None)
        else:
            choice = choose(self.generations, self.visited, hand=self.hand)
            way = choice.way
            for other in choice.unmarked:
                self.visited[other] -= 1
            gone, self.hand = self.keys[way], choice.hand
        self.generations[way] = max(self.generations) + 1
        self.keys[way], self.visited[way] = key, 0
        return gone


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), max_size=100))
def test_the_set_gives_up_what_the_paper_gives_up(accesses):
    paper, ours = SieveOfThePaper(), SieveOfTheSet()
    for key in accesses:
        assert ours.access(key) == paper.access(key)


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


def test_one_time_visitors_do_not_push_out_what_is_wanted():
    cache = SieveOfTheSet()
    for key in (1, 2, 3):
        cache.access(key)
        cache.access(key)
    for stranger in range(100, 150):
        cache.access(stranger)
        for key in (1, 2, 3):
            cache.access(key)
    assert {1, 2, 3} <= set(cache.keys)
