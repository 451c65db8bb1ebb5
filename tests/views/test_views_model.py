"""Hits as lines, shards, classes of user agents, and adding up: no engine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.views import Hit, Traffic
from headrace.views.errors import InvalidHit, TooManyHits, TooManyIds
from headrace.views.flush import FlushBatch
from headrace.views.model import (
    NUMBER,
    id_key,
    line_of,
    parse_line,
    require_hits,
    require_ids,
    shard_of,
)

IDS = st.text(alphabet="aB9._:@~-", min_size=1, max_size=6)
HITS = st.builds(Hit, id=IDS, n=st.integers(1, 1_000_000), traffic=st.sampled_from(list(Traffic)))


@given(HITS)
def test_a_line_says_what_the_hit_said(hit):
    assert parse_line(line_of(hit)) == (hit.id, NUMBER[hit.traffic], hit.n)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(HITS, min_size=1, max_size=5)), max_size=8))
def test_adding_up_loses_nothing_and_names_each_row_once(entries):
    tally = FlushBatch("0-1")
    wanted: Counter = Counter()
    for number, (hour, hits) in enumerate(entries):
        ms = hour * 3_600_000 + 5
        tally.add([(f"{ms}-{number}", ",".join(map(line_of, hits)))])
        for hit in hits:
            wanted[hit.id, NUMBER[hit.traffic], hour] += hit.n
    counts = tally.counts()
    assert {count[:3]: count.views for count in counts} == wanted
    assert len({count[:3] for count in counts}) == len(counts)


def test_the_shard_of_an_id_is_its_crc_32():
    assert [shard_of("ad:1", 4), shard_of("ad:2", 4), shard_of("ad:3", 4)] == [1, 3, 1]


@pytest.mark.parametrize(
    ("hit", "named"),
    [
        ("", "id ''"),
        ("a,b", "id 'a,b'"),
        ("a*5", "id 'a\\*5'"),
        ("x" * 129, "id"),
        (Hit(id="a", n=0), "n '0'"),
        (Hit(id="a", n=1_000_001), "n '1000001'"),
        (Hit(id="a", n=True), "n 'True'"),
        (Hit(id="a", viewer="a b"), "viewer 'a b'"),
        (Hit(id="a", event="é"), "event 'é'"),
        (Hit(id="a", event=""), "event ''"),
        (Hit(id="a", traffic="robot"), "class 'robot'"),
        (Hit(id="a", traffic=["bot"]), "class"),
        (Hit(id="a", viewer=5), "viewer '5'"),
        (Hit(id="a", event=b"e"), "event"),
        (Hit(id=None), "id 'None'"),
        (Hit(id="a", n=10**5000), "a very large integer"),
        (Hit(id="a", n=None), "n 'None'"),
        (None, "hit 'None': expected a Hit or an id"),
        (5, "hit '5'"),
        ("tom+me@x.example", "use a hash"),
    ],
)
def test_a_hit_that_means_nothing_is_refused_by_name(hit, named):
    with pytest.raises(InvalidHit, match=named):
        require_hits(["good", hit])


@pytest.mark.parametrize("wrong", ["ad:1", b"ad:1", None, 5])
def test_a_lone_id_is_no_list_of_them(wrong):
    with pytest.raises(InvalidHit, match="expected a list of hits; nothing was counted"):
        require_hits(wrong)
    with pytest.raises(InvalidHit, match=r"expected a list of ids$"):
        require_ids(wrong)


def test_a_read_says_nothing_of_counting():
    for wrong in (["a b"], [None], [5]):
        with pytest.raises(InvalidHit) as raised:
            require_ids(wrong)
        assert "counted" not in raised.value.text


def test_calls_are_bounded():
    assert len(require_hits(["a"] * 1_000)) == 1_000
    with pytest.raises(TooManyHits):
        require_hits(["a"] * 1_001)
    with pytest.raises(TooManyIds):
        require_ids(["a"] * 1_001)


def test_ids_of_entries_are_in_order_as_numbers():
    assert id_key("9-1") < id_key("10-0") < id_key("10-9") < id_key("10-10")
