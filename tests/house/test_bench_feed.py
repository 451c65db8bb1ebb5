"""The judges of the feed's figures: the brute-force page is one, and the plot says what was measured."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from bench.feed_push import pays_from, plot
from bench.feed_stage import FOLLOWS, PER_PAGE, make_world


@pytest.mark.parametrize("shape", ["uniform", "zipf"])
def test_the_brute_force_page_is_sorted_by_score_then_id(shape):
    world = make_world(shape, posts=3_000, viewers=1)
    assert {len(world.follows[one[0]]) for one in world.viewers.values()} == set(FOLLOWS)
    for [viewer] in world.viewers.values():
        followed = set(world.follows[viewer].tolist())
        rows = zip(world.scores.tolist(), world.ids, world.author.tolist(), strict=True)
        mine = sorted(((s, i) for s, i, author in rows if author in followed), reverse=True)
        assert world.page_of(viewer) == [i for _, i in mine[:PER_PAGE]]
        assert world.page_of(viewer, 5) == [i for _, i in mine[5 : 5 + PER_PAGE]]


def test_posts_of_the_zipf_world_share_moments():
    world = make_world("zipf", posts=30_000, viewers=1)
    assert len(set(world.scores.tolist())) < len(world.ids)


def test_push_pays_for_who_reads_often():
    costs = {"write": 3.0, "read": 5.0, "pull": 305.0}
    assert pays_from(100, 1.0, **costs) == pytest.approx(1.0)
    assert pays_from(1_000, 3.0, **costs) == pytest.approx(30.0)
    assert pays_from(100, 1.0, write=3.0, read=5.0, pull=1.0) > 1_000


def test_the_plot_has_a_line_for_each_rate():
    costs = {"write into an inbox": 3.0, "read of an inbox": 5.0}
    costs |= {f"pull, {follows:,} follows": 300.0 for follows in FOLLOWS}
    root = ET.fromstring(plot(costs))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(line.get("points").split()) for line in lines] == [len(FOLLOWS)] * 3
