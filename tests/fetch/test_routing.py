"""Timeout classes: the rule alone, and on the mix of hosts that it was made for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.fetch.host_stats import FIT, RECENT, Classes, TimeClass, decayed, host_of
from headrace.fetch.settings import parse_classes

CLASSES = Classes((1.0, 5.0, 30.0))


def test_classes_are_parsed_from_short_to_long():
    assert parse_classes("30s, 5s,1s") == (1.0, 5.0, 30.0)
    assert parse_classes("1s, 1000ms") == (1.0,)
    assert (parse_classes("250ms"), parse_classes("")) == ((0.25,), ())
    for text in ("1", "0s", "1s 5s", "1h", "-1s", ",".join(f"{n}s" for n in range(1, 13))):
        with pytest.raises(ValueError, match="duration"):
            parse_classes(text)


def test_each_class_has_its_queue_and_a_former_one_is_still_served():
    assert [c.queue for c in CLASSES.listed] == ["fetch.1s", "fetch.5s", "fetch.30s"]
    assert TimeClass(0.25).queue == "fetch.250ms"
    assert TimeClass(1.5).queue == "fetch.1500ms"
    assert CLASSES.of_queue("fetch.5s").time_s == 5.0
    assert CLASSES.of_queue("fetch.7s") == CLASSES.last
    assert [CLASSES.after(c) for c in CLASSES.listed] == [*CLASSES.listed[1:], None]
    classes = Classes((1.0, 30.0), (5.0, 1.0))
    assert [c.name for c in classes.former] == ["5s"]
    assert classes.of_queue("fetch.5s").time_s == 5.0
    assert classes.after(classes.of_queue("fetch.5s")).name == "30s"
    assert classes.starting({5.0: 10.0}).name == "30s"


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({}, "1s"),
        ({1.0: 20.0}, "1s"),
        ({1.0: 1.0}, "1s"),
        ({1.0: 19.5, 5.0: 0.5}, "1s"),
        ({1.0: 18.0, 5.0: 2.0}, "5s"),
        ({5.0: 1.0}, "5s"),
        ({1.0: 10.0, 5.0: 9.0, 30.0: 2.0}, "30s"),
        ({30.0: 50.0}, "30s"),
        ({60.0: 50.0}, "30s"),
        ({5.0: 0.01}, "1s"),
    ],
)
def test_the_first_class_was_enough_for_nearly_all(weights, name):
    assert CLASSES.starting(weights).name == name


@pytest.mark.parametrize(
    ("outcome", "took_s", "here", "needed_s"),
    [
        ("received", 0.3, "fetch.1s", 1.0),
        ("received", 0.3, "fetch.30s", 1.0),
        ("received", 0.9, "fetch.1s", 5.0),
        ("received", 3.0, "fetch.5s", 5.0),
        ("received", 29.0, "fetch.30s", 30.0),
        ("refused:too_large", 2.0, "fetch.5s", 5.0),
        ("failed:timeout", 1.0, "fetch.1s", 5.0),
        ("failed:timeout", 5.0, "fetch.5s", 30.0),
        ("failed:timeout", 30.0, "fetch.30s", 30.0),
        ("failed:http_404", 0.1, "fetch.1s", None),
        ("failed:http_404", 3.0, "fetch.5s", 5.0),
        ("unchanged", 0.1, "fetch.5s", None),
        ("failed:dns", 0.0, "fetch.1s", None),
    ],
)
def test_which_class_a_download_needed(outcome, took_s, here, needed_s):
    assert CLASSES.needed(outcome, took_s, CLASSES.of_queue(here)) == needed_s


@given(
    st.dictionaries(st.floats(0.05, 600), st.floats(0, 1000), max_size=8),
    st.sets(st.floats(0.05, 600), min_size=1, max_size=6),
)
def test_any_measurement_gives_a_listed_class(weights, times_s):
    classes = Classes(times_s)
    found = classes.starting(weights)
    assert found in classes.listed
    total = sum(weights.values())
    if found != classes.last and total >= 0.05:
        assert sum(w for s, w in weights.items() if s <= found.time_s) >= FIT * total


def test_an_added_class_is_used_as_it_is_measured():
    weights = {30.0: 10.0}
    wider = Classes((1.0, 5.0, 10.0, 30.0))
    assert wider.starting(weights).name == "30s", "no measurement shows yet that 10 s suffice"
    for _ in range(4 * RECENT):
        weights = learned(weights, wider.enough_for(7.0).time_s)
    assert wider.starting(weights).name == "10s"
    assert CLASSES.starting(weights).name == "30s", "and it can be taken away again"


def test_a_host_that_became_faster_returns_to_a_shorter_class():
    weights: dict[float, float] = {}
    for _ in range(500):
        weights = learned(weights, 30.0)
    photos = 0
    while CLASSES.starting(weights).name != "1s":
        weights = learned(weights, 1.0)
        photos += 1
    assert photos <= 4 * RECENT
    assert decayed(50.0, age_s=6 * 3600, half_life_s=6 * 3600, new=0) == 25.0


def learned(weights: dict[float, float], needed_s: float) -> dict[float, float]:
    """The weights after one more download."""
    after = {s: decayed(w, age_s=0, half_life_s=1, new=1) for s, w in weights.items()}
    after[needed_s] = after.get(needed_s, 0.0) + 1
    return after


def photo_of(dice: random.Random, median_s: float, spread: float) -> tuple[str, float]:
    """(outcome, seconds it would take): 70 % fail, most of them at once."""
    drawn = dice.random()
    if drawn < 0.60:
        return "failed:http_404", dice.uniform(0.02, 0.3)
    if drawn < 0.70:
        return "failed:http_500", median_s * dice.lognormvariate(0, spread)
    return "received", median_s * dice.lognormvariate(0, spread)


def simulate(seed: int, *, hosts: int = 300, photos: int = 400, learning: int = 100) -> float:
    """Share of slow photos that start in too small a class once hosts are known."""
    dice = random.Random(seed)
    slow = begun_too_small = 0
    for host in range(hosts):
        kind = host % 10
        median_s = dice.uniform(0.1, 0.6) if kind < 4 else dice.uniform(1.2, 3.5)
        if kind >= 8:
            median_s = dice.uniform(6.0, 18.0)
        spread = dice.uniform(0.1, 0.4)
        weights: dict[float, float] = {}
        for number in range(photos):
            outcome, would_take_s = photo_of(dice, median_s, spread)
            would_take_s = min(would_take_s, 29.0)
            here = start = CLASSES.starting(weights)
            while would_take_s > here.time_s:
                weights = learned(weights, CLASSES.needed("failed:timeout", here.time_s, here))
                here = CLASSES.after(here) or here
            needed_s = CLASSES.needed(outcome, would_take_s, here)
            if needed_s is not None:
                weights = learned(weights, needed_s)
            if number >= learning and would_take_s > CLASSES.first.time_s:
                slow += 1
                begun_too_small += would_take_s > start.time_s
    assert slow > hosts * photos / 10
    return begun_too_small / slow


@pytest.mark.slow
def test_after_learning_few_slow_photos_start_in_too_small_a_class():
    """40% of hosts need 1 s, 40% need 5 s, 20% need 30 s; 70% of attempts fail."""
    shares = [simulate(seed, hosts=150) for seed in range(3)]
    assert max(shares) <= 0.05, shares


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://Shop.Example/a.jpg", "shop.example"),
        ("https://shop.example:443/a", "shop.example"),
        ("http://shop.example:80?x", "shop.example"),
        ("https://shop.example:80/", "shop.example:80"),
        ("http://shop.example:8080/", "shop.example:8080"),
        ("http://[2001:db8::1]:8080/", "[2001:db8::1]:8080"),
        ("ftp://shop.example/", ""),
        ("", ""),
    ],
)
def test_the_measured_host_of_a_url(url, host):
    assert host_of(url) == host
