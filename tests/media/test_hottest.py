"""The most requested objects: correct in a sample, bounded, and soon forgotten."""

from __future__ import annotations

import random

from headrace.media.hottest import (
    FILE,
    HALF_LIFE_S,
    KEPT_MAX,
    Hottest,
    merge_rows,
    read_hottest,
    write_hottest,
)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def asked(clock: Clock, *, seconds: int, shares: dict[str, int], others_a_s: int = 0) -> Hottest:
    """A process with a given share of requests for each key, and for unique keys."""
    dice = random.Random(7)
    found = Hottest(clock, random.Random(8))
    number = 0
    for _ in range(seconds):
        clock.now_s += 1
        keys = [key for key, count in shares.items() for _ in range(count)]
        keys += [f"once/{number + n}" for n in range(others_a_s)]
        number += others_a_s
        dice.shuffle(keys)
        for key in keys:
            found.note(key)
        if clock.now_s % 2 == 0:
            found.top()
    return found


def test_rates_are_those_of_the_requests():
    top = asked(Clock(), seconds=600, shares={"a": 200, "b": 50, "c": 10}).top()
    assert [key for key, _ in top] == ["a", "b", "c"]
    for (_, per_s), right in zip(top, (200, 50, 10), strict=True):
        assert 0.6 * right < per_s < 1.5 * right


def test_hot_ones_are_found_among_a_multitude_that_is_asked_once():
    found = asked(Clock(), seconds=120, shares={"a": 100, "b": 40}, others_a_s=2000)
    assert [key for key, _ in found.top(2)] == ["a", "b"]
    assert len(found.top(10 * KEPT_MAX)) <= KEPT_MAX


def test_what_was_hot_is_forgotten():
    clock = Clock()
    found = asked(clock, seconds=120, shares={"old": 100})
    [(_, before)] = found.top()
    clock.now_s += HALF_LIFE_S
    [(_, after)] = found.top()
    assert 0.45 * before < after < 0.55 * before
    clock.now_s += 30 * HALF_LIFE_S
    assert found.top() == []


def test_the_first_request_of_all_is_seen():
    found = Hottest()
    found.note("a")
    assert [key for key, _ in found.top()] == ["a"]


def test_processes_are_added_up():
    parts = [[("a", 2.0), ("b", 1.0)], [("c", 2.5), ("a", 1.0)], []]
    assert merge_rows(parts) == [("a", 3.0), ("c", 2.5), ("b", 1.0)]


def test_what_a_node_left_counts_while_it_runs(tmp_path):
    assert read_hottest(tmp_path, within_s=15) is None
    folder = tmp_path / "run" / "media"
    write_hottest(folder, [("a", 1.5)])
    assert read_hottest(folder, within_s=15) == [("a", 1.5)]
    assert read_hottest(folder, within_s=-1) is None
    assert [path.name for path in folder.iterdir()] == [FILE]
    (folder / FILE).write_text("{")
    assert read_hottest(folder, within_s=15) is None
